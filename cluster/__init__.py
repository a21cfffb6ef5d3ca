"""Composition: the command line, start and stop order, placement.

The only package that reads argv and the environment, and the only one that imports ray.
"""

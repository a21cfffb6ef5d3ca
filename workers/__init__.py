"""The workers: one process per device, which computes what the engine core has decided.

The only package that imports torch.
"""

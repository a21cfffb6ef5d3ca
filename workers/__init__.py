"""The workers: one process per device, which computes what the engine core has decided.

The only package that imports torch, and only in worker processes: `executor` and what it needs
(`ring`, `rpc`, `process` and their like) run in the engine core as well, without it.
"""

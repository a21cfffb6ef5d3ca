"""Attention over paged keys and values: one protocol (`base`), several back ends behind it.

    reference   plain PyTorch, one request at a time; what the others are compared with
    cpu         PyTorch on CPU: decodes in batches, prefills one by one
    varlen      torch's own paged kernel on CUDA

`select.py` picks one, and holds the function that transformers' models call.
"""

"""Triton's kernels without a GPU: values through its interpreter, which `tests/conftest.py` chooses before triton is imported.

Code is compiled for sm_90 in processes of its own, since a process either interprets or compiles.
"""

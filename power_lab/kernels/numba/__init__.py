"""Exact kernels for the CPU, compiled by Numba: plain functions over addresses, vector code emitted as LLVM IR."""

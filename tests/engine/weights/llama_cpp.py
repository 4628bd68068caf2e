"""llama.cpp's own quantiser, as the library inside xllamacpp exports it."""

from __future__ import annotations

import ctypes

import numpy as np

from power_lab.kernels.quants import QuantType, row_bytes


def quantise(values: np.ndarray, type: QuantType, importance: np.ndarray | None = None) -> np.ndarray:
    """uint8 [N, bytes per row] of f32 [N, K], by `ggml_quantize_chunk`."""
    from xllamacpp import xllamacpp

    function = ctypes.CDLL(xllamacpp.__file__).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    rows, cols = values.shape
    values = np.ascontiguousarray(values, np.float32)
    out = np.empty((rows, row_bytes(type, cols)), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    written = function(
        int(type), values.ctypes.data, out.ctypes.data, 0, rows, cols, None if weights is None else weights.ctypes.data
    )
    assert written == out.nbytes
    return out

"""Which type each tensor of a model takes."""

from __future__ import annotations

from collections.abc import Sequence

from power_lab.kernels.quants import GEOMETRY, QuantType

_Q = QuantType
_FALLBACK = {  # of blocks of 32 and about the same size, as llama.cpp's tools choose
    _Q.Q2_K: _Q.IQ4_NL,
    _Q.Q3_K: _Q.IQ4_NL,
    _Q.IQ4_XS: _Q.IQ4_NL,
    _Q.Q4_K: _Q.Q5_0,
    _Q.Q5_K: _Q.Q5_1,
    _Q.Q6_K: _Q.Q8_0,
}
_STEP_UP = {
    _Q.Q2_K: _Q.Q3_K,
    _Q.Q3_K: _Q.Q4_K,
    _Q.Q4_K: _Q.Q5_K,
    _Q.IQ4_XS: _Q.Q5_K,
    _Q.Q5_K: _Q.Q6_K,
    _Q.Q6_K: _Q.Q8_0,
    _Q.Q4_0: _Q.Q5_0,
    _Q.IQ4_NL: _Q.Q5_0,
    _Q.MXFP4: _Q.Q5_0,
    _Q.Q4_1: _Q.Q5_1,
    _Q.Q5_0: _Q.Q8_0,
    _Q.Q5_1: _Q.Q8_0,
}
_EMBEDDINGS = ("token_embd.weight", "output.weight")


def recipe(name: str, shape: Sequence[int], base: QuantType) -> QuantType:
    """The type of a tensor in a model that is quantised to `base`.

    Norms, biases and other vectors stay F32. The embedding and the output head, on which every token depends, take the next larger
    type, in the spirit of llama.cpp's K_M mixes. Rows that are no whole number of 256 take a type of blocks of 32 that is not
    smaller, rows that are no whole number of those F16.

    Args:
        name: canonical tensor name.
        shape: rows, then columns.
    """
    if len(shape) < 2 or base == _Q.F32:
        return _Q.F32
    type = _STEP_UP.get(base, base) if name in _EMBEDDINGS else base
    if shape[-1] % GEOMETRY[type][0]:
        type = _FALLBACK.get(type, _Q.F16)
    return type if shape[-1] % GEOMETRY[type][0] == 0 else _Q.F16

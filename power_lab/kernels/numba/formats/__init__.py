"""Reading stored weights: for each storage type, LLVM code that turns the next values of a row into vectors of 16 floats."""

from __future__ import annotations

from power_lab.kernels.numba.formats import blocks, plain, superblocks
from power_lab.kernels.numba.formats.base import Format
from power_lab.kernels.quants import QuantType

FORMATS: dict[QuantType, type[Format]] = {
    QuantType.F32: plain.F32Values,
    QuantType.F16: plain.F16Values,
    QuantType.Q4_0: blocks.Q4_0,
    QuantType.Q4_1: blocks.Q4_1,
    QuantType.Q5_0: blocks.Q5_0,
    QuantType.Q5_1: blocks.Q5_1,
    QuantType.Q8_0: blocks.Q8_0,
    QuantType.Q2_K: superblocks.Q2_K,
    QuantType.Q3_K: superblocks.Q3_K,
    QuantType.Q4_K: superblocks.Q4_K,
    QuantType.Q5_K: superblocks.Q5_K,
    QuantType.Q6_K: superblocks.Q6_K,
    QuantType.IQ4_NL: blocks.IQ4_NL,
    QuantType.IQ4_XS: superblocks.IQ4_XS,
    QuantType.BF16: plain.BF16Values,
    QuantType.MXFP4: blocks.MXFP4,
}

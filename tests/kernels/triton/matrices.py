"""Random stored matrices in planes, and their values, for tests with and without a GPU."""

from __future__ import annotations

import numpy as np
import torch

from power_lab.kernels import reference
from power_lab.kernels.probe import random_blocks
from power_lab.kernels.quants import GEOMETRY, QuantType
from power_lab.kernels.triton.operand import WHOLE, narrow
from power_lab.kernels.triton.planes import FORMS, DeviceWeight, repack

BLOCKS_OF_32 = tuple(type for type, (values, _) in GEOMETRY.items() if values == 32)
BLOCKS_OF_256 = tuple(type for type, (values, _) in GEOMETRY.items() if values == 256)
PLAIN = (QuantType.F32, QuantType.F16, QuantType.BF16)


def operand(values: torch.Tensor, type: QuantType) -> tuple[torch.Tensor, torch.Tensor]:
    """What products with matrices of a type are given for f32 values, and the f32 values that it stands for."""
    if type not in FORMS:
        return values.bfloat16(), values.bfloat16().float()
    held = narrow(values, torch.float16)
    return held, held.float() * WHOLE.value


def rounded(values: torch.Tensor, type: QuantType) -> torch.Tensor:
    """A matrix of such values as the matrix unit is given it, but for what the scales and minima of sub-blocks are rounded to."""
    return values.half().float() if type in FORMS else values.bfloat16().float()


def on_device(type: QuantType, rows: int, cols: int, stored: np.ndarray, device: str = "cpu") -> DeviceWeight:
    planes = {
        name: torch.from_numpy(np.array(plane)).to(device) for name, plane in repack(type, rows, cols, stored).items()
    }
    if "values" in planes:
        values = planes["values"]
        planes["values"] = values.view(torch.bfloat16) if type == QuantType.BF16 else values.to(torch.bfloat16)
    return DeviceWeight(type, rows, cols, planes)


def weight(
    type: QuantType, rows: int, cols: int, seed: int = 0, device: str = "cpu"
) -> tuple[DeviceWeight, torch.Tensor]:
    """A random matrix, and its values f32 [rows, cols]; plain ones are rounded to bf16, as they are at load."""
    stored = random_blocks(type, rows, cols, np.random.default_rng(rows * 10007 + cols + seed))
    values = reference.dequantize(type, stored, rows, cols).to(device)
    return on_device(type, rows, cols, stored, device), values.bfloat16().float() if type in PLAIN else values

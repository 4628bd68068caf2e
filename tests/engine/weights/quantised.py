"""Small GGUF files whose tensors are stored in any type, made with our quantiser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from power_lab.engine.weights.quantise import quantise
from power_lab.kernels.quants import QuantType
from tests.engine.weights.ggufs import Gguf, Tensor


def stored(name: str, values: np.ndarray, type: QuantType) -> Tensor:
    """A tensor entry of f32 values [K] or [N, K]."""
    data = quantise(np.atleast_2d(values), type)
    return Tensor(name, values.shape[::-1], int(type), data.tobytes())


def write_gguf(
    path: Path, tensors: Mapping[str, tuple[np.ndarray, QuantType]], pairs: Iterable[bytes] = ()
) -> dict[str, np.ndarray]:
    """Write a GGUF file; `pairs` are metadata from `ggufs.pair`. Gives what each tensor must read as, in the form of a weight source."""
    path.write_bytes(bytes(Gguf(list(pairs), [stored(name, *tensor) for name, tensor in tensors.items()])))
    forms = {name: quantise(np.atleast_2d(values), type) for name, (values, type) in tensors.items()}
    return {name: form[0] if tensors[name][0].ndim == 1 else form for name, form in forms.items()}

"""One stored tensor of a model file, as it lies there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from power_lab.errors import ModelFileError
from power_lab.kernels.quants import QuantType


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        name: its name in the file.
        kind: the storage type's name, also of types that Power Lab cannot compute on.
        shape: row-major, so GGUF's dimensions reversed: (rows, cols) for a matrix, (size,) for a vector.
        stored: uint8 view of the mapped bytes: `shape[:-1] + (bytes per row,)`. Nothing is copied. Types whose rows are
            not whole bytes (SafeTensors' F4 and F6) come as one flat row.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    stored: np.ndarray

    @property
    def type(self) -> QuantType:
        """The storage type. Raises ModelFileError naming type and tensor when there is no arithmetic for it."""
        if self.kind not in QuantType.__members__:
            raise ModelFileError(
                f"Tensor {self.name!r} is stored as {self.kind}, which is not supported.",
                f"Supported types: {', '.join(QuantType.__members__)}.",
            )
        return QuantType[self.kind]

    @property
    def data(self) -> np.ndarray:
        """`stored`, if its type can be computed on. Raises ModelFileError for an unsupported type."""
        _ = self.type
        return self.stored

    @property
    def values(self) -> int:
        return math.prod(self.shape)

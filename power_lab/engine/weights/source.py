"""Where a model's weights come from: one interface over files and memory, strict about names and shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from power_lab.engine.weights.tensor import TensorInfo
from power_lab.errors import ModelFileError
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes

_PLAIN: dict[QuantType, type[np.generic]] = {
    QuantType.F32: np.float32,
    QuantType.F16: np.float16,
    QuantType.BF16: np.uint16,  # numpy has no bf16: the bits
}
_OF_DTYPE = {np.dtype(np.float32): QuantType.F32, np.dtype(np.float16): QuantType.F16}

OTHER = "The configuration is another model's, or the weights are in a form that is not supported; fetch the original model."


class WeightSource(Protocol):
    """Named stored tensors.

    Arrays are in the form of `Weight.data`: for quantised types uint8 [rows, bytes per row], else [rows, cols] float32,
    float16 or, for BF16, its bits as uint16. They are read-only views where the source allows it.
    """

    def names(self) -> list[str]: ...

    def kinds(self) -> frozenset[str]:
        """Names of the storage types of its tensors."""
        ...

    def matrix(self, name: str, rows: int, cols: int) -> tuple[QuantType, np.ndarray]:
        """A matrix [rows, cols]. Raises ModelFileError when it is missing, of another shape or an unsupported type."""
        ...

    def vector(self, name: str, size: int) -> tuple[QuantType, np.ndarray]:
        """A vector [size], with the same errors."""
        ...


class HasTensors(Protocol):
    """An open model file, or several as one."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...


def unused(source: WeightSource, used: Collection[str]) -> list[str]:
    """Names in the source that the model did not ask for, in the source's order."""
    known = frozenset(used)
    return [name for name in source.names() if name not in known]


def refuse_unused(source: WeightSource, used: Collection[str], ignored: Collection[str] = ()) -> None:
    """Raises ModelFileError naming tensors that are neither used nor knowingly ignored.

    A weight left out is another model.
    """
    left = unused(source, {*used, *ignored})
    if left:
        raise ModelFileError(f"The architecture does not use these tensors of the file: {shown(left)}.", OTHER)


def shown(names: list[str]) -> str:
    """Names for a message, however many there are."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True, slots=True, eq=False)
class _Some:
    """Some tensors of an open model."""

    path: Path
    tensors: Mapping[str, TensorInfo]


class FileSource:
    """The tensors of an open model (`GgufModel`, `SafeTensorsModel` or one file of theirs), mapped.

    Nothing is copied but what lies at an odd address for its values: SafeTensors allows any, and kernels read whole words.
    """

    def __init__(self, model: HasTensors) -> None:
        self._model = model

    def names(self) -> list[str]:
        return list(self._model.tensors)

    def kinds(self) -> frozenset[str]:
        return frozenset(tensor.kind for tensor in self._model.tensors.values())

    def matrix(self, name: str, rows: int, cols: int) -> tuple[QuantType, np.ndarray]:
        return self._stored(name, (rows, cols))

    def vector(self, name: str, size: int) -> tuple[QuantType, np.ndarray]:
        return self._stored(name, (size,))

    def stored(self, name: str) -> TensorInfo:
        """The tensor as it lies in its file, whatever its type. Raises ModelFileError when it is missing."""
        try:
            return self._model.tensors[name]
        except KeyError:
            raise ModelFileError(f"{self._model.path}: tensor {name!r} is missing.", OTHER) from None

    def split(self, prefixes: Iterable[str]) -> tuple[FileSource, FileSource]:
        """The tensors whose names begin with none of the prefixes, and the others."""
        begins = tuple(prefixes)
        kept: dict[str, TensorInfo] = {}
        apart: dict[str, TensorInfo] = {}
        for name, tensor in self._model.tensors.items():
            (apart if name.startswith(begins) else kept)[name] = tensor
        return FileSource(_Some(self._model.path, kept)), FileSource(_Some(self._model.path, apart))

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[QuantType, np.ndarray]:
        tensor = self.stored(name)
        _expect(name, tensor.shape, shape)
        kind, data = tensor.type, tensor.data
        return kind, np.require(data.view(_PLAIN[kind]), requirements="A") if kind in _PLAIN else data


class MemorySource:
    """Tensors in memory: float32 and float16 arrays, or (type, uint8 [rows, bytes per row]) for stored formats."""

    def __init__(self, tensors: Mapping[str, np.ndarray | tuple[QuantType, np.ndarray]]) -> None:
        self._tensors = {name: _checked(name, tensor) for name, tensor in tensors.items()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def kinds(self) -> frozenset[str]:
        return frozenset(kind.name for kind, _ in self._tensors.values())

    def matrix(self, name: str, rows: int, cols: int) -> tuple[QuantType, np.ndarray]:
        return self._stored(name, (rows, cols))

    def vector(self, name: str, size: int) -> tuple[QuantType, np.ndarray]:
        return self._stored(name, (size,))

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[QuantType, np.ndarray]:
        if name not in self._tensors:
            raise ModelFileError(f"Tensor {name!r} is missing.")
        kind, data = self._tensors[name]
        if kind in _PLAIN:
            _expect(name, data.shape, shape)
        else:
            values, size = GEOMETRY[kind]
            _expect(name, (*data.shape[:-1], data.shape[-1] // size * values), shape)
        return kind, data


def _checked(name: str, tensor: np.ndarray | tuple[QuantType, np.ndarray]) -> tuple[QuantType, np.ndarray]:
    if isinstance(tensor, np.ndarray):
        if tensor.dtype not in _OF_DTYPE:
            raise ModelFileError(f"Tensor {name!r} is {tensor.dtype}; float32 or float16 is expected.")
        return _OF_DTYPE[tensor.dtype], np.ascontiguousarray(tensor)
    kind, data = tensor
    whole = row_bytes(kind, GEOMETRY[kind][0])
    if data.dtype != _PLAIN.get(kind, np.uint8) or (kind not in _PLAIN and data.shape[-1] % whole):
        raise ModelFileError(f"Tensor {name!r} is {data.dtype} {data.shape}, which are not rows of {kind.name} blocks.")
    return kind, np.ascontiguousarray(data)


def _expect(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ModelFileError(f"Tensor {name!r} has shape {list(found)}, but {list(expected)} is expected.", OTHER)

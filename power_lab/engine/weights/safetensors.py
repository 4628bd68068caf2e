"""A memory-mapped reader of SafeTensors files, and of models made of several (source: the SafeTensors format description).

A file is the length of its header (8 bytes, little-endian), the header in JSON, and the tensors' bytes, which it names without overlap
and without holes. As with GGUF, nothing is believed: whatever is wrong ends in ModelFileError, which names the file and tensor.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from power_lab.engine.weights.filenames import INDEX, SINGLE
from power_lab.engine.weights.mapped import MappedFile, is_plain_name, member, read_bounded
from power_lab.engine.weights.strict_json import parse_object
from power_lab.engine.weights.tensor import TensorInfo
from power_lab.errors import ModelFileError

MAX_HEADER_BYTES = 100_000_000  # the format's rule
MAX_INDEX_BYTES = 1 << 26  # the largest indices have some 20 MB
MAX_FILES = 1 << 12
MAX_RANK = 16

DTYPES: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of one value. Power Lab computes on F32, F16 and BF16; tensors of the others are listed, but refused when asked for."""

_FIELDS = {"dtype", "shape", "data_offsets"}


class SafeTensorsFile(MappedFile):
    """One open file. Made by `SafeTensorsFile.open`.

    Attributes:
        metadata: the free texts under `__metadata__`.
        tensors: name -> TensorInfo, in the order of their bytes.
    """

    FORMAT = "SafeTensors"
    LEAST = 10

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        super().__init__(path, mapped)
        length = struct.unpack_from("<Q", mapped)[0]
        if length > min(MAX_HEADER_BYTES, self.size - 8):
            raise self._wrong(f"the header's length {length} exceeds the file or the {MAX_HEADER_BYTES} bytes allowed")
        header = mapped[8 : 8 + length]
        if header[:1] != b"{":
            raise self._wrong("the header does not begin with '{'")
        entries = parse_object(header, str(path))
        self.metadata = self._texts(entries.pop("__metadata__", {}))
        self.tensors = self._directory(entries, mapped, 8 + length)

    def close(self) -> None:
        self.tensors = {}
        super().close()

    def _wrong(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}.", "The file is damaged or not SafeTensors; fetch it again.")

    def _texts(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self._wrong("'__metadata__' is not an object of texts")
        return value

    def _directory(self, entries: dict[str, Any], mapped: mmap.mmap, start: int) -> dict[str, TensorInfo]:
        checked = {name: self._entry(name, entry) for name, entry in entries.items()}
        tensors: dict[str, TensorInfo] = {}
        at, before = 0, "the header"
        for name, (kind, shape, begin, end) in sorted(checked.items(), key=lambda item: item[1][2:]):
            if begin != at:
                fault = "overlap" if begin < at else f"leave a hole of {begin - at} bytes between them"
                raise self._wrong(f"{before} and tensor {name!r} {fault}")
            if start + end > self.size:
                raise self._wrong(f"tensor {name!r} needs bytes to {start + end}, but the file ends at {self.size}")
            stored = np.frombuffer(mapped, np.uint8, end - begin, start + begin)
            if shape and DTYPES[kind] % 8 == 0:
                stored = stored.reshape((*shape[:-1], shape[-1] * DTYPES[kind] // 8))
            tensors[name] = TensorInfo(name, kind, shape, stored)
            at, before = end, f"tensor {name!r}"
        if start + at != self.size:
            raise self._wrong(f"{self.size - start - at} bytes after {before} belong to no tensor")
        return tensors

    def _entry(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
        """One header entry: type, shape, first and last offset. Its sizes are sound by themselves."""
        if not name:
            raise self._wrong("a tensor has no name")
        if not isinstance(entry, dict) or entry.keys() != _FIELDS:
            raise self._wrong(f"tensor {name!r} does not have exactly 'dtype', 'shape' and 'data_offsets'")
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(kind, str) or kind not in DTYPES:
            raise self._wrong(f"tensor {name!r} has the unknown dtype {str(kind)[:40]!r}")
        if (
            not _sizes(shape)
            or len(shape) > MAX_RANK
            or math.prod(size or 1 for size in shape) * DTYPES[kind] >= 1 << 62
        ):
            raise self._wrong(f"tensor {name!r} has an impossible shape")
        if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._wrong(f"tensor {name!r} has impossible offsets")
        bits = math.prod(shape) * DTYPES[kind]
        if bits != 8 * (offsets[1] - offsets[0]):
            held = offsets[1] - offsets[0]
            raise self._wrong(f"tensor {name!r}, {kind} {shape}, does not have the {held} bytes of its offsets")
        return kind, tuple(shape), offsets[0], offsets[1]


class SafeTensorsModel:
    """All SafeTensors files of a folder in Hugging Face layout, open and checked together. Made by `SafeTensorsModel.open`.

    Attributes:
        path: the folder; files: its tensor files and, if there is one, the index before them.
        size: bytes of the tensor files.
        tensors: of all files, name -> TensorInfo, in the files' order.
    """

    def __init__(self, folder: Path, index: tuple[Path, ...], parts: list[SafeTensorsFile]) -> None:
        self.path = folder
        self.files = (*index, *(part.path for part in parts))
        self.size = sum(part.size for part in parts)
        self.tensors: dict[str, TensorInfo] = {name: tensor for part in parts for name, tensor in part.tensors.items()}
        self._parts = parts

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open `model.safetensors`, or all files that `model.safetensors.index.json` names.

        Raises ModelFileError naming the file or tensor that is missing, not sound or in one place only; nothing stays open.
        """
        single, index = os.path.lexists(folder / SINGLE), os.path.lexists(folder / INDEX)
        if single and index:
            raise ModelFileError(
                f"{folder}: holds {SINGLE} and {INDEX}: two models.", "Remove the one that is not meant."
            )
        with ExitStack() as opened:
            if not index:
                model = cls(folder, (), [opened.enter_context(SafeTensorsFile.open(member(folder, SINGLE)))])
            else:
                path = member(folder, INDEX)
                where = _weight_map(path)
                names = sorted(set(where.values()))
                parts = {name: opened.enter_context(SafeTensorsFile.open(member(folder, name))) for name in names}
                _refuse_strays(path, where, parts)
                model = cls(folder, (path,), list(parts.values()))
            opened.pop_all()
        return model

    def close(self) -> None:
        """Let go of the files; views handed out earlier stay valid."""
        self.tensors = {}
        for part in self._parts:
            part.close()


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says; every one the name of a SafeTensors file in the folder."""
    where = parse_object(read_bounded(path, MAX_INDEX_BYTES), str(path)).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ModelFileError(f"{path}: key 'weight_map' is not an object with tensors.", "Fetch the file again.")
    for tensor, name in where.items():
        if not isinstance(name, str) or not is_plain_name(name) or not name.endswith(".safetensors"):
            raise ModelFileError(
                f"{path}: tensor {tensor!r} lies in {str(name)[:80]!r}, which is not the name of a SafeTensors file in the folder."
            )
    if len(set(where.values())) > MAX_FILES:
        raise ModelFileError(f"{path}: names more than {MAX_FILES} files.")
    return where


def _refuse_strays(path: Path, where: dict[str, str], parts: dict[str, SafeTensorsFile]) -> None:
    """The index and the files must name the same tensors."""
    for tensor, name in where.items():
        if tensor not in parts[name].tensors:
            raise ModelFileError(
                f"{path}: tensor {tensor!r} is not in {name!r}.", "Fetch the index and that file again."
            )
    for name, part in parts.items():
        for tensor in part.tensors:
            if where.get(tensor) != name:
                raise ModelFileError(
                    f"{path}: tensor {tensor!r} of {name!r} is missing or elsewhere in 'weight_map'.",
                    "Fetch the index and that file again.",
                )


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)

"""A memory-mapped reader of GGUF files, versions 2 and 3 (source: the GGUF format document and ggml's type table).

A model file is hostile input until proven otherwise: every count, length, offset and extent is checked against the
bytes that are really there before anything of that size is made. Whatever is wrong ends in ModelFileError, which names
the key or tensor.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from power_lab.engine.weights.mapped import MappedFile
from power_lab.engine.weights.tensor import TensorInfo
from power_lab.engine.weights.values import TypedValues
from power_lab.errors import ModelFileError

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 21  # in all arrays together; the largest vocabularies have 262k tokens and 515k merges
MAX_HEADER_BYTES = 1 << 28  # before the tensors; it is read into memory, and the largest have some 30 MB
MAX_TEXT_BYTES = 1 << 24  # of one string value; chat templates have some 20k
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
MAX_KEY_BYTES = 65535  # both limits are the format document's
MAX_NAME_BYTES = 64
MAX_PARTS = 1 << 12

_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""GGML type number -> (name, values per block, bytes per block), for every type that files hold."""

_UNREADABLE = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Numbers that the format has given up or that only live in memory: their sizes differed between versions."""


@dataclass(frozen=True, slots=True)
class Split:
    """Which part of a model in several files a file is.

    Attributes:
        number: from 0; count: of all parts; tensors: in all parts together.
    """

    number: int
    count: int
    tensors: int


class GgufFile(MappedFile, TypedValues):
    """One open file: metadata and mapped tensors. Made by `GgufFile.open`; `GgufModel` joins the parts of a model.

    Attributes:
        version: 2 or 3.
        metadata: key -> bool, int, float, str, list[str] or a 1-D numpy array.
        tensors: name -> TensorInfo, in file order.
    """

    FORMAT = "GGUF"
    LEAST = 24

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        super().__init__(path, mapped)
        reader = _Reader(mapped, path)
        self.version = reader.version
        self.metadata: dict[str, Any] = reader.metadata
        self.tensors: dict[str, TensorInfo] = reader.tensors

    def close(self) -> None:
        self.tensors = {}
        super().close()

    def tensor(self, name: str) -> TensorInfo:
        """The named tensor. Raises ModelFileError when the file has none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing.") from None

    def split(self) -> Split | None:
        """Its place among the parts of a model; None for a whole one. Raises ModelFileError for impossible numbers."""
        count = self.get("split.count", int, 1, 1, MAX_PARTS)
        number = self.get("split.no", int, 0, 0, count - 1)
        return None if count == 1 else Split(number, count, self.require("split.tensors.count", int, 0, MAX_TENSORS))

    def _value(self, key: str) -> Any:
        return self.metadata.get(key)


class _Reader:
    """One pass over the header. `at` is the position, never past `limit`: the end of the file or of the longest header."""

    def __init__(self, mapped: mmap.mmap, path: Path) -> None:
        self.buffer = mapped
        self.size = len(mapped)
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.path = path
        self.at = 0
        self.strings = 0
        if mapped[:4] != b"GGUF":
            raise self.wrong("the first four bytes are not 'GGUF'")
        self.at = 4
        self.version = self.number("<I", "version")
        if self.version in (2 << 24, 3 << 24):
            raise ModelFileError(
                f"{path}: the file is big-endian.",
                "Convert it: pip install gguf, then gguf-convert-endian FILE little.",
            )
        if self.version not in (2, 3):
            raise ModelFileError(
                f"{path}: GGUF version {self.version} is not supported (2 and 3 are).",
                "Convert the model again with a current llama.cpp, or fetch the file again if it should be one of them.",
            )
        tensors = self.count("tensor count", MAX_TENSORS, 8 + 4 + 8 + 4 + 8)
        keys = self.count("metadata key count", MAX_KEYS, 8 + 4 + 1)
        self.metadata: dict[str, Any] = {}
        for index in range(keys):
            key = self.text(f"name of metadata key {index}", MAX_KEY_BYTES)
            if key in self.metadata:
                raise self.wrong(f"metadata key {key!r} comes twice")
            self.metadata[key] = self.value(f"metadata key {key!r}")
        self.tensors = self.directory(tensors)

    def wrong(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}.", "The file is damaged or not a GGUF model; fetch it again.")

    def take(self, size: int, what: str) -> int:
        """Start of the next `size` bytes, which are then behind us."""
        start = self.at
        if size > self.limit - start:
            end = f"the file ends at {self.size}" if self.limit == self.size else f"a header has at most {self.limit}"
            raise self.wrong(f"{what} needs {size} bytes at offset {start}, but {end}")
        self.at = start + size
        return start

    def number(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.buffer, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, most: int, smallest: int) -> int:
        """A count of things that take at least `smallest` bytes each."""
        count = self.number("<Q", what)
        if count > most or count * smallest > self.limit - self.at:
            raise self.wrong(f"{what} {count} is more than the file can hold")
        return count

    def text(self, what: str, most: int) -> str:
        length = self.number("<Q", what)
        if length > most:
            raise self.wrong(f"{what} has {length} bytes; at most {most} are allowed")
        start = self.take(length, what)
        try:
            return self.buffer[start : self.at].decode()
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not UTF-8") from None

    def value(self, what: str) -> Any:
        kind = self.number("<I", what)
        if kind == _STRING:
            return self.text(what, MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self.array(what)
        return self.scalars(kind, 1, what)[0].item()

    def array(self, what: str) -> list[str] | np.ndarray:
        kind = self.number("<I", what)
        if kind == _ARRAY:
            raise self.wrong(f"{what} is an array of arrays, which no model file needs")
        if kind != _STRING:
            return self.scalars(kind, self.number("<Q", what), what)
        count = self.count(f"{what}: array length", MAX_STRINGS - self.strings, 8)
        self.strings += count
        return self.string_array(count, what)

    def scalars(self, kind: int, count: int, what: str) -> np.ndarray:
        """A copy: a few numbers should not keep the whole file mapped."""
        if kind not in _SCALARS:
            raise self.wrong(f"{what} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize, what)
        values = np.frombuffer(self.buffer, np.uint8 if kind == 7 else dtype, count, start)
        if kind != 7:
            return values.astype(dtype.newbyteorder("="))
        if (values > 1).any():
            raise self.wrong(f"{what} has a bool that is neither 0 nor 1")
        return values.astype(np.bool_)

    def string_array(self, count: int, what: str) -> list[str]:
        """The hot loop of opening (100k strings in a small model), so it is written out flat."""
        buffer, size, at, length_at = self.buffer, self.limit, self.at, struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for index in range(count):
            if at + 8 > size:
                raise self.wrong(f"{what}: item {index} lies past the end of the file or of the longest header")
            end = at + 8 + length_at(buffer, at)[0]
            if end > size:
                raise self.wrong(f"{what}: item {index} lies past the end of the file or of the longest header")
            try:
                texts.append(buffer[at + 8 : end].decode())
            except UnicodeDecodeError:
                raise self.wrong(f"{what}: item {index} is not UTF-8") from None
            at = end
        self.at = at
        return texts

    def directory(self, count: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.wrong(
                f"metadata key 'general.alignment' is {alignment!r}, not a power of two to {MAX_ALIGNMENT}"
            )
        entries = [self.entry(index) for index in range(count)]
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        extents: list[tuple[int, int, str]] = []
        for name, number, shape, offset in entries:
            kind, values, size = TYPES[number]
            row = shape[-1] // values * size
            total = math.prod(shape[:-1]) * row
            if name in tensors:
                raise self.wrong(f"tensor {name!r} comes twice")
            if offset % alignment:
                raise self.wrong(f"tensor {name!r}: offset {offset} is not a multiple of the alignment {alignment}")
            if start + offset + total > self.size:
                where = f"{total} bytes at offset {start + offset}, but the file ends at {self.size}"
                raise self.wrong(f"tensor {name!r} needs {where}")
            stored = np.frombuffer(self.buffer, np.uint8, total, start + offset).reshape((*shape[:-1], row))
            tensors[name] = TensorInfo(name, kind, shape, stored)
            extents.append((offset, offset + total, name))
        self.refuse_overlap(extents)
        return tensors

    def entry(self, index: int) -> tuple[str, int, tuple[int, ...], int]:
        """One directory entry: name, type number, row-major shape, offset. Its sizes are sound by themselves."""
        name = self.text(f"name of tensor {index}", MAX_NAME_BYTES)
        rank = self.number("<I", f"tensor {name!r}")
        if not 1 <= rank <= MAX_DIMS:
            raise self.wrong(f"tensor {name!r} has {rank} dimensions; 1 to {MAX_DIMS} are allowed")
        shape = tuple(self.number("<Q", f"tensor {name!r}") for _ in range(rank))[::-1]
        number = self.number("<I", f"tensor {name!r}")
        offset = self.number("<Q", f"tensor {name!r}")
        if number in _UNREADABLE:
            raise ModelFileError(
                f"{self.path}: tensor {name!r} is stored as {_UNREADABLE[number]}, which is not a type of model files today.",
                "Fetch or convert the model anew.",
            )
        if number not in TYPES:
            raise self.wrong(f"tensor {name!r} has the unknown type {number}")
        kind, values, _ = TYPES[number]
        if not all(shape) or math.prod(shape) >= 1 << 62:
            raise self.wrong(f"tensor {name!r} has the impossible shape {shape}")
        if shape[-1] % values:
            raise self.wrong(f"tensor {name!r}: rows of {shape[-1]} values are not whole {kind} blocks of {values}")
        return name, number, shape, offset

    def refuse_overlap(self, extents: Iterable[tuple[int, int, str]]) -> None:
        end, before = 0, ""
        for start, stop, name in sorted(extents):
            if start < end:
                raise self.wrong(f"tensors {before!r} and {name!r} overlap")
            end, before = stop, name

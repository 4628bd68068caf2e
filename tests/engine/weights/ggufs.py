"""A tiny GGUF writer that can also write nonsense: every count, length and offset may be overridden."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS = "BbHhIif?__Qqd"


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(kind: int, content) -> bytes:
    if kind == STRING:
        return text(content)
    if kind == ARRAY:
        inner, items = content
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, item) for item in items)
    return struct.pack("<" + _FORMS[kind], content)


def pair(key: str | bytes, kind: int, content) -> bytes:
    return text(key) + struct.pack("<I", kind) + value(kind, content)


@dataclass
class Tensor:
    name: str | bytes
    dims: tuple[int, ...]  # in the file's order: row length first
    kind: int
    data: bytes
    offset: int | None = None
    rank: int | None = None


@dataclass
class Gguf:
    """`bytes()` gives the file. Fields that are None follow from the others."""

    pairs: list[bytes] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    keys: int | None = None
    count: int | None = None

    def __bytes__(self) -> bytes:
        head = self.magic + struct.pack("<I", self.version)
        head += struct.pack("<Q", len(self.tensors) if self.count is None else self.count)
        head += struct.pack("<Q", len(self.pairs) if self.keys is None else self.keys)
        head += b"".join(self.pairs)
        data = b""
        for tensor in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            rank = len(tensor.dims) if tensor.rank is None else tensor.rank
            head += text(tensor.name) + struct.pack("<I", rank) + struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
            head += struct.pack("<IQ", tensor.kind, offset)
            data += tensor.data
        return head + b"\0" * (-len(head) % self.alignment) + data


def small() -> Gguf:
    """A sound file with every value type and three tensors."""
    kinds = {U8: 200, I8: -3, U16: 60000, I16: -3, U32: 1 << 31, I32: -3, F32: 0.5, BOOL: True, U64: 1 << 60, I64: -3}
    pairs = [pair(f"test.v{kind}", kind, number) for kind, number in kinds.items()]
    pairs += [pair("test.f64", F64, 0.1), pair("general.name", STRING, "tiny ⟨é⟩"), pair("llama.block_count", U32, 2)]
    pairs += [pair("test.strings", ARRAY, (STRING, ["", "a", "日本"])), pair("test.ints", ARRAY, (I32, [1, -2, 3]))]
    pairs += [pair("test.bools", ARRAY, (BOOL, [True, False])), pair("test.none", ARRAY, (F32, []))]
    tensors = [
        Tensor("a.weight", (32, 3), 3, bytes(range(60))),
        Tensor("b.weight", (5,), 0, struct.pack("<5f", 1, 2, 3, 4, 5)),
        Tensor("c.weight", (2, 3, 2), 1, bytes(24)),
    ]
    return Gguf(pairs, tensors)

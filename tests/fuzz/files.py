"""Mutations of model files that know the formats: they reach the checks that lie behind lengths, counts and offsets.

Pure functions: the same data and generator state give the same bytes. The originals are sound files.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

EDGES = (0, 1, 2, 3, 7, 8, 31, 32, 33, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 61, (1 << 63) - 1, 1 << 63,
         (1 << 64) - 1)  # fmt: skip
TEXTS = (
    b"",
    b"../../etc/passwd",
    b"a\0b",
    b"\xff\xfe",
    b"\x1b[31m",
    "é".encode(),
    b"general.alignment",
    b"split.count",
    b"t" * 70,
)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True)
class Field:
    """A number of a GGUF header, or a text (then `size` is that of its bytes, and its length stands 8 bytes before)."""

    at: int
    size: int
    text: bool = False


def gguf_fields(data: bytes) -> list[Field]:
    """Every field of a sound file's header."""
    return list(_Walk(data).fields())


class _Walk:
    """One pass over a sound header."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 4

    def number(self, size: int) -> tuple[Field, int]:
        field = Field(self.at, size)
        self.at += size
        return field, int.from_bytes(self.data[field.at : self.at], "little")

    def text(self) -> Iterator[Field]:
        length, size = self.number(8)
        yield length
        yield Field(self.at, size, text=True)
        self.at += size

    def value(self, kind: int) -> Iterator[Field]:
        if kind == 8:
            yield from self.text()
        elif kind == 9:
            (inner, kind), (length, count) = self.number(4), self.number(8)
            yield from (inner, length)
            for _ in range(count):
                yield from self.value(kind)
        else:
            yield self.number(_SIZES[kind])[0]

    def fields(self) -> Iterator[Field]:
        yield self.number(4)[0]
        (first, tensors), (second, keys) = self.number(8), self.number(8)
        yield from (first, second)
        for _ in range(keys):
            yield from self.text()
            field, kind = self.number(4)
            yield field
            yield from self.value(kind)
        for _ in range(tensors):
            yield from self.text()
            field, rank = self.number(4)
            yield field
            for size in [8] * rank + [4, 8]:
                yield self.number(size)[0]


def mutate_gguf(data: bytes, rng: random.Random) -> bytes:
    """One to four changed fields, then perhaps a change of the bytes as such."""
    fields = gguf_fields(data)
    if rng.random() < 0.1:
        return mutate_bytes(data, rng)
    content = bytearray(data)
    texts: list[tuple[Field, bytes]] = []
    for field in rng.sample(fields, min(len(fields), rng.choice((1, 1, 1, 2, 2, 4)))):
        if field.text:
            texts.append((field, _text(data, fields, field, rng)))
        else:
            content[field.at : field.at + field.size] = _number(data, fields, field, rng)
    for field, text in sorted(
        texts, key=lambda item: -item[0].at
    ):  # from the end: nothing moves that is still to change
        if rng.random() < 0.8:
            content[field.at - 8 : field.at] = struct.pack("<Q", len(text))
        content[field.at : field.at + field.size] = text
    return mutate_bytes(bytes(content), rng) if rng.random() < 0.1 else bytes(content)


def _number(data: bytes, fields: list[Field], field: Field, rng: random.Random) -> bytes:
    before = int.from_bytes(data[field.at : field.at + field.size], "little")
    other = rng.choice([other for other in fields if not other.text])
    choices: list[Callable[[], int]] = [
        lambda: rng.choice(EDGES),
        lambda: before + rng.choice((-32, -8, -1, 1, 8, 32)),
        lambda: before ^ (1 << rng.randrange(8 * field.size)),
        lambda: int.from_bytes(data[other.at : other.at + other.size], "little"),
        lambda: rng.randrange(48),
    ]
    return (rng.choice(choices)() % (1 << 8 * field.size)).to_bytes(field.size, "little")


def _text(data: bytes, fields: list[Field], field: Field, rng: random.Random) -> bytes:
    before = data[field.at : field.at + field.size]
    other = rng.choice([other for other in fields if other.text])
    choices: list[Callable[[], bytes]] = [
        lambda: rng.choice(TEXTS),
        lambda: data[other.at : other.at + other.size],
        lambda: before[: rng.randrange(len(before) + 1)],
        lambda: _flipped(before, rng),
    ]
    return rng.choice(choices)()


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """The header's tree changed, or its text, its length, or the bytes as such."""
    length = struct.unpack_from("<Q", data)[0]
    header, rest = data[8 : 8 + length], data[8 + length :]
    way = rng.random()
    if way < 0.65:
        header = mutate_json(header, rng)
    elif way < 0.75:
        header = header + rng.choice((b" ", b"\n", b"\0", b"x", b" " * 7))
    elif way < 0.85:
        rest = mutate_bytes(rest, rng)
    elif way < 0.92:
        return mutate_bytes(data, rng)
    size = len(header) if rng.random() < 0.9 else rng.choice((*EDGES, len(header) - 1, len(header) + 1))
    return struct.pack("<Q", size % (1 << 64)) + header + rest


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """One to three changed places of the tree; at times a key that comes twice, or a change of the bytes as such."""
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = _changed(tree, rng)
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 2))).encode(
        errors="surrogatepass"
    )
    way = rng.random()
    if way < 0.08:
        return _key_twice(text, rng)
    return mutate_bytes(text, rng) if way < 0.2 else text


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of every value inside."""
    places: list[tuple[Any, Any]] = []
    open_containers = [tree]
    while open_containers:
        container = open_containers.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            places.append((container, key))
            if isinstance(container[key], (dict, list)):
                open_containers.append(container[key])
    return places


def _changed(tree: Any, rng: random.Random) -> Any:
    places = _places(tree) if isinstance(tree, (dict, list)) else []
    if not places or rng.random() < 0.02:
        return _odd(tree, rng)
    container, key = rng.choice(places)
    other = rng.choice(places)
    way = rng.random()
    if way < 0.45:
        container[key] = _odd(container[key], rng)
    elif way < 0.6:
        container[key] = json.loads(
            json.dumps(other[0].get(other[1]) if isinstance(other[0], dict) else other[0][other[1]])
        )
    elif way < 0.7:
        del container[key]
    elif isinstance(container, list):
        container.insert(key, _odd(container[key], rng))
    else:
        names = ("", "__metadata__", "../x", "a\0b", "\x1b[2J", "dtype", str(other[1]), f"{key}x", "é", "\ud800")
        container[rng.choice(names)] = container.pop(key) if way < 0.9 else container[key]
    return tree


def _odd(before: Any, rng: random.Random) -> Any:
    if isinstance(before, int) and rng.random() < 0.7:
        return rng.choice(
            (before + rng.choice((-4, -1, 1, 4)), -before, before * 2, before // 2, rng.choice(EDGES), float(before))
        )
    if isinstance(before, str) and rng.random() < 0.4:
        return rng.choice(
            (before + "x", before[:-1], "F32", "F16", "BF16", "I64", "F8_E4M3", "F4", "../" + before, "/etc/passwd")
        )
    deep: Any = rng.choice((0, "x"))
    for _ in range(rng.choice((3, 60, 70, 250))):  # three of them still fit Python's own encoder
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return rng.choice(
        (
            None,
            True,
            False,
            0,
            -1,
            1 << 62,
            1 << 64,
            10**30,
            0.5,
            1e300,
            float("nan"),
            float("inf"),
            "",
            "x",
            [],
            {},
            [0],
            deep,
        )
    )


def _key_twice(text: bytes, rng: random.Random) -> bytes:
    """An object begins with a key that it has again."""
    opening = [at for at in range(len(text) - 1) if text[at : at + 2] == b'{"']
    if not opening:
        return text
    at = rng.choice(opening) + 1
    key = text[at : text.index(b'"', at + 1) + 1]
    return text[:at] + key + b": 0, " + text[at:]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """What needs no format: flips, cuts, repeats, noise."""
    content = bytearray(data)
    if not content:
        return rng.randbytes(rng.randrange(64))
    start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    way = rng.randrange(7)
    if way == 0:
        return bytes(content[: rng.randrange(len(content))])
    if way == 1:
        return bytes(content[:start] + content[end:])
    if way == 2:
        return bytes(content[:end] + content[start:])
    if way == 3:
        return bytes(content + rng.choice((b"\0" * 32, b" ", rng.randbytes(rng.randrange(1, 64)))))
    if way == 4:
        content[start:end] = rng.randbytes(end - start)
        return bytes(content)
    return _flipped(data, rng)


def _flipped(data: bytes, rng: random.Random) -> bytes:
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4)) if content else 0):
        content[rng.randrange(len(content))] = rng.choice((0, 1, 34, 92, 123, 127, 128, 255, rng.randrange(256)))
    return bytes(content)

"""A source under other names: from a Hugging Face checkpoint's tensor names to the canonical ones, strict both ways."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

import numpy as np

from power_lab.engine.weights.source import OTHER, FileSource, shown
from power_lab.errors import ModelFileError
from power_lab.kernels.quants import QuantType

HARMLESS_LEFTOVERS = ("*.rotary_emb.inv_freq", "*.attn.masked_bias", "*.attention.masked_bias")
"""Buffers that older checkpoints stored beside the weights and that follow from the config."""

_COMPARED_AT_ONCE = 1 << 24  # bytes


class NamedSource:
    """A WeightSource under other names.

    `names()` gives the canonical names that are stored, then the stored names that the map does not know.

    Args:
        source: the tensors under the file's own names.
        names: canonical name -> stored name; a name that is not stored is no error until it is asked for.
    """

    def __init__(self, source: FileSource, names: Mapping[str, str]) -> None:
        if len(set(names.values())) != len(names):
            raise ValueError("two canonical names stand for the same stored tensor")
        self._source = source
        self._stored_as = dict(names)
        known, present = frozenset(names.values()), frozenset(source.names())
        self._known = [name for name, stored in names.items() if stored in present]
        self._unknown = [name for name in source.names() if name not in known]

    def names(self) -> list[str]:
        return self._known + self._unknown

    def kinds(self) -> frozenset[str]:
        return self._source.kinds()

    def matrix(self, name: str, rows: int, cols: int) -> tuple[QuantType, np.ndarray]:
        return self._source.matrix(self._stored(name), rows, cols)

    def vector(self, name: str, size: int) -> tuple[QuantType, np.ndarray]:
        return self._source.vector(self._stored(name), size)

    def _stored(self, name: str) -> str:
        """The name in the file; a canonical name outside the map is the family's mistake, but named like any other."""
        if name not in self._stored_as:
            raise ModelFileError(f"Tensor {name!r} is missing: this architecture's checkpoints have no name for it.")
        return self._stored_as[name]


class RenamedSource(NamedSource):
    """A model's tensors under the canonical names that its family's map gives.

    `names()` gives the canonical names that are stored, then the stored names that the map does not know, so that `refuse_unused`
    reports those as they stand in the file.

    Args:
        source: the tensors under the file's own names.
        names: canonical name -> stored name; a name that is not stored (a bias of some sizes only) is no error until it is asked for.
        tied: whether the config says that the head is the embedding. Then a head stored besides must be its copy, byte for byte,
            and is not named again; otherwise it must be stored.
        ignored: patterns (`*` stands for anything) of stored names that mean nothing, such as HARMLESS_LEFTOVERS.

    Raises ModelFileError for a head that contradicts `tied`, or a stored name that would pass for a canonical one.
    """

    def __init__(
        self,
        source: FileSource,
        names: Mapping[str, str],
        tied: bool,
        ignored: Collection[str] = (),
        embedding: str = "token_embd.weight",
        head: str = "output.weight",
    ) -> None:
        super().__init__(source, names)
        self._unknown = [name for name in self._unknown if not _matches(name, ignored)]
        if posing := [name for name in self._unknown if name in names]:
            raise ModelFileError(f"The architecture does not use these tensors of the file: {shown(posing)}.", OTHER)
        if _settle_head(source, names[embedding], names[head], tied):
            del self._stored_as[head]
            self._known = [name for name in self._known if name != head]


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _settle_head(source: FileSource, embedding: str, head: str, tied: bool) -> bool:
    """Whether the embedding serves as the head. Raises ModelFileError where file and config contradict each other."""
    stored = head in source.names()
    if not tied and not stored:
        raise ModelFileError(
            f"Tensor {head!r} is missing, and the config does not say 'tie_word_embeddings'.", "Fetch the model again."
        )
    if tied and stored and not _same(source, embedding, head):
        raise ModelFileError(
            f"Tensor {head!r} differs from {embedding!r}, but the config says 'tie_word_embeddings'.",
            "Set it to false in config.json if the file is right.",
        )
    return tied


def _same(source: FileSource, one: str, other: str) -> bool:
    """Same type, shape and bytes, compared a piece at a time."""
    a, b = source.stored(one), source.stored(other)
    if (a.kind, a.shape) != (b.kind, b.shape):
        return False
    left, right = a.stored.reshape(-1), b.stored.reshape(-1)
    step = _COMPARED_AT_ONCE
    return all(np.array_equal(left[at : at + step], right[at : at + step]) for at in range(0, len(left), step))

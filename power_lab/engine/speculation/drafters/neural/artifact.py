"""A trained drafter's file: one SafeTensors file whose header says what it is and which model it was trained for.

`__metadata__` has one text, `power_lab`, a JSON object:
    schema   "power-lab.drafter.v1"
    kind     which of KINDS; serves: the names that it drafts under
    target   {"sha256", "vocab", "width", "layers"} of the model it belongs to
    config   the kind's own
    types    tensor -> GGUF block type, for those that lie as U8 [rows, bytes per row]
    name, license, origin: for people
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar

import msgspec
import numpy as np

from power_lab.engine.config import LEAST_SAID
from power_lab.engine.models.probed import linear_shape
from power_lab.engine.models.spec import ModelSpec, ModelWeights
from power_lab.engine.weights.safetensors import SafeTensorsFile
from power_lab.engine.weights.source import WeightSource, shown
from power_lab.engine.weights.strict_json import parse_object
from power_lab.errors import ConfigError, ModelFileError
from power_lab.kernels.dequantise import dequantise
from power_lab.kernels.ops import Array, Ops, Weight
from power_lab.kernels.probe import LinearShape
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes

SCHEMA = "power-lab.drafter.v1"
MAX_BYTES = 1 << 34
_COMPARED_AT_ONCE = 1 << 12  # rows
Word = Annotated[str, msgspec.Meta(max_length=256)]
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
C = TypeVar("C", bound=msgspec.Struct)


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that a drafter was trained for: hash of its file, token ids, hidden width, layers."""

    sha256: Word
    vocab: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    width: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    layers: Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says of itself."""

    schema: Word
    kind: Word
    serves: Annotated[tuple[Word, ...], msgspec.Meta(min_length=1, max_length=8)]
    target: TargetFacts
    config: dict[str, Any]
    types: dict[str, Word] = {}
    name: Word = ""
    license: Word = ""
    origin: dict[str, Any] = {}


class Artifact:
    """An open drafter file. Its tensors are asked for by name and shape; each that nobody asked for is a fault.

    Every method raises ConfigError for key `draft` that names the file and what is wrong with it.

    Attributes:
        path, header, sha256.
    """

    def __init__(self, path: Path, file: SafeTensorsFile, header: Header, sha256: str) -> None:
        self.path, self.header, self.sha256 = path, header, sha256
        self._file = file
        self._asked: set[str] = set()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the header. Raises ConfigError for key `draft` where the file is not a drafter's."""
        try:
            file = SafeTensorsFile.open(path)
        except ModelFileError as error:
            raise ConfigError("draft", str(error)) from error
        try:
            text = file.metadata.get("power_lab")
            if text is None:
                raise refused(path, "is no drafter: its '__metadata__' has no 'power_lab'")
            header = converted(path, parse_object(text.encode(), f"{path}: __metadata__.power_lab"), Header)
            if header.schema != SCHEMA:
                raise refused(path, f"has the schema {header.schema!r}, not {SCHEMA!r}")
            if strays := [name for name in header.types if name not in file.tensors]:
                raise refused(path, f"'types' names tensors that it does not hold: {shown(strays)}")
            return cls(path, file, header, file.sha256())
        except ModelFileError as error:
            file.close()
            raise ConfigError("draft", str(error)) from error
        except ConfigError:
            file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def config(self, kind: type[C]) -> C:
        """`config` of the header as that struct."""
        return converted(self.path, self.header.config, kind, "config")

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def check_target(self, spec: ModelSpec, sha256: str) -> None:
        """Refuse a target that it was not trained for."""
        made, is_ = self.header.target, {"vocab": spec.vocab, "width": spec.width, "layers": len(spec.layers)}
        for key, value in is_.items():
            if getattr(made, key) != value:
                raise refused(
                    self.path, f"was made for a model with {key} {getattr(made, key):,}; this one has {value:,}"
                )
        if made.sha256 != sha256:
            raise refused(
                self.path, f"was made for the model {made.sha256[:12]}..., this one is {sha256[:12]}... (sha256)"
            )

    def matrix(self, name: str, rows: int, cols: int) -> tuple[QuantType, np.ndarray]:
        """A matrix [rows, cols] in the form of `Weight.data`."""
        stored = self._tensor(name)
        if name in self.header.types:
            kind = self._type(name)
            if cols % GEOMETRY[kind][0]:
                raise refused(self.path, f"tensor {name!r}: rows of {cols} values are not whole {kind.name} blocks")
            self._expect(name, "U8", (rows, row_bytes(kind, cols)))
            return kind, stored.stored
        if stored.kind not in _PLAIN:
            raise refused(self.path, f"tensor {name!r} is {stored.kind}, and 'types' does not name it")
        self._expect(name, stored.kind, (rows, cols))
        return QuantType[stored.kind], np.require(stored.stored.view(_PLAIN[stored.kind]), requirements="A")

    def vector(self, name: str, size: int) -> tuple[QuantType, np.ndarray]:
        stored = self._tensor(name)
        if stored.kind not in _PLAIN or name in self.header.types:
            stated = self.header.types.get(name, stored.kind)
            raise refused(self.path, f"tensor {name!r} is {stated}; a vector is F32, F16 or BF16")
        self._expect(name, stored.kind, (size,))
        return QuantType[stored.kind], np.require(stored.stored.view(_PLAIN[stored.kind]), requirements="A")

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """An F32 tensor of any rank."""
        self._expect(name, "F32", shape)
        return np.array(self._tensor(name).stored).view(np.float32).reshape(shape)

    def ids(self, name: str, vocab: int) -> np.ndarray | None:
        """Ascending token ids int32 [N], N >= 1; None where the file has none."""
        if not self.has(name):
            return None
        stored = self._tensor(name)
        if stored.kind != "I32" or len(stored.shape) != 1 or not 1 <= stored.shape[0] <= vocab:
            raise refused(
                self.path, f"tensor {name!r} is {stored.kind} {list(stored.shape)}; I32 [1..{vocab}] is expected"
            )
        ids = np.array(stored.stored).view(np.int32)
        if ids[0] < 0 or ids[-1] >= vocab or (np.diff(ids) <= 0).any():
            raise refused(self.path, f"tensor {name!r} is not ascending token ids below {vocab}")
        return ids

    def refuse_unused(self) -> None:
        """A tensor that nobody asked for would be another drafter."""
        if left := [name for name in self._file.tensors if name not in self._asked]:
            raise refused(self.path, f"has tensors that its kind {self.header.kind!r} does not know: {shown(left)}")

    def _tensor(self, name: str) -> Any:
        if name not in self._file.tensors:
            raise refused(self.path, f"tensor {name!r} is missing")
        self._asked.add(name)
        return self._file.tensors[name]

    def _type(self, name: str) -> QuantType:
        kind = self.header.types[name]
        if kind not in QuantType.__members__ or kind in _PLAIN:
            raise refused(self.path, f"tensor {name!r} has the unknown block type {kind!r}")
        return QuantType[kind]

    def _expect(self, name: str, kind: str, shape: tuple[int, ...]) -> None:
        found = self._tensor(name)
        if (found.kind, found.shape) != (kind, shape):
            raise refused(
                self.path, f"tensor {name!r} is {found.kind} {list(found.shape)}; {kind} {list(shape)} is expected"
            )


class Target:
    """The model that drafters are bound to.

    Args:
        spec, weights, ops: of the loaded model; source: its stored tensors; sha256: of its file.
        draft_vocabulary: how many tokens its drafter may say at most; 0 is all that it can.
        ranking: int32 token ids, each once, the most wanted first; None is by their ids.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        ops: Ops,
        source: WeightSource,
        sha256: str,
        draft_vocabulary: int = 0,
        ranking: np.ndarray | None = None,
    ) -> None:
        self.spec, self.weights, self.ops, self.sha256 = spec, weights, ops, sha256
        self.draft_vocabulary, self.ranking = draft_vocabulary, ranking
        self._source = source

    def said(self, ids: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Of the tokens that a drafter can say (int32, ascending; None is all) those that it may, likewise, and which of the rows that it
        has for the former are theirs (None: all).

        Raises ConfigError for key `draft_vocabulary` or `draft_ranking` where it cannot say so many.
        """
        most = self.spec.vocab if ids is None else len(ids)
        able = np.arange(most, dtype=np.int32) if ids is None else ids
        wanted = able if self.ranking is None else self.ranking[np.isin(self.ranking, able)]
        count = self.draft_vocabulary or len(wanted)
        if count > len(wanted):
            of = "" if self.ranking is None else " of the ranking"
            told = f"this model's drafter can say {len(wanted):,} tokens{of}, not {count:,}"
            raise ConfigError("draft_vocabulary", told, "Use at most as many, or 0 for all.")
        if self.ranking is not None and count < LEAST_SAID:
            told = f"it names {count} tokens that this model's drafter can say; {LEAST_SAID} is the least"
            raise ConfigError("draft_ranking", told, "Leave it out, or name more.")
        if count == most:
            return ids, None
        chosen = np.sort(wanted[:count])
        return chosen, np.searchsorted(able, chosen)

    def head(self, ids: np.ndarray | None) -> Weight:
        """The output head's rows of these tokens; None is all."""
        if ids is None:
            return self.weights.head
        kind, host = self._source.matrix(self.head_name, self.spec.embedding_rows, self.spec.width)
        return self.ops.weight(kind, len(ids), self.spec.width, np.ascontiguousarray(host[ids]), self.operand)

    def holds(self, name: str, kind: QuantType, host: np.ndarray) -> bool:
        """Whether its tensor of that canonical name, a matrix of `embedding_rows`, has the same bytes."""
        own, stored = self._source.matrix(name, self.spec.embedding_rows, self.spec.width)
        starts = range(0, len(host), _COMPARED_AT_ONCE)
        return own == kind and all(
            np.array_equal(stored[at : at + _COMPARED_AT_ONCE], host[at : at + _COMPARED_AT_ONCE]) for at in starts
        )

    @property
    def head_name(self) -> str:
        """Of the stored output head."""
        return "output.weight" if "output.weight" in self._source.names() else "token_embd.weight"

    @property
    def operand(self) -> str:
        """`Weight.operand` of its matrices, and so of a drafter's beside them."""
        return self.weights.head.operand


class Binder:
    """Takes an artifact's tensors to the target's device.

    Attributes:
        nbytes: of what was taken. linears: shapes of the matrices that are multiplied with activations.
    """

    def __init__(self, artifact: Artifact, target: Target) -> None:
        self._artifact, self._ops, self._operand = artifact, target.ops, target.operand
        self.nbytes = 0
        self.linears: set[LinearShape] = set()

    def matrix(self, name: str, rows: int, cols: int, kept: np.ndarray | None = None) -> Weight:
        return self.multiplied(self.table(name, rows, cols, kept))

    def table(self, name: str, rows: int, cols: int, kept: np.ndarray | None = None) -> Weight:
        """A matrix whose rows are looked up. kept: only these of the stored rows."""
        kind, host = self._artifact.matrix(name, rows, cols)
        host = host if kept is None else np.ascontiguousarray(host[kept])
        self.nbytes += host.nbytes
        return self._ops.weight(kind, len(host), cols, host, self._operand)

    def beside(self, names: Sequence[str], rows: int, cols: int) -> Weight:
        """Matrices of the same shape as one [rows, cols of all], as they are stored where all are of one type, else as f32."""
        parts = [self._artifact.matrix(name, rows, cols) for name in names]
        kinds = {kind for kind, _ in parts}
        if len(kinds) == 1:
            (kind,) = kinds
            host = np.concatenate([part.view(np.uint8).reshape(rows, -1) for _, part in parts], axis=1)
        else:
            kind = QuantType.F32
            host = np.concatenate([dequantise(part, stored, cols) for stored, part in parts], axis=1)
        self.nbytes += host.nbytes
        return self.multiplied(self._ops.weight(kind, rows, cols * len(parts), host, self._operand))

    def multiplied(self, weight: Weight) -> Weight:
        """Note that a matrix, of the artifact or not, is multiplied with activations."""
        self.linears.add(linear_shape(weight))
        return weight

    def vector(self, name: str, size: int) -> Array:
        kind, host = self._artifact.vector(name, size)
        self.nbytes += 4 * size
        return self._ops.vector(kind, host)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """An F32 tensor of any rank."""
        host = self._artifact.tensor(name, shape)
        self.nbytes += host.nbytes
        return self._ops.asarray(host)

    def rows(self, name: str, rows: int, cols: int) -> np.ndarray:
        """A matrix as f32 on the host."""
        kind, host = self._artifact.matrix(name, rows, cols)
        values = dequantise(host, kind, cols)
        self.nbytes += values.nbytes
        return values

    def values(self, name: str, size: int) -> np.ndarray:
        """A vector as f32 on the host."""
        return np.asarray(self._ops.tohost(self.vector(name, size)), np.float32)

    def split(self, name: str, *sizes: int) -> tuple[Weight, ...]:
        """A vector as matrices of one row."""
        parts = np.split(self.values(name, sum(sizes)), np.cumsum(sizes)[:-1])
        weights = (self._ops.weight(QuantType.F32, 1, len(part), part.reshape(1, -1), self._operand) for part in parts)
        return tuple(map(self.multiplied, weights))


def converted(path: Path, value: object, kind: type[C], at: str = "") -> C:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise refused(path, f"'{at or 'power_lab'}' of its header: {error}") from None


def refused(path: Path, what: str) -> ConfigError:
    return ConfigError(
        "draft", f"{path} {what}", 'Use a drafter that was trained for this model, or draft="" for none.'
    )

"""What a model's headers state: architecture, size, storage types, context, licence, and whether it can be loaded.

The only part of the store that opens models. It reads headers alone, and remembers what they said while the files stay as they are.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from power_lab.engine.revision import code_digest
from power_lab.engine.weights.filenames import TOKENIZER
from power_lab.errors import ModelFileError
from power_lab.hashes import replace_file
from power_lab.models.files import ModelFiles

if TYPE_CHECKING:
    from power_lab.engine.weights.checkpoint import Checkpoint

_MAX_REMEMBERED = 4096
_MAX_FILE_BYTES = 1 << 24


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What headers state.

    Attributes:
        problem: why the model cannot be loaded, "" when nothing speaks against it.
        architecture, license: as stated, "" where they are not.
        parameters: values in all tensors, but for those of `draft_layers` layers for multi-token prediction (MTP, NextN), which have
            `draft_parameters`; the model answers without them.
        bytes_by_type: storage type -> bytes, the largest first.
        context: most positions; kv_bytes: bytes of keys and values of one token. Both are 0 where the family is unknown.
    """

    problem: str = ""
    architecture: str = ""
    license: str = ""
    parameters: int = 0
    draft_layers: int = 0
    draft_parameters: int = 0
    bytes_by_type: dict[str, int] = {}
    context: int = 0
    kv_bytes: int = 0

    @property
    def quantisation(self) -> str:
        """The storage type of most bytes, with a plus where there are others that matter: `Q4_K+`."""
        total = sum(self.bytes_by_type.values())
        if not total:
            return ""
        kind, size = next(iter(self.bytes_by_type.items()))
        return f"{kind}+" if size < 0.95 * total else kind


class _Remembered(msgspec.Struct):
    """The file: facts by path, each with the marks of the files that they were read from."""

    code: str
    known: dict[str, tuple[list[list[int]], Facts]]


class FactsCache:
    """Facts in a JSON file of `folder`. It is a cache: what is missing, damaged or cannot be written costs time, never an error.

    Facts that another version of the code has read are not believed: it may know more families.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "facts.json"
        self._kept = self._read()
        self._changed = False

    def of(self, files: ModelFiles) -> Facts:
        """Facts of a model, read only if they are unknown or its files have changed. Raises OSError when the files have gone."""
        key, marks = str(files.path), files.marks()
        known = self._kept.known.get(key)
        if known is not None and known[0] == marks:
            return known[1]
        facts = read_facts(files.path)
        if files.marks() == marks and printable(key) == key:
            self._kept.known[key] = marks, facts
            self._changed = True
        return facts

    def save(self) -> None:
        """Write what was learnt; models that are gone are forgotten once there are many."""
        if not self._changed:
            return
        known = self._kept.known
        if len(known) > _MAX_REMEMBERED:
            known = {path: kept for path, kept in known.items() if os.path.exists(path)}  # noqa: PTH110 - keys are strings
            known = dict(list(known.items())[-_MAX_REMEMBERED:])
        with suppress(OSError):
            replace_file(self._file, msgspec.json.encode(_Remembered(self._kept.code, known)))

    def _read(self) -> _Remembered:
        fresh = _Remembered(code_digest(), {})
        try:
            if self._file.stat().st_size > _MAX_FILE_BYTES:
                return fresh
            kept = msgspec.json.decode(self._file.read_bytes(), type=_Remembered)
        except (OSError, ValueError, RecursionError):
            return fresh
        return kept if kept.code == fresh.code else fresh


def read_facts(path: Path) -> Facts:
    """Open a model, read its headers and ask its family for the topology. Never raises for what a file holds."""
    from power_lab.engine.weights.checkpoint import open_checkpoint

    try:
        with open_checkpoint(path) as checkpoint:
            return _stated(checkpoint)
    except ModelFileError as error:
        return Facts(problem=f"damaged: {_brief(error, path)}")


def member_files(path: Path) -> tuple[tuple[Path, ...], str]:
    """All files that decide what a model says, and its stated licence. Raises ModelFileError when it is not sound."""
    from power_lab.engine.weights.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return checkpoint.files, checkpoint.license


def _stated(checkpoint: Checkpoint) -> Facts:
    from power_lab.engine.models.describe import describe

    problem, context, kv_bytes, drafts = "", 0, 0, None
    try:
        described = describe(checkpoint)
        spec, drafts = described.spec, described.nextn
        context, kv_bytes = spec.context, spec.kv_bytes_per_token
    except ModelFileError as error:
        problem = f"unsupported: {_brief(error, checkpoint.path)}"
    by_type = checkpoint.bytes_by_type()
    apart = drafts.values if drafts is not None else 0  # 0 too where layers are stated of which no tensor is there
    return Facts(
        problem=problem or _untold(by_type) or _unread(checkpoint),
        architecture=printable(checkpoint.architecture[:64]),
        license=checkpoint.license,
        parameters=sum(checkpoint.source.stored(name).values for name in checkpoint.source.names()) - apart,
        draft_layers=len(drafts.layers) if drafts is not None and apart else 0,
        draft_parameters=apart,
        bytes_by_type=by_type,
        context=context,
        kv_bytes=kv_bytes,
    )


def _untold(by_type: dict[str, int]) -> str:
    """Storage types without arithmetic, as a problem."""
    from power_lab.kernels.quants import QuantType

    kinds = [kind for kind in by_type if kind not in QuantType.__members__]
    return f"unsupported: tensors stored as {', '.join(kinds)}" if kinds else ""


def _unread(checkpoint: Checkpoint) -> str:
    """A folder without the one form of tokenizers that is read there, as a problem."""
    lacking = checkpoint.format == "safetensors" and checkpoint.path / TOKENIZER not in checkpoint.files
    return f"unsupported: it has no {TOKENIZER}" if lacking else ""


def _brief(error: ModelFileError, path: Path) -> str:
    """The message without the path, which stands beside it, and of a length for a table."""
    text = error.message.removeprefix(f"{path}: ").removeprefix(f"{path}{os.sep}").removesuffix(".")
    return printable(text if len(text) <= 200 else f"{text[:197]}...")


def printable(text: str) -> str:
    """The text on one line of signs that show: names in files are not to be trusted with a terminal."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)

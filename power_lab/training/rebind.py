"""A drafter for the same model in other storage types: a file that is bound to it by hash, as every drafter is."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec

from power_lab.engine.models.spec import ModelSpec
from power_lab.engine.speculation.drafters.neural.artifact import Artifact
from power_lab.training import export


def rebind(draft: Path, out: Path, spec: ModelSpec, sha256: str) -> None:
    """Write a drafter that is `draft` but belongs to another file of its model. Which one it was trained for stays in its `origin`.

    Whether the files say the same nobody can see from here: a drafter of another model of this size would be bound as well, and would
    cost acceptance, never a token.

    Args:
        draft: an artifact. out: another path. spec, sha256: of the model that the result belongs to.

    Raises:
        ConfigError: key `draft`, where the file is no drafter, or of a model of another vocabulary, width or depth.
    """
    with Artifact.open(draft) as artifact:
        header = artifact.header
        artifact.check_target(spec, header.target.sha256)
    trained_for = header.origin.get("trained_for", header.target.sha256)
    bound = msgspec.structs.replace(
        header, target=export.facts(spec, sha256), origin=header.origin | {"trained_for": trained_for}
    )
    data = draft.read_bytes()
    (length,) = struct.unpack_from("<Q", data)  # `Artifact.open` has looked at all of it
    table = json.loads(data[8 : 8 + length])
    table["__metadata__"] |= {"power_lab": json.dumps(msgspec.to_builtins(bound))}
    export.place(out, export.headed(table) + data[8 + length :])

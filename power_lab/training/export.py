"""From trained modules to artifacts that the engine loads, and back (format: engine/speculation/drafters/neural/artifact.py)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from power_lab.engine.models.spec import ModelSpec
from power_lab.engine.speculation.drafters.neural.artifact import SCHEMA, Artifact, TargetFacts
from power_lab.engine.weights.quantise import quantise
from power_lab.kernels.dequantise import dequantise
from power_lab.kernels.quants import GEOMETRY, QuantType
from power_lab.training.modules import DrafterConfig, Shared
from power_lab.training.modules.config import Kind
from power_lab.training.recipe import CLASSES, Drafter

TABLES = ("markov_w1.weight", "selector_predecessor.weight", "selector_successor.weight")
"""Rows indexed by a token: large, and read one at a time."""
_ALIGN = 64
Stored = dict[str, tuple[str, np.ndarray]]
"""tensor -> (SafeTensors dtype or block type, bytes as they are written)."""


def stored(drafter: Drafter, matrices: QuantType = QuantType.Q8_0, tables: QuantType = QuantType.Q5_0) -> Stored:
    """A drafter's tensors in their stored form: matrices whose rows are whole blocks quantised, everything else f32."""
    result: Stored = {}
    for name, tensor in drafter.state_dict().items():
        values = tensor.detach().float().cpu().numpy()
        kind = tables if name in TABLES else matrices
        if values.ndim == 2 and values.shape[1] % GEOMETRY[kind][0] == 0:
            result[name] = kind.name, quantise(values, kind)
        else:
            result[name] = "F32", values
    return result


def restored(tensors: Stored, like: Drafter) -> dict[str, torch.Tensor]:
    """The state of a module, from what was stored of it: with the values that the engine computes with."""
    state = {}
    for name, tensor in like.state_dict().items():
        kind, data = tensors[name]
        values = data if kind == "F32" else dequantise(data, QuantType[kind], tensor.shape[-1])
        state[name] = torch.from_numpy(np.array(values, np.float32)).reshape(tensor.shape)
    return state


def write(
    path: Path,
    kind: Kind,
    drafter: Drafter,
    tensors: Stored,
    ids: np.ndarray,
    target: TargetFacts,
    *,
    name: str,
    origin: dict[str, Any],
    license: str = "Apache-2.0",
) -> None:
    """Write one artifact. ids: int64 [N], the draft vocabulary; all tokens are left unsaid."""
    held = dict(tensors)
    if len(ids) < target.vocab:
        held["draft_ids"] = "I32", ids.astype(np.int32)
    artifact_kind = "dflash" if kind == "dspark" else kind
    about = {
        "schema": SCHEMA,
        "kind": artifact_kind,
        "serves": ["dspark", "dflash"] if kind == "dspark" else [kind],
        "target": msgspec.to_builtins(target),
        "config": drafter.config.stated(kind),
        "types": {key: of for key, (of, _) in held.items() if of in QuantType.__members__ and of != "F32"},
        "name": name,
        "license": license,
        "origin": origin,
    }
    place(path, _safetensors(held, {"power_lab": json.dumps(about)}))


def place(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_bytes(data)
    beside.replace(path)


def read(path: Path, target: Shared) -> tuple[Kind, Drafter, np.ndarray]:
    """A module from an artifact: (kind, drafter, ids int64 [N] of its draft vocabulary).

    target: what is borrowed, with the whole vocabulary. Raises ConfigError for key `draft`.
    """
    with Artifact.open(path) as artifact:
        found = artifact.ids("draft_ids", target.vocab)
        ids = np.arange(target.vocab) if found is None else found.astype(np.int64)
        kind: Kind = "dspark" if "dspark" in artifact.header.serves else artifact.header.kind  # type: ignore[assignment]
        config = msgspec.convert(artifact.header.config, DrafterConfig)
        drafter = CLASSES[kind](config, target.width, target.eps, target.vocab, len(ids))
        state = {}
        for name, tensor in drafter.state_dict().items():
            if tensor.ndim > 2:
                values = artifact.tensor(name, tuple(tensor.shape))
            else:
                type, data = artifact.vector(name, len(tensor)) if tensor.ndim == 1 else artifact.matrix(name, *tensor.shape)
                values = dequantise(np.atleast_2d(data), type, tensor.shape[-1])
            state[name] = torch.from_numpy(np.array(values, np.float32)).reshape(tensor.shape)
        artifact.refuse_unused()
    drafter.load_state_dict(state)
    return kind, drafter.to(target.embedding.device), ids


def facts(spec: ModelSpec, sha256: str) -> TargetFacts:
    """What binds an artifact to its target."""
    return TargetFacts(sha256=sha256, vocab=spec.vocab, width=spec.width, layers=len(spec.layers))


def _safetensors(tensors: Stored, metadata: dict[str, str]) -> bytes:
    """A file: length of the header, header, tensors without holes between them."""
    header: dict[str, Any] = {"__metadata__": metadata}
    parts, at = [], 0
    for name, (kind, values) in sorted(tensors.items(), key=lambda item: (item[1][0] in ("F32", "I32"), item[0])):
        data = np.ascontiguousarray(values)
        plain = kind in ("F32", "I32")
        header[name] = {
            "dtype": kind if plain else "U8",
            "shape": list(data.shape),
            "data_offsets": [at, at + data.nbytes],
        }
        parts.append(data.tobytes())
        at += data.nbytes
    return headed(header) + b"".join(parts)


def headed(header: dict[str, Any]) -> bytes:
    """Length and header of a SafeTensors file, so long that tensors begin at a multiple of 64 bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return struct.pack("<Q", len(text)) + text

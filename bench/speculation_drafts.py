"""Drafters that no file brings, made for a campaign: the model itself in few bits as its own draft model, and an EAGLE-style assistant of
random weights, whose drafts are right by chance alone. Exactness needs no acceptance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from bench.bf16 import Stored, rewrite
from power_lab.engine.models.spec import ModelSpec
from power_lab.engine.speculation.drafters.neural.artifact import SCHEMA
from power_lab.engine.weights.quantise import quantise
from power_lab.kernels.quants import GEOMETRY, QuantType
from tests.drafters import Random, write

FEW = (QuantType.Q3_K, QuantType.MXFP4)
"""3.4 and 4.3 bits a weight: the first whose blocks fit a matrix' rows."""
MOSTLY_Q3_K = 11  # of `general.file_type`
EMBEDDING = "token_embd.weight"  # and output matrix: it stays, or nothing would ever be accepted


def few_bits(path: Path, out: Path) -> Path:
    """A GGUF model with the matrices of its layers in few bits, by our own quantiser; the same bytes each time."""

    def stored(tensor: ReaderTensor) -> Stored:
        type = next((one for one in FEW if tensor.shape[0] % GEOMETRY[one][0] == 0), None)
        if len(tensor.shape) != 2 or tensor.name == EMBEDDING or type is None:
            return tensor.data, tensor.tensor_type
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        return quantise(values, type), GGMLQuantizationType(int(type))

    rewrite(path, out, stored, MOSTLY_Q3_K)
    return out


def random_eagle(spec: ModelSpec, sha256: str, out: Path, seed: int = 0) -> Path:
    """An assistant as wide as its target, reading the keys and values of the target's middle and last layer; Q8_0."""
    layers = (len(spec.layers) // 2, len(spec.layers) - 1)
    read = spec.layers[layers[0]].attention
    config: dict[str, Any] = {
        "width": spec.width,
        "heads": read.heads,
        "ffn": 2 * spec.width,
        "target_layers": list(layers),
    }
    random, width, ffn, inner = Random(seed), spec.width, config["ffn"], read.heads * read.head_dim
    for name in ("embed_proj", "hidden_proj", "next_hidden"):
        random.matrix(f"{name}.weight", width, width)
    random.vector("norm.weight", width)
    sizes = {"q": (inner, width), "o": (width, inner), "gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
    for i in range(len(layers)):
        for name, size in sizes.items():
            random.matrix(f"layers.{i}.{name}.weight", *size)
        for name in ("attn_norm", "ffn_norm"):
            random.vector(f"layers.{i}.{name}.weight", width)
    target = {"sha256": sha256, "vocab": spec.vocab, "width": width, "layers": len(spec.layers)}
    header = {
        "schema": SCHEMA,
        "kind": "eagle",
        "serves": ["eagle"],
        "target": target,
        "config": config,
        "name": "eagle",
    }
    types = {name: "Q8_0" for name, value in random.made.items() if value.ndim == 2}
    return write(out, header, random.made, types)

"""Models of known geometries with random weights made on the device: their speed without their files.

Every layer has weights of its own, so that no cache helps. What they say is noise; what they cost is what the real ones cost.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from power_lab.engine.loader import Loaded  # noqa: E402
from power_lab.engine.models import of_model_type  # noqa: E402
from power_lab.engine.models.bind import bind  # noqa: E402
from power_lab.engine.models.decoder import Decoder  # noqa: E402
from power_lab.engine.models.spec import ModelSpec, ModelWeights  # noqa: E402
from power_lab.engine.tokenizer import NORMAL, Tokenizer  # noqa: E402
from power_lab.engine.trace import EngineFacts  # noqa: E402
from power_lab.engine.weights.config_json import JsonConfig  # noqa: E402
from power_lab.kernels.ops import Array, Ops, Weight  # noqa: E402
from power_lab.kernels.quants import QuantType  # noqa: E402
from tests.engine.tokenizer.toys import CODE, byte_level  # noqa: E402

QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "gemma3-270m-bf16": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    "smollm2-bf16": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "tie_word_embeddings": True,
    },
    "tiny": QWEN3
    | {
        "head_dim": 16,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
}
"""name -> config.json, in the words of transformers; "tiny" is there to try the benchmark itself on any machine."""

DEVIATION = 0.02  # of the weights


def random_model(name: str, ops: Ops, device: str, context: int) -> Loaded:
    """The geometry of that name on a device, for requests of up to `context` tokens."""
    config = GEOMETRIES[name]
    vocab = config["vocab_size"]
    spec: ModelSpec = of_model_type(config["model_type"]).from_config(JsonConfig(config, Path("config.json")), vocab)
    weights: ModelWeights = bind(spec, _Nothing(spec), _Random(ops, device))  # type: ignore[arg-type]
    if device == "cuda":
        torch.cuda.synchronize()  # the engine's stream does not wait for the one that draws weights
    facts = EngineFacts(
        model=f"{name} (random)",
        file="",
        sha256="",
        license="",
        architecture=spec.architecture,
        parameters=weights.parameters,
        context=context,
        vocab=vocab,
        quantisation=weights.bytes_by_type,
        config={},
        mode=ops.mode,
        device=device,
        threads=0,
        digest=ops.digest(),
        revision="",
        versions={},
    )
    return Loaded(Decoder(spec, weights, ops, context), _tokenizer(vocab), facts, context, {})


class _Nothing:
    """A source that has every tensor of a topology, and no values."""

    def __init__(self, spec: ModelSpec) -> None:
        self._names = [] if spec.tied else ["output.weight"]
        self._norm = 1.0 - spec.norm_offset

    def names(self) -> list[str]:
        return self._names

    def kinds(self) -> frozenset[str]:
        return frozenset({"BF16"})

    def matrix(self, name: str, rows: int, cols: int) -> tuple[QuantType, np.ndarray]:
        return QuantType.BF16, np.broadcast_to(np.uint16(0), (rows, cols))

    def vector(self, name: str, size: int) -> tuple[QuantType, np.ndarray]:
        return QuantType.F32, np.full(size, self._norm, np.float32)


class _Random:
    """The part of an operation table that binds weights; matrices are drawn where they will lie."""

    def __init__(self, ops: Ops, device: str) -> None:
        self._ops = ops
        self._device = device
        self._rng = np.random.default_rng(0)
        self.vector, self.asarray, self.tohost, self.operand = ops.vector, ops.asarray, ops.tohost, ops.operand

    def weight(self, type: QuantType, rows: int, cols: int, host: np.ndarray, operand: str) -> Weight:
        if self._device == "cpu":
            values = self._rng.normal(0, DEVIATION, (rows, cols)).astype(np.float32)
            return self._ops.weight(type, rows, cols, (values.view(np.uint32) >> 16).astype(np.uint16))
        return Weight(type, rows, cols, _on_device(rows, cols, self._device), operand)


def _on_device(rows: int, cols: int, device: str) -> Array:
    from power_lab.kernels.triton.planes import DeviceWeight

    values = torch.empty((rows, cols), dtype=torch.bfloat16, device=device).normal_(0, DEVIATION)
    return DeviceWeight(QuantType.BF16, rows, cols, {"values": values})


def _tokenizer(vocab: int) -> Tokenizer:
    """256 bytes, and names for the other tokens."""
    tokens = [*CODE.values(), *(f"t{i}" for i in range(256, vocab))]
    return byte_level(tokens, [NORMAL] * vocab)

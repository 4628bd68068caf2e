"""MiMo-7B: Qwen2's wiring, published with a layer for multi-token prediction.

Sources: the module that comes with the checkpoints and vLLM's `mimo.py`, whose model hands on what it has before its final norm; FastMTP
(arXiv:2509.18362), trained anew on the same layout behind that norm, which states `num_speculative_steps`.
"""

from __future__ import annotations

from types import MappingProxyType

from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import huggingface as names  # noqa: F401
from power_lab.engine.models.nextn import Layout
from power_lab.engine.models.qwen2 import from_config  # noqa: F401

ARCHITECTURES = ()  # in GGUF they are Qwen2 files
MODEL_TYPES = ("mimo",)

_NAMES = MappingProxyType(
    {
        "eh_proj": "input_proj",
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "shared_head_norm": "final_layernorm",
    }
)


def nextn(config: Metadata) -> Layout:
    fast = config.has("num_speculative_steps")
    return Layout("model.mtp_layers.{}.", behind=False, names=_NAMES, hidden_first=True, normed_hidden=fast)

"""What the metadata of published files means: keys that later converters write, numbers that some folders leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from power_lab.engine.models import of_architecture, of_model_type
from power_lab.engine.models.spec import ModelSpec
from power_lab.engine.weights.config_json import JsonConfig
from power_lab.engine.weights.source import MemorySource
from power_lab.engine.weights.values import TypedValues
from power_lab.errors import ModelFileError
from tests import tiny


class Keys(TypedValues):
    """GGUF metadata in memory, under an architecture's prefix."""

    path = Path("model.gguf")

    def __init__(self, arch: str, values: dict[str, Any]) -> None:
        self._values = {f"{arch}.{key}": value for key, value in values.items()}

    def _value(self, key: str) -> Any:
        return self._values.get(key)


SIZES = {
    "block_count": 8, "embedding_length": 64, "feed_forward_length": 96, "context_length": 1024,
    "attention.head_count": 4, "attention.key_length": 16, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
WINDOW = {"attention.sliding_window": 32}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 128}
FACTORS = {f"rope_factors_{which}.weight": np.ones(8, np.float32) for which in ("short", "long")}


def from_gguf(arch: str, **values: Any) -> ModelSpec:
    family = of_architecture(arch)
    tensors = values.pop("tensors", {})
    return family.from_gguf(Keys(arch, SIZES | values.pop("keys", {}) | values), MemorySource(tensors), 258)


def from_config(kind: str, drop: tuple[str, ...] = (), **change: Any) -> ModelSpec:
    config = {key: value for key, value in tiny.config(tiny.Shape(kind=kind)).items() if key not in drop} | change
    return of_model_type(config["model_type"]).from_config(JsonConfig(config, Path("config.json")), 258)


def sliding(spec: ModelSpec) -> list[int]:
    return [int(layer.attention.window > 0) for layer in spec.layers]


@pytest.mark.parametrize(
    ("arch", "usual"), [("gemma2", [1, 0] * 4), ("gemma3", [1] * 5 + [0, 1, 1]), ("olmo2", [1, 1, 1, 0] * 2)]
)
def test_gguf_files_may_state_which_layers_have_a_window(arch: str, usual: list[int]) -> None:
    key = "attention.sliding_window_pattern"
    assert sliding(from_gguf(arch, keys=WINDOW)) == usual
    assert sliding(from_gguf(arch, keys=WINDOW | {key: np.array([False] + [True] * 7)})) == [0] + [1] * 7
    assert sliding(from_gguf(arch, keys=WINDOW | {key: 3})) == [1, 1, 0, 1, 1, 0, 1, 1]
    assert sliding(from_gguf(arch, keys=WINDOW | {key: 0})) == [1] * 8
    with pytest.raises(ModelFileError, match="sliding_window_pattern"):
        from_gguf(arch, keys=WINDOW | {key: [True] * 7})


def test_layers_with_a_window_of_olmo_3_may_turn_by_a_base_of_their_own() -> None:
    spec = from_gguf("olmo2", keys=WINDOW | {"rope.freq_base": 5e5, "rope.freq_base_swa": 1e4})
    local, everywhere = (spec.layers[i].attention.rope for i in (0, 3))
    assert local is not None and everywhere is not None
    assert (local.frequencies[1], everywhere.frequencies[1]) == pytest.approx((1e4 ** (-1 / 8), 5e5 ** (-1 / 8)))


ATTENTION_FACTOR = 1.2079441541679836  # OLMo 3's, as its config.json states it: 0.1 ln 8 + 1


@pytest.mark.parametrize("keys", [("attn_factor",), ("yarn_attn_factor",), ("attn_factor", "yarn_attn_factor")])
def test_the_attention_factor_of_olmo_3_counts_once(keys: tuple[str, ...]) -> None:
    """Converters write it under either key or both, beside a factor of 8 that implies it."""
    stated = {f"rope.scaling.{key}": ATTENTION_FACTOR for key in keys}
    rope = from_gguf("olmo2", keys=YARN | stated).layers[0].attention.rope
    theirs = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 128}
    parameters = {"full_attention": theirs | {"attention_factor": ATTENTION_FACTOR}}
    expected = from_config("olmo3", rope_parameters=parameters).layers[1].attention.rope
    assert rope is not None and expected is not None
    assert rope.magnitude == expected.magnitude == ATTENTION_FACTOR
    assert rope.frequencies == expected.frequencies


def test_a_stated_factor_is_on_every_kind_of_rope() -> None:
    for keys in ({}, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}):
        rope = from_gguf("llama", keys=keys | {"rope.scaling.attn_factor": 1.25}).layers[0].attention.rope
        assert rope is not None and rope.magnitude == 1.25


def test_models_that_see_what_follows_are_refused() -> None:
    with pytest.raises(ModelFileError, match=r"llama\.attention\.causal"):
        from_gguf("llama", keys={"attention.causal": False})
    for change in ({"use_bidirectional_attention": True}, {"is_causal": False}):
        with pytest.raises(ModelFileError, match="see what follows them"):
            from_config("gemma3", **change)


@pytest.mark.parametrize("numbers", [{}, {"num_attention_heads": 16, "num_key_value_heads": 8}])
def test_gemma_3_folders_may_leave_out_what_transformers_assumes(numbers: dict[str, int]) -> None:
    """The published 4B, 12B and 27B state little more than what differs from 4B."""
    from transformers import Gemma3TextConfig

    stated = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    stated |= numbers | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    theirs = Gemma3TextConfig(**stated)
    config = JsonConfig({"model_type": "gemma3_text", **stated}, Path("config.json"))
    spec = of_model_type("gemma3_text").from_config(config, 262145)
    a = spec.layers[5].attention
    assert (a.heads, a.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (a.head_dim, a.scale) == (theirs.head_dim, theirs.query_pre_attn_scalar**-0.5)
    assert (spec.embedding_rows, spec.vocab) == (theirs.vocab_size, 262145)
    assert (spec.context, spec.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert [bool(w) for w in sliding(spec)] == [kind == "sliding_attention" for kind in theirs.layer_types]
    assert a.rope is not None and a.rope.frequencies[0] == 1 / 8


def test_two_statements_of_rope_must_agree() -> None:
    """Model cards ask for a `rope_scaling` by hand, which newer transformers takes instead of `rope_parameters`."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    with pytest.raises(ModelFileError, match="'default', but rope_scaling says 'yarn'"):
        from_config("qwen3", rope_scaling=yarn)
    from_config("qwen3", rope_scaling={"type": "default"})


def test_the_default_of_ministral_3_is_not_plain() -> None:
    with pytest.raises(ModelFileError, match=r"rope_parameters\.rope_type"):
        from_config("ministral 3", drop=("rope_parameters",))


def test_phi_says_beside_the_section_how_long_it_was_trained() -> None:
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny.config(tiny.Shape(kind="phi3 long"))
    for factor in ({}, {"factor": 32.0}):
        parameters = config["rope_parameters"] | factor | {"original_max_position_embeddings": 32}
        rope = from_config("phi3 long", rope_parameters=parameters).layers[0].attention.rope
        theirs = Phi3Config(**config | {"rope_parameters": dict(parameters)})
        _, magnitude = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu")
        assert rope is not None and rope.original == 64 and rope.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    "keys", [{"rope.freq_base": 1.0}, {"rope.freq_base": 1.0, **YARN}, {"rope.scaling.original_context_length": 0}]
)
def test_bounds_keep_logarithms_sound(keys: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        from_gguf("llama", keys=keys)


def test_a_model_trained_for_one_position_has_no_magnitude() -> None:
    keys = {"rope.scaling.original_context_length": 1}
    rope = from_gguf("phi3", keys=keys, tensors=FACTORS).layers[0].attention.rope
    assert rope is not None and rope.magnitude == 1.0


def test_heads_are_bounded_also_where_their_size_follows_from_the_width() -> None:
    with pytest.raises(ModelFileError, match="heads of 65536 values"):
        from_gguf("llama", keys={"embedding_length": 65536, "attention.head_count": 1, "attention.key_length": None})

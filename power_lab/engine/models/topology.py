"""The part of a topology that all families state alike, read once for each file format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.rope import Rope
from power_lab.engine.models.spec import AttentionSpec, LayerSpec, ModelSpec
from power_lab.errors import ModelFileError

V = TypeVar("V", int, float)

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_WIDTH = 1 << 16
MAX_FFN = 1 << 18
MAX_CONTEXT = 1 << 24
MAX_VOCAB = 1 << 24


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of a decoder; lists have one value for each layer.

    Attributes:
        architecture, vocab: as in ModelSpec. rows: of the stored embedding, at least `vocab`.
        width, context, norm_eps: as in ModelSpec.
        ffn, heads, kv_heads: per layer; head_dim, rotary_dim: values of a head, and how many of them are rotated.
        tied: as in ModelSpec.
    """

    architecture: str
    vocab: int
    rows: int
    width: int
    context: int
    norm_eps: float
    ffn: list[int]
    heads: list[int]
    kv_heads: list[int]
    head_dim: int
    rotary_dim: int
    tied: bool | None

    def __post_init__(self) -> None:
        for heads, kv_heads in zip(self.heads, self.kv_heads, strict=True):
            if heads % kv_heads:
                raise ModelFileError(f"{self.architecture}: {kv_heads} KV heads do not divide {heads} heads.")
        sound = self.head_dim % 8 == 0 and self.rotary_dim % 2 == 0
        if not sound or not 0 < self.rotary_dim <= self.head_dim <= MAX_HEAD_DIM:
            raise ModelFileError(
                f"{self.architecture}: heads of {self.head_dim} values, {self.rotary_dim} of them rotated, are not supported.",
                f"8 must divide the head size, at most {MAX_HEAD_DIM}, and 2 the rotated part.",
            )

    @property
    def layers(self) -> range:
        return range(len(self.heads))

    def attention(self, layer: int, rope: Rope | None, **options: Any) -> AttentionSpec:
        """The attention of a layer; `options` as in AttentionSpec."""
        options = {"scale": self.head_dim**-0.5} | options
        return AttentionSpec(self.heads[layer], self.kv_heads[layer], self.head_dim, rope=rope, **options)

    def model(self, layers: Iterable[LayerSpec], **options: Any) -> ModelSpec:
        """The whole; `options` as in ModelSpec."""
        return ModelSpec(
            architecture=self.architecture,
            vocab=self.vocab,
            embedding_rows=self.rows,
            width=self.width,
            context=self.context,
            norm_eps=self.norm_eps,
            layers=tuple(layers),
            tied=self.tied,
            **options,
        )


def from_gguf(meta: Metadata, arch: str, vocab: int) -> Topology:
    """Read the keys `{arch}.*` of a GGUF file. Raises ModelFileError naming a missing or absurd one."""
    if meta.get(f"{arch}.expert_count", int, 0):
        raise ModelFileError(f"{arch}.expert_count: mixtures of experts are not supported.")
    if not meta.get(f"{arch}.attention.causal", bool, True):
        raise ModelFileError(f"{arch}.attention.causal: tokens that see what follows them are not supported.")
    count = meta.require(f"{arch}.block_count", int, 1, MAX_LAYERS)
    width = meta.require(f"{arch}.embedding_length", int, 1, MAX_WIDTH)
    heads = meta.require_list(f"{arch}.attention.head_count", int, count, 1, MAX_HEADS)
    kv_key = f"{arch}.attention.head_count_kv"
    head_dim = meta.get(f"{arch}.attention.key_length", int, width // heads[0], 8, MAX_HEAD_DIM)
    if meta.get(f"{arch}.attention.value_length", int, head_dim) != head_dim:
        raise ModelFileError(f"{arch}.attention.value_length: differs from key_length, which is not supported.")
    return Topology(
        architecture=arch,
        vocab=vocab,
        rows=vocab,
        width=width,
        context=meta.require(f"{arch}.context_length", int, 1, MAX_CONTEXT),
        norm_eps=meta.require(f"{arch}.attention.layer_norm_rms_epsilon", float, 0.0, 1.0),
        ffn=meta.require_list(f"{arch}.feed_forward_length", int, count, 1, MAX_FFN),
        heads=heads,
        kv_heads=meta.require_list(kv_key, int, count, 1, MAX_HEADS) if meta.has(kv_key) else heads,
        head_dim=head_dim,
        rotary_dim=meta.get(f"{arch}.rope.dimension_count", int, head_dim, 2, head_dim),
        tied=None,
    )


def from_config(
    config: Metadata,
    vocab: int,
    *,
    tied: bool = False,
    activation: str = "hidden_act",
    defaults: Mapping[str, float] | None = None,
) -> Topology:
    """Read the common keys of a Hugging Face config.json.

    Args:
        config: its typed values.
        vocab: tokens that the tokenizer knows; more rows than that are padding, fewer cannot be reached.
        tied: whether the head is the embedding where the file does not say.
        activation: key of the gate's activation.
        defaults: what the model type means by numbers that the file leaves out; without one they must be stated.

    Raises ModelFileError naming a missing or absurd key.
    """
    defaults = defaults or {}

    def number(key: str, kind: type[V], low: float, high: float) -> V:
        stated = key not in defaults or config.has(key)
        return config.require(key, kind, low, high) if stated else kind(defaults[key])

    count = config.require("num_hidden_layers", int, 1, MAX_LAYERS)
    width = config.require("hidden_size", int, 1, MAX_WIDTH)
    heads = number("num_attention_heads", int, 1, MAX_HEADS)
    head_dim = config.get("head_dim", int, int(defaults.get("head_dim", width // heads)), 8, MAX_HEAD_DIM)
    rows = number("vocab_size", int, 1, MAX_VOCAB)
    part = config.get("rope_parameters.partial_rotary_factor", float, config.get("partial_rotary_factor", float, 1.0))
    if not 0.0 < part <= 1.0:
        raise ModelFileError(f"config.json: partial_rotary_factor {part} is not above 0 and at most 1.")
    expect(config, activation, "gelu_pytorch_tanh" if activation == "hidden_activation" else "silu")
    if config.get("mlp_bias", bool, False):
        raise ModelFileError("config.json: mlp_bias is not supported.")
    if config.get("use_bidirectional_attention", bool, False) or not config.get("is_causal", bool, True):
        raise ModelFileError("config.json: tokens that see what follows them are not supported.")
    kv_heads = config.get("num_key_value_heads", int, int(defaults.get("num_key_value_heads", heads)), 1, heads)
    return Topology(
        architecture=config.require("model_type", str),
        vocab=min(vocab, rows),
        rows=rows,
        width=width,
        context=number("max_position_embeddings", int, 1, MAX_CONTEXT),
        norm_eps=number("rms_norm_eps", float, 0.0, 1.0),
        ffn=[config.require("intermediate_size", int, 1, MAX_FFN)] * count,
        heads=[heads] * count,
        kv_heads=[kv_heads] * count,
        head_dim=head_dim,
        rotary_dim=int(head_dim * part),
        tied=config.get("tie_word_embeddings", bool, tied),
    )


def expect(config: Metadata, key: str, value: str) -> None:
    """Raises ModelFileError unless the key, where stated, has the one value that the family supports."""
    found = config.get(key, str, value)
    if found != value:
        raise ModelFileError(f"config.json: {key} {found!r} is not supported.", f"Supported: {value}.")


def sliding_layers(config: Metadata, count: int, default: list[bool]) -> list[bool]:
    """Which layers see a window only, by `layer_types`; `default` where the file does not say."""
    if not config.has("layer_types"):
        return default
    kinds = config.require_list("layer_types", str, count)
    for index, kind in enumerate(kinds):
        if kind not in ("sliding_attention", "full_attention"):
            raise ModelFileError(
                f"config.json: layer_types[{index}] {kind!r} is not supported.",
                "Supported: sliding_attention, full_attention.",
            )
    return [kind == "sliding_attention" for kind in kinds]


def sliding_period(meta: Metadata, arch: str, count: int, period: int) -> list[bool]:
    """Which layers of a GGUF file see a window only: the file's own list, or all but each last of `period` layers.

    Converters of late write `sliding_window_pattern`, as a list or as a period (source: llama.cpp); without it `period` counts.
    """
    key = f"{arch}.attention.sliding_window_pattern"
    try:
        period = meta.get(key, int, period, 0, MAX_LAYERS)
    except ModelFileError:
        return meta.require_list(key, bool, count)
    return [not period or (i + 1) % period != 0 for i in range(count)]


def window(config: Metadata, default: int | None = None) -> int:
    """Keys that a sliding layer sees. Raises ModelFileError when it is not stated and has no default."""
    if default is None:
        return config.require("sliding_window", int, 1, MAX_CONTEXT)
    return config.get("sliding_window", int, default, 1, MAX_CONTEXT)

"""Rotary position embeddings: from a model's stated scaling to one angle per position and pair.

Sources: Su et al. 2021 (arXiv:2104.09864); linear interpolation, Chen et al. 2023 (arXiv:2306.15595); YaRN, Peng et al. 2023
(arXiv:2309.00071); LongRoPE, Ding et al. 2024 (arXiv:2402.13753); the Llama 3.1 model card. Everything is computed in f64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from power_lab.engine.models.metadata import Metadata
from power_lab.engine.weights.source import WeightSource
from power_lab.errors import ModelFileError

_LOW, _HIGH = 1e-3, 1e6  # of any scaling factor
_THETA = 2.0, 1e12  # YaRN divides by its logarithm


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a head's first 2 * len(frequencies) values.

    Attributes:
        frequencies: radians per position, one for each rotated pair.
        interleaved: pairs are (2i, 2i + 1), else (i, i + len(frequencies)).
        magnitude: factor on every cosine and sine.
        original, extended: an engine whose context is longer than `original` positions uses `extended` throughout. The choice
            goes by the configured context, never by a request's length: a token must not depend on what follows it.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False
    magnitude: float = 1.0
    original: int = 0
    extended: Rope | None = None

    def within(self, context: int) -> Rope:
        """The one to use in an engine of that context."""
        return self.extended if self.extended is not None and context > self.original else self


def plain(dim: int, theta: float, interleaved: bool = False) -> Rope:
    """Frequencies theta^(-2i / dim)."""
    return Rope(_tuple(_frequencies(dim, theta)), interleaved)


def divided(rope: Rope, factors: np.ndarray | float) -> Rope:
    """Every frequency divided by its factor: linear interpolation, or a file's own list."""
    return replace(rope, frequencies=_tuple(np.asarray(rope.frequencies) / factors))


def llama3(rope: Rope, factor: float, low: float, high: float, original: int) -> Rope:
    """Wavelengths above original / low are stretched by `factor`, those below original / high are kept, others are blended."""
    frequencies = np.asarray(rope.frequencies)
    turns = original * frequencies / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return replace(rope, frequencies=_tuple(frequencies * (keep + (1 - keep) / factor)))


def yarn(
    rope: Rope,
    theta: float,
    factor: float,
    original: int,
    magnitude: float,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    whole: bool = True,
) -> Rope:
    """Pairs that turn often within `original` positions are kept, those that turn seldom are stretched by `factor`.

    Args:
        beta_fast, beta_slow: turns at which a pair is wholly kept, wholly stretched.
        whole: whether the borders between those pairs are rounded outwards to whole ones.
    """
    half = len(rope.frequencies)
    dim = 2 * half

    def border(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = border(beta_fast), border(beta_slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0.0, 1.0)
    frequencies = np.asarray(rope.frequencies)
    return replace(
        rope, frequencies=_tuple(frequencies * (1 - ramp) + frequencies / factor * ramp), magnitude=magnitude
    )


def longrope(rope: Rope, short: np.ndarray, long: np.ndarray, original: int, magnitude: float) -> Rope:
    """Two lists of divisors, for contexts within and beyond `original` positions."""
    extended = replace(divided(rope, long), magnitude=magnitude)
    return replace(divided(rope, short), magnitude=magnitude, original=original, extended=extended)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_magnitude(factor: float, original: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def from_config(config: Metadata, dim: int, section: str = "", theta: float = 10000.0, context: int = 0) -> Rope:
    """The rope of a Hugging Face config.json.

    Args:
        config: its typed values.
        dim: rotated values of a head.
        section: layer type under `rope_parameters` ("full_attention"), where a model has several.
        theta: used where the file states none.
        context: the model's longest, which some scalings refer to.

    Newer files hold `rope_parameters`, older ones `rope_theta` and `rope_scaling`. Raises ModelFileError naming the key.
    """
    at = "rope_parameters" + (f".{section}" if section else "")
    if not any(config.has(f"{at}.{key}") for key in ("rope_type", "type", "rope_theta")):
        at = "rope_scaling"
    theta = config.get(f"{at}.rope_theta", float, config.get("rope_theta", float, theta, *_THETA), *_THETA)
    rope = plain(dim, theta)
    kind, scaling = (_kind(config, place) for place in (at, "rope_scaling"))
    if scaling not in ("default", kind):
        raise ModelFileError(
            f"config.json: {at} says {kind!r}, but rope_scaling says {scaling!r}.", "Remove what does not hold."
        )

    def number(key: str, default: float | None = None, low: float = _LOW, high: float = _HIGH) -> float:
        name = f"{at}.{key}"
        return (
            config.require(name, float, low, high) if default is None else config.get(name, float, default, low, high)
        )

    def whole(key: str, default: int | None = None) -> int:
        name = f"{at}.{key}"
        if default is None:
            return config.require(name, int, 1, 1 << 24)
        return config.get(name, int, default, 1, 1 << 24)

    def original(default: int | None = None) -> int:
        """Stated beside the section by some files, which then counts (as in transformers), in it by most."""
        key = "original_max_position_embeddings"
        return config.require(key, int, 1, 1 << 24) if config.has(key) else whole(key, default)

    if kind in ("default", "mrope"):  # text has the same position on every axis
        return rope
    if kind == "linear":
        return divided(rope, number("factor"))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if not low < high:
            raise ModelFileError(f"{at}.low_freq_factor {low} is not below {at}.high_freq_factor {high}.")
        return llama3(rope, number("factor"), low, high, original())
    if kind == "yarn":
        trained = original()
        factor = number("factor", context / trained if context else None)
        mscale, all_dim = number("mscale", 0.0, 0.0), number("mscale_all_dim", 0.0, 0.0)
        magnitude = yarn_magnitude(factor)
        if mscale and all_dim:
            magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
        return yarn(
            rope,
            theta,
            factor,
            trained,
            number("attention_factor", magnitude),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            whole=config.get(f"{at}.truncate", bool, True),
        )
    if kind in ("longrope", "su"):
        trained = original(context or 4096)
        lists = [
            np.array(config.require_list(f"{at}.{key}", float, dim // 2, _LOW, _HIGH))
            for key in ("short_factor", "long_factor")
        ]
        default = longrope_magnitude(number("factor", context / trained), trained)
        return longrope(rope, lists[0], lists[1], trained, number("attention_factor", default))
    raise ModelFileError(
        f"{at}.rope_type: {kind!r} is not supported.", "Supported: default, linear, llama3, yarn, longrope."
    )


def from_gguf(
    meta: Metadata,
    source: WeightSource,
    arch: str,
    dim: int,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    context: int = 0,
    whole: bool = False,
) -> tuple[Rope, tuple[str, ...]]:
    """The rope of a GGUF file, and the names of the tensors that it was read from.

    Args:
        meta, source: the file's metadata and tensors.
        arch: prefix of its keys.
        dim: rotated values of a head.
        theta: used where the file states none.
        interleaved: pairing of the architecture.
        context: the model's longest.
        whole: whether YaRN's `attn_factor` is the magnitude itself, not a factor on the usual one.

    Raises ModelFileError naming the key or tensor.
    """
    at = f"{arch}.rope.scaling"
    theta = meta.get(f"{arch}.rope.freq_base", float, theta, *_THETA)
    stated = meta.get(f"{at}.attn_factor", float, 0.0, _LOW, _HIGH)
    rope = replace(plain(dim, theta, interleaved), magnitude=stated or 1.0)
    linear = meta.get(f"{arch}.rope.scale_linear", float, 1.0, _LOW, _HIGH)  # files before `rope.scaling`
    kind = meta.get(f"{at}.type", str, "linear" if linear != 1.0 else "none")
    factor = meta.get(f"{at}.factor", float, linear, 0.0, _HIGH) or 1.0  # 0 is how the format says "not scaled"
    names = frozenset(source.names())
    original = meta.get(f"{at}.original_context_length", int, context or 4096, 1, 1 << 24)

    def factors(name: str) -> np.ndarray:
        type, values = source.vector(name, dim // 2)
        if type.name != "F32" or not np.isfinite(values).all() or (values < _LOW).any() or (values > _HIGH).any():
            raise ModelFileError(f"Tensor {name!r} does not hold rotary factors of {_LOW} to {_HIGH} in F32.")
        return values.astype(np.float64)

    if "rope_freqs.weight" in names:
        if kind not in ("none", "llama3") and factor != 1.0:
            raise ModelFileError(f"{at}.type {kind!r} together with tensor 'rope_freqs.weight' is not supported.")
        return divided(rope, factors("rope_freqs.weight")), ("rope_freqs.weight",)
    pair = ("rope_factors_short.weight", "rope_factors_long.weight")
    if names.issuperset(pair):
        magnitude = stated or longrope_magnitude(context / original, original)
        return longrope(rope, factors(pair[0]), factors(pair[1]), original, magnitude), pair
    if kind == "none":
        return rope, ()
    if kind == "linear":
        return divided(rope, factor), ()
    if kind == "yarn":
        log_multiplier = meta.get(f"{at}.yarn_log_multiplier", float, 0.0, 0.0, _HIGH)
        magnitude = yarn_magnitude(factor) / (yarn_magnitude(factor, log_multiplier) if log_multiplier else 1.0)
        # Converters write Hugging Face's `attention_factor`, which is the magnitude itself, as `yarn_attn_factor`.
        magnitude = meta.get(f"{at}.yarn_attn_factor", float, magnitude, _LOW, _HIGH)
        magnitude = stated if stated and whole else magnitude * (stated or 1.0)
        if meta.get(f"{at}.yarn_ext_factor", float, 1.0) != 1.0:
            raise ModelFileError(f"{at}.yarn_ext_factor: only 1 is supported.")
        fast = meta.get(f"{at}.yarn_beta_fast", float, 32.0, _LOW, _HIGH)
        slow = meta.get(f"{at}.yarn_beta_slow", float, 1.0, _LOW, _HIGH)
        return yarn(rope, theta, factor, original, magnitude, beta_fast=fast, beta_slow=slow), ()
    raise ModelFileError(
        f"{at}.type: {kind!r} is not supported.", "Supported: none, linear, yarn, longrope by its tensors."
    )


def _kind(config: Metadata, at: str) -> str:
    return config.get(f"{at}.rope_type", str, config.get(f"{at}.type", str, "default"))


def _frequencies(dim: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _tuple(values: np.ndarray) -> tuple[float, ...]:
    return tuple(values.tolist())

"""Sizes of a drafter, as its artifact states them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["dflash", "dspark", "dflash2", "mtp"]

_TRUNK = ("layers", "heads", "kv_heads", "head_dim", "ffn", "rope_theta", "qk_norm", "taps")
_BLOCK = ("block_size", "mask_token", "causal", "window", "from_anchor")
_STATED: dict[str, tuple[str, ...]] = {
    "dflash": (*_TRUNK, *_BLOCK),
    "dspark": (*_TRUNK, *_BLOCK, "markov_rank"),
    "dflash2": (*_TRUNK, *_BLOCK, "conv_taps", "conv_group", "selector_rank", "selector_top_k"),
    "mtp": _TRUNK,
}


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """What a drafter is made of; keys that its kind does not have are left at 0.

    Attributes:
        layers, heads, kv_heads, head_dim, ffn, rope_theta: of its own llama-like layers.
        qk_norm: whether queries and keys are RMS-normed, head by head, before they are rotated.
        taps: target layers L whose entering hidden state is read; the number of layers is the state after the last, before the final norm.
        block_size: rows of a block, the anchor included; mask_token: id of the others.
        from_anchor: whether row i of a block, the anchor's row 0 included, is about the token at p + 1 + i, so that a block gives as many
            drafts as it has rows (DSpark's sample_from_anchor); else row i is about the token at p + i, and the anchor's about none.
        causal: whether rows of a block see only those before them; window: positions that a row sees, itself included, 0 for all.
        markov_rank: of DSpark's transition matrix.
        conv_taps, conv_group: rows that a DFlash2 filter reads, and channels that share its coefficients.
        selector_rank, selector_top_k: of DFlash2's path selector, and candidates of a row.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    taps: tuple[int, ...]
    rope_theta: float = 10000.0
    qk_norm: bool = True
    block_size: int = 0
    mask_token: int = 0
    causal: bool = True
    window: int = 0
    from_anchor: bool = False
    markov_rank: int = 0
    conv_taps: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    @property
    def drafts(self) -> int:
        """Most drafts of one block."""
        return self.block_size - self.first

    @property
    def first(self) -> int:
        """The first row of a block that is about a draft."""
        return 0 if self.from_anchor else 1

    def stated(self, kind: Kind) -> dict[str, Any]:
        """The keys of one kind, as plain values."""
        values = asdict(self) | {"taps": list(self.taps)}
        return {key: values[key] for key in _STATED[kind]}

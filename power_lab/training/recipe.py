"""Everything that decides what is trained, as one record that travels with the artifacts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import torch

from power_lab.engine.models.spec import ModelSpec
from power_lab.errors import ConfigError
from power_lab.training import inherit
from power_lab.training.modules import MTP, DFlash, DFlash2, DrafterConfig, DSpark, Shared
from power_lab.training.modules.config import Kind

CLASSES: dict[Kind, type[DFlash] | type[MTP]] = {"dflash": DFlash, "dspark": DSpark, "dflash2": DFlash2, "mtp": MTP}
Drafter = DFlash | MTP
_LEAST = 0.01
"""Of the learning rate at the end."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained and how.

    Attributes:
        kinds: drafters that are trained side by side on the same texts; dspark's trunk serves dflash too.
        seed: of weights, order and anchors.
        drafts: tokens of the draft vocabulary; longest: tokens after which a text is cut; held: texts that are held out.
        layers, ffn, heads, kv_heads, head_dim, taps: of the block drafters' trunks; mtp has one layer of the same sizes. 0 and ()
            take what fits the target.
        rope_theta, qk_norm: of drafters' layers, the target's own where they inherit.
        inherit: whether layers begin as the target's own (inherit.py), where the target's allow it; copied: those of a block drafter,
            copied_mtp: MTP's, counted from the last where it is below zero.
        from_anchor: whether a block's own row of the anchor gives the first draft.
        block_size, rank, candidates: of a block, of DSpark's and DFlash2's tables, of DFlash2's walk; chain: MTP's steps in training,
            chain_last: its steps from the share `lengthen` of the training on.
        mask_token: id of the block's other rows.
        texts: of a batch; rows: drafts of each kind in a batch.
        rate, rate_mtp, warmup, clip, weight_decay: AdamW's largest learning rate (cosine to a hundredth of it), MTP's, the first steps,
            the largest gradient norm, decay of matrices.
        share_mtp: of the steps, those in which MTP learns too: it needs fewer than the block drafters.
        decay, hard: see `losses.weights` and `losses.Truth`.
    """

    kinds: tuple[Kind, ...] = ("dspark", "dflash2", "mtp")
    seed: int = 0
    drafts: int = 16384
    longest: int = 640
    held: int = 128
    layers: int = 2
    ffn: int = 1152
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    qk_norm: bool = True
    taps: tuple[int, ...] = ()
    inherit: bool = True
    copied: tuple[int, ...] = ()
    copied_mtp: int = -1
    from_anchor: bool = True
    block_size: int = 16
    rank: int = 32
    candidates: int = 16
    chain: int = 7
    chain_last: int = 12
    lengthen: float = 0.7
    mask_token: int = 16
    texts: int = 32
    rows: int = 12288
    rate: float = 1e-3
    rate_mtp: float = 1e-3
    share_mtp: float = 1.0
    warmup: int = 100
    clip: float = 1.0
    weight_decay: float = 0.02
    decay: float = 6.0
    hard: float = 0.5

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in CLASSES:
                raise ConfigError("kinds", f"{kind!r} is not a drafter", f"Use some of {', '.join(get_args(Kind))}.")
        if not 0 < self.share_mtp <= 1:
            raise ConfigError("share_mtp", f"{self.share_mtp} is not a share of the steps", "Use 1 for all of them.")
        if self.block_size < 2 or self.texts < 1 or self.rows < 1 or self.longest < 8:
            raise ConfigError("recipe", "block_size, texts, rows or longest is too small")

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Raises ConfigError for key `recipe`."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError("recipe", f"{path} cannot be read: {error}", "Train first.") from error

    def fitted(self, spec: ModelSpec) -> Recipe:
        """With the target's own head sizes and evenly spread taps where none were chosen."""
        a, n = spec.layers[-1].attention, len(spec.layers)
        taps = self.taps or tuple(sorted({max(1, round(n * part)) for part in (0.27, 0.53, 0.77)} | {n}))
        theta = inherit.theta(spec) if self.inherit else 0.0
        copied = self.copied or tuple(min(taps[-2 if len(taps) > 1 else -1] + i, n - 1) for i in range(self.layers))
        if not all(0 <= layer < n for layer in copied):
            raise ConfigError("copied", f"{list(copied)} are not layers of the target", f"Use 0 to {n - 1}.")
        return msgspec.structs.replace(
            self,
            inherit=theta > 0,
            rope_theta=theta or self.rope_theta,
            qk_norm=self.qk_norm and not theta,
            copied=copied,
            copied_mtp=self.copied_mtp % n,
            taps=taps,
            heads=self.heads or a.heads,
            kv_heads=self.kv_heads or a.kv_heads,
            head_dim=self.head_dim or a.head_dim,
            drafts=min(self.drafts, spec.vocab),
        )

    def config(self, kind: Kind, layers: int) -> DrafterConfig:
        """One drafter's sizes, for a target of so many layers."""
        config = DrafterConfig(
            layers=1,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn,
            taps=(layers,),
            rope_theta=self.rope_theta,
            qk_norm=self.qk_norm,
        )
        if kind == "mtp":
            return config
        return replace(
            config,
            layers=self.layers,
            taps=self.taps,
            block_size=self.block_size,
            from_anchor=self.from_anchor,
            mask_token=self.mask_token,
            markov_rank=self.rank,
            conv_taps=2,
            conv_group=16,
            selector_rank=self.rank,
            selector_top_k=self.candidates,
        )

    def drafter(self, kind: Kind, layers: int, target: Shared) -> Drafter:
        """A new one on the target's device; the same seed makes the same."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            config = self.config(kind, layers)
            module = CLASSES[kind](config, target.width, target.eps, target.vocab, len(target.ids))
        with torch.no_grad():
            module.norm.weight.copy_(target.final_norm)  # what the head is used to
        return module.to(target.embedding.device)

    def width(self, kind: Kind, progress: float = 0.0) -> int:
        """Drafts of an anchor when that share of the training lies behind."""
        if kind == "mtp":
            return self.chain if progress < self.lengthen else self.chain_last
        return self.block_size - (0 if self.from_anchor else 1)

    def learns(self, kind: Kind, step: int) -> bool:
        """Whether this kind takes part in a step."""
        share = self.share_mtp if kind == "mtp" else 1.0
        return math.floor((step + 1) * share) > math.floor(step * share)

    def peak(self, kind: Kind) -> float:
        """Largest learning rate."""
        return self.rate_mtp if kind == "mtp" else self.rate

    def share(self, step: int, progress: float) -> float:
        """Of the largest learning rate."""
        cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        return min(1.0, (step + 1) / self.warmup) * (_LEAST + (1 - _LEAST) * cosine)

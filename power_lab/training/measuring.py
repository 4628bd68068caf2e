"""Accepted lengths of drafters on held-out texts, every round of them, at several widths, greedy and sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from power_lab.training.acceptance import WIDTHS, Rounds, accepted, drafted, noise, walk
from power_lab.training.corpus import Corpus
from power_lab.training.modules import DSpark
from power_lab.training.modules.config import Kind
from power_lab.training.modules.shared import Shared
from power_lab.training.observing import Observed
from power_lab.training.recipe import Drafter
from power_lab.training.target import Target

Held = dict[str, dict[str, float]]
"""drafter -> "greedy 7" or "sampled 7" (kind of text and width) -> mean accepted length."""

_VALUES = 1 << 28
"""Logits that exist at once."""


class Measure:
    """Held-out texts and the target that said them.

    Args:
        target: the model; whole, drafts: what is borrowed, with all tokens and with those that are drafted.
        chosen: numbers of the corpus' texts; longest: tokens after which a text is cut; texts: of a batch.
    """

    def __init__(
        self,
        target: Target,
        whole: Shared,
        drafts: Shared,
        corpus: Corpus,
        chosen: np.ndarray,
        longest: int,
        texts: int = 8,
    ) -> None:
        self._target, self._whole, self._drafts = target, whole, drafts
        self._corpus, self._longest, self._texts = corpus, longest, texts
        self._chosen = chosen[np.argsort(corpus.lengths[chosen], kind="stable")]

    @torch.no_grad()
    def held(self, drafters: dict[Kind, Drafter], most: int = 0) -> Held:
        """Mean accepted lengths. A dspark drafter is measured as dflash, too: without its heads.

        most: texts to take, evenly among all; 0 takes all.
        """
        names = [*drafters, *(["dflash"] if "dspark" in drafters and "dflash" not in drafters else [])]
        total: dict[tuple[str, bool, int], Rounds] = {
            (n, s, w): Rounds() for n in names for s in (False, True) for w in WIDTHS
        }
        chosen = self._chosen[:: max(1, len(self._chosen) // most)] if most else self._chosen
        for sampled in (False, True):
            some = chosen[(self._corpus.temperatures[chosen] > 0) == sampled]
            for at in range(0, len(some), self._texts):
                for name, width, rounds in self._batch(drafters, some[at : at + self._texts]):
                    total[name, sampled, width] += rounds
        result: Held = {name: {} for name in names}
        for (name, sampled, width), rounds in total.items():
            result[name][f"{'sampled' if sampled else 'greedy'} {width}"] = round(rounds.mean, 4)
        return result

    def _batch(self, drafters: dict[Kind, Drafter], some: np.ndarray) -> list[tuple[str, int, Rounds]]:
        texts = self._corpus.take(some, self._longest)
        taps = {layer for drafter in drafters.values() for layer in drafter.config.taps}
        device = self._target.device
        tokens, ends = (torch.from_numpy(part).to(device) for part in (texts.tokens, texts.lengths))
        seen = Observed.of(self._target, self._whole, self._drafts, tokens, ends, taps, truth=False)
        table = noise(texts, self._drafts)
        result = []
        for kind, drafter in drafters.items():
            for name in (kind, "dflash") if isinstance(drafter, DSpark) else (kind,):
                lengths = self._lengths(drafter, seen, int(texts.prompts.min()), table, base=name != kind)
                result += [(name, width, walk(lengths, texts.prompts, texts.lengths, width)) for width in WIDTHS]
        return result

    def _lengths(self, drafter: Drafter, seen: Observed, first: int, table: torch.Tensor, *, base: bool) -> np.ndarray:
        """int64 [B, T]: accepted length at full width of a round that begins at each position from `first` on."""
        batch, positions = seen.tokens.shape
        width = min(max(WIDTHS), drafter.config.drafts) if drafter.config.block_size else max(WIDTHS)
        result = torch.zeros(batch, positions, dtype=torch.int64, device=seen.tokens.device)
        size = max(1, _VALUES // (batch * width * len(self._drafts.ids)))
        for at in range(first, positions, size):
            anchors = torch.arange(at, min(at + size, positions), device=seen.tokens.device).expand(batch, -1)
            asked = seen.asked(drafter.config.taps, anchors, width)
            # In f32, as engines compute logits: bf16 has ties between the best tokens.
            asked = replace(asked, features=asked.features.float())
            proposal = drafter(self._drafts, asked)
            drafts = drafted(proposal, self._drafts, anchors, table, base=base)
            result[:, at : at + size] = accepted(drafts, asked.known(1, width), anchors, seen.lengths)
        return result.cpu().numpy()

"""Collected text: what the target said, as token ids with the seeds that drew them, in one array file."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from power_lab.errors import ConfigError

_ARRAYS = {"tokens": np.uint32, "ends": np.int64, "prompts": np.int32, "seeds": np.int64, "temperatures": np.float32}
ROUND = 64
"""Batches are as long as their longest text, rounded up to this: few shapes, little padding."""


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Several texts side by side.

    Attributes:
        tokens: int64 [B, T], zero behind each text's end; lengths, prompts: int64 [B], tokens of a text and of its prompt.
        seeds: int64 [B]; temperatures: f32 [B], 0 for greedy.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    seeds: np.ndarray
    temperatures: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All texts, one after another.

    Attributes:
        tokens: uint32; ends: int64 [n], where each text ends in them.
        prompts, seeds, temperatures: as in `Texts`, [n].
        facts: the model and how the texts were made.
    """

    tokens: np.ndarray
    ends: np.ndarray
    prompts: np.ndarray
    seeds: np.ndarray
    temperatures: np.ndarray
    facts: dict[str, Any]

    @classmethod
    def of(
        cls,
        texts: list[list[int]],
        prompts: list[int],
        seeds: list[int],
        temperatures: list[float],
        facts: dict[str, Any],
    ) -> Self:
        """From lists, one entry a text."""
        flat = np.concatenate([np.asarray(text, np.uint32) for text in texts])
        ends = np.cumsum([len(text) for text in texts]).astype(np.int64)
        return cls(
            flat,
            ends,
            np.asarray(prompts, np.int32),
            np.asarray(seeds, np.int64),
            np.asarray(temperatures, np.float32),
            facts,
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ConfigError for key `corpus` where the file is missing or not one of ours."""
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = {name: np.asarray(file[name], kind) for name, kind in _ARRAYS.items()}
                facts = json.loads(str(file["facts"]))
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise ConfigError(
                "corpus", f"{path} cannot be read: {error}", "Make one: python -m power_lab.training collect."
            ) from error
        return cls(**arrays, facts=facts)

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        small = self.tokens.astype(np.uint16) if self.tokens.max(initial=0) < 1 << 16 else self.tokens
        beside = path.with_suffix(".part.npz")
        np.savez_compressed(
            beside,
            facts=np.asarray(json.dumps(self.facts)),
            tokens=small,
            ends=self.ends,
            prompts=self.prompts,
            seeds=self.seeds,
            temperatures=self.temperatures,
        )
        beside.replace(path)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], self.ends[:-1]])

    @property
    def lengths(self) -> np.ndarray:
        return self.ends - self.starts

    def take(self, chosen: np.ndarray, longest: int) -> Texts:
        """The texts of these numbers, each cut after `longest` tokens."""
        lengths = np.minimum(self.lengths[chosen], longest)
        columns = np.arange(-(-lengths.max() // ROUND) * ROUND)
        at = np.minimum(self.starts[chosen][:, None] + columns, len(self.tokens) - 1)
        tokens = np.where(columns < lengths[:, None], self.tokens[at], 0).astype(np.int64)
        return Texts(
            tokens, lengths, self.prompts[chosen].astype(np.int64), self.seeds[chosen], self.temperatures[chosen]
        )

    def usable(self, longest: int) -> np.ndarray:
        """Numbers of texts in which something can be drafted: at least two tokens of answer before the cut."""
        return np.flatnonzero(np.minimum(self.lengths, longest) - self.prompts >= 2)

    def split(self, held: int, longest: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of texts to train on, and of about `held` others, half of them greedy. All prompts differ."""
        order = np.random.default_rng(seed).permutation(self.usable(longest))
        sampled = self.temperatures[order] > 0
        out = np.concatenate([order[sampled][: held // 2], order[~sampled][: held - held // 2]])
        return np.setdiff1d(order, out), np.sort(out)

    def batches(self, chosen: np.ndarray, size: int, longest: int, seed: int) -> Iterator[Texts]:
        """Texts of similar length together, for ever, in an order that the seed decides. The last batch of a round is filled from the one
        before it, so that all are of one size."""
        rng = np.random.default_rng(seed)
        lengths = np.minimum(self.lengths[chosen], longest)
        while True:
            near = np.argsort(lengths + rng.uniform(0, ROUND, len(chosen)), kind="stable")
            starts = [max(0, min(at, len(near) - size)) for at in range(0, len(near), size)]
            groups = [chosen[near[at : at + size]] for at in starts]
            for group in rng.permutation(len(groups)):
                yield self.take(groups[group], longest)

    def counts(self, chosen: np.ndarray, vocab: int) -> np.ndarray:
        """int64 [vocab]: how often each token was said in the answers of these texts."""
        inside = np.zeros(len(self.tokens) + 1, np.int64)
        np.add.at(inside, self.starts[chosen] + self.prompts[chosen], 1)
        np.add.at(inside, self.ends[chosen], -1)
        return np.bincount(self.tokens[np.cumsum(inside[:-1]) > 0], minlength=vocab)


def frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """int64 [size] ascending: the most frequent tokens, the lower id where counts are equal."""
    return np.sort(np.argsort(-counts, kind="stable")[:size])

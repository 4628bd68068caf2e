"""Training: all kinds side by side on the same texts, with the target's forward pass shared between them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from power_lab.training.corpus import Corpus, Texts, frequent
from power_lab.training.losses import loss
from power_lab.training.measuring import Held, Measure
from power_lab.training.modules.config import Kind
from power_lab.training.observing import Observed
from power_lab.training.recipe import Drafter, Recipe
from power_lab.training.target import Target

CHECKPOINT, RECIPE, LOG = "checkpoint.pt", "recipe.json", "log.jsonl"
_SAY = 20
"""Steps between two entries of the log."""
_LEAST = 0.01
"""Of the learning rate at the end."""


class Trainer:
    """Drafters in training, with everything that they are trained from.

    Args:
        target: the model; corpus: what it said; recipe: as `Recipe.fitted` gives it.

    Attributes:
        drafters: by kind; step: steps made; coverage: share of the held-out answers' tokens that can be drafted.
        phase: called with the name of what comes next, around it; does nothing unless somebody measures.
    """

    def __init__(self, target: Target, corpus: Corpus, recipe: Recipe) -> None:
        self.target, self.corpus, self.recipe = target, corpus, recipe
        train, held = corpus.split(recipe.held, recipe.longest, recipe.seed)
        self._chosen = train
        self.whole = target.shared()
        counts = corpus.counts(train, target.spec.vocab)
        self.drafts = self.whole.only(torch.from_numpy(frequent(counts, recipe.drafts)).to(target.device))
        said = corpus.counts(held, target.spec.vocab)
        self.coverage = float(said[self.drafts.ids.cpu().numpy()].sum() / max(said.sum(), 1))
        self.measure = Measure(target, self.whole, self.drafts, corpus, held, recipe.longest)
        layers = len(target.spec.layers)
        self.drafters: dict[Kind, Drafter] = {kind: recipe.drafter(kind, layers, self.drafts) for kind in recipe.kinds}
        self._optimisers = {kind: self._optimiser(drafter) for kind, drafter in self.drafters.items()}
        self._taps = {layer for drafter in self.drafters.values() for layer in drafter.config.taps}
        self.step = 0
        self.phase: Callable[[str], AbstractContextManager[None]] = nullcontext

    def autocast(self) -> AbstractContextManager:
        """bf16 products on a GPU, f32 elsewhere."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.device.type == "cuda")

    def texts(self) -> Iterator[Texts]:
        """Batches from the current step on."""
        batches = self.corpus.batches(self._chosen, self.recipe.texts, self.recipe.longest, self.recipe.seed)
        for _ in range(self.step):
            next(batches)
        return batches

    def train(self, texts: Texts, progress: float) -> dict[Kind, Tensor]:
        """One step of every kind; progress: share of the training that lies behind. Returns their losses, still on the device."""
        recipe = self.recipe
        with self.phase("target"):
            seen = Observed.of(self.target, self.whole, self.drafts, texts, self._taps, truth=True)
        rate = recipe.rate * min(1.0, (self.step + 1) / recipe.warmup)
        rate *= _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        losses: dict[Kind, Tensor] = {}
        for number, (kind, drafter) in enumerate(self.drafters.items()):
            width = recipe.width(kind)
            rng = np.random.default_rng([recipe.seed, self.step, number])
            anchors = seen.anchors(max(1, recipe.rows // (len(texts.lengths) * width)), rng)
            asked = seen.asked(drafter.config.taps, anchors, width)
            with self.phase(f"{kind} forward"), self.autocast():
                proposal = drafter(self.drafts, asked)
            with self.phase(f"{kind} loss"), self.autocast():
                value = loss(proposal, seen.truth(asked), recipe.decay, recipe.hard)
            losses[kind] = value.detach()
            self._update(kind, value, rate)
        self.step += 1
        return losses

    def held(self, most: int = 0) -> Held:
        """Acceptance on held-out texts, as `Measure.held`."""
        return self.measure.held(self.drafters, most)

    def save(self, folder: Path) -> None:
        """Weights, optimisers and the place in the data, whole or not at all."""
        state = {
            "step": self.step,
            "drafters": {kind: drafter.state_dict() for kind, drafter in self.drafters.items()},
            "optimisers": {kind: optimiser.state_dict() for kind, optimiser in self._optimisers.items()},
        }
        beside = folder / f"{CHECKPOINT}.part"
        torch.save(state, beside)
        beside.replace(folder / CHECKPOINT)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint of the same recipe."""
        state = torch.load(folder / CHECKPOINT, map_location=self.target.device, weights_only=True)
        self.step = state["step"]
        for kind, drafter in self.drafters.items():
            drafter.load_state_dict(state["drafters"][kind])
            self._optimisers[kind].load_state_dict(state["optimisers"][kind])

    def _optimiser(self, drafter: Drafter) -> torch.optim.Optimizer:
        """AdamW; norms, filters' bases and tables indexed by tokens do not decay."""
        matrices = {id(m.weight) for m in drafter.modules() if isinstance(m, nn.Linear)}
        groups = [
            {"params": [p for p in drafter.parameters() if (id(p) in matrices) == decays], "weight_decay": weight_decay}
            for decays, weight_decay in ((True, self.recipe.weight_decay), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=self.target.device.type == "cuda")

    def _update(self, kind: Kind, value: Tensor, rate: float) -> None:
        optimiser = self._optimisers[kind]
        for group in optimiser.param_groups:
            group["lr"] = rate
        with self.phase(f"{kind} backward"):
            value.backward()
        with self.phase(f"{kind} optimiser"):
            nn.utils.clip_grad_norm_(self.drafters[kind].parameters(), self.recipe.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


def run(
    trainer: Trainer, folder: Path, *, steps: int = 0, seconds: float = 0, every: float = 60, quick: int = 32
) -> dict[str, Any]:
    """Train until so many steps are made or seconds have passed, whichever is first; the learning rate falls along with it.

    Writes the recipe, the log (a JSON object a line) and a checkpoint into `folder`, and goes on from there if it has one.

    Args:
        every: seconds between two measurements on `quick` held-out texts, and between two checkpoints.

    Returns:
        the log's last line: steps, seconds, coverage, held-out acceptance on all texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_bytes(msgspec.json.encode(trainer.recipe))
    if (folder / CHECKPOINT).exists():
        trainer.load(folder)
    first, start = trainer.step, time.monotonic()
    measured = start
    sums: dict[Kind, Tensor] = {}
    with (folder / LOG).open("a") as log, tqdm(desc="training", unit="step", initial=first, disable=None) as bar:
        batches = trainer.texts()
        while (progress := _progress(trainer.step, steps, time.monotonic() - start, seconds)) < 1:
            for kind, value in trainer.train(next(batches), progress).items():
                sums[kind] = sums.get(kind, torch.zeros_like(value)) + value
            bar.update()
            now = time.monotonic()
            if (trainer.step - first) % _SAY == 0:
                means = {kind: round(float(value) / _SAY, 4) for kind, value in sums.items()}
                sums.clear()
                _say(log, {"step": trainer.step, "seconds": round(now - start, 2), "loss": means})
                bar.set_postfix(cast(Any, means))
            if now - measured > every:
                held = trainer.held(quick)
                _say(log, {"step": trainer.step, "seconds": round(time.monotonic() - start, 2), "held": held})
                tqdm.write(f"step {trainer.step}: {_brief(held)}")
                trainer.save(folder)
                measured = time.monotonic()
        trainer.save(folder)
        last = {
            "step": trainer.step,
            "seconds": round(time.monotonic() - start, 2),
            "coverage": round(trainer.coverage, 5),
            "held": trainer.held(),
        }
        _say(log, last)
    print(f"{trainer.step} steps, coverage {trainer.coverage:.4f}: {_brief(last['held'])}", flush=True)
    return last


def _progress(step: int, steps: int, passed: float, seconds: float) -> float:
    return max(step / steps if steps else 0.0, passed / seconds if seconds else 0.0)


def _say(log: Any, entry: dict[str, Any]) -> None:
    log.write(json.dumps(entry) + "\n")
    log.flush()


def _brief(held: Held) -> str:
    return "; ".join(
        f"{name} " + ", ".join(f"{key}: {value:.2f}" for key, value in of.items()) for name, of in held.items()
    )

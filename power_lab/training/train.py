"""Training: all kinds side by side on the same texts, with the target's forward pass shared between them."""

from __future__ import annotations

import json
import time
from collections import Counter
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
from power_lab.training.graphs import Graphs
from power_lab.training.inherit import inherit
from power_lab.training.losses import loss
from power_lab.training.measuring import Held, Measure
from power_lab.training.modules.config import Kind
from power_lab.training.observing import Observed, anchors
from power_lab.training.recipe import Drafter, Recipe
from power_lab.training.target import Target

CHECKPOINT, RECIPE, LOG = "checkpoint.pt", "recipe.json", "log.jsonl"
_SIZES = 2048, 4096, 8192, 16384
_SAY = 20
"""Steps between two entries of the log."""


class Trainer:
    """Drafters in training, with everything that they are trained from.

    Args:
        target: the model; corpus: what it said; recipe: as `Recipe.fitted` gives it.

    Attributes:
        drafters: by kind; step: steps made; coverage: share of the held-out answers' tokens that can be drafted;
            coverages: by the size of the draft vocabulary, smaller ones beside it.
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
        sizes = sorted({min(size, recipe.drafts) for size in (*_SIZES, recipe.drafts)})
        self.coverages = {size: float(said[frequent(counts, size)].sum() / max(said.sum(), 1)) for size in sizes}
        self.coverage = self.coverages[recipe.drafts]
        self.measure = Measure(target, self.whole, self.drafts, corpus, held, recipe.longest)
        layers = len(target.spec.layers)
        self.drafters: dict[Kind, Drafter] = {kind: recipe.drafter(kind, layers, self.drafts) for kind in recipe.kinds}
        if recipe.inherit:
            self._inherit()
        self._optimisers = {kind: self._optimiser(drafter) for kind, drafter in self.drafters.items()}
        self._taps = {layer for drafter in self.drafters.values() for layer in drafter.config.taps}
        self.step = 0
        self.graphs = Graphs(target.device)
        self._losses: dict[Kind, Tensor] = {kind: torch.zeros((), device=target.device) for kind in self.drafters}
        self._summed = Counter[Kind]()
        self.phase: Callable[[str], AbstractContextManager[Any, Any]] = nullcontext

    def _inherit(self) -> None:
        texts = next(self.corpus.batches(self._chosen, self.recipe.texts, self.recipe.longest, self.recipe.seed))
        tokens = torch.from_numpy(texts.tokens[:, : texts.prompts.max()]).to(self.target.device)
        for kind, drafter in self.drafters.items():
            copied = (self.recipe.copied_mtp,) if kind == "mtp" else self.recipe.copied
            state = self.target.hidden(tokens, copied[:1])[copied[0]]
            inherit(drafter, self.target, copied, float(state.float().square().mean(-1).median().sqrt()))

    def autocast(self) -> AbstractContextManager:
        """bf16 products on a GPU, f32 elsewhere."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.device.type == "cuda")

    def texts(self) -> Iterator[Texts]:
        """Batches from the current step on."""
        batches = self.corpus.batches(self._chosen, self.recipe.texts, self.recipe.longest, self.recipe.seed)
        for _ in range(self.step):
            next(batches)
        return batches

    def train(self, texts: Texts, progress: float) -> None:
        """One step of every kind whose turn it is; progress: share of the training that lies behind."""
        recipe = self.recipe
        inputs: dict[str, np.ndarray] = {"tokens": texts.tokens, "lengths": texts.lengths}
        widths: dict[Kind, int] = {
            kind: recipe.width(kind, progress) for kind in self.drafters if recipe.learns(kind, self.step)
        }
        for number, kind in enumerate(widths):
            rng = np.random.default_rng([recipe.seed, self.step, number])
            inputs[kind] = anchors(texts, max(1, recipe.rows // (len(texts.lengths) * widths[kind])), rng)
            self._rate(kind, recipe.peak(kind) * recipe.share(self.step, progress))
        self.graphs.run(lambda held: self._learn(held, widths), inputs, key=tuple(widths.items()))
        self.step += 1
        for kind in widths:
            self._summed[kind] += 1

    def losses(self) -> dict[Kind, float]:
        """Means over the steps since this was last asked."""
        means: dict[Kind, float] = {
            kind: float(value) / max(self._summed[kind], 1) for kind, value in self._losses.items()
        }
        for value in self._losses.values():
            value.zero_()
        self._summed.clear()
        return means

    def _learn(self, held: dict[str, Tensor], widths: dict[Kind, int]) -> None:
        """The device's part of a step. held: tokens, lengths and anchors of each kind in `widths`."""
        with self.phase("target"):
            tokens, lengths = held["tokens"], held["lengths"]
            seen = Observed.of(self.target, self.whole, self.drafts, tokens, lengths, self._taps, truth=True)
        for kind, width in widths.items():
            drafter = self.drafters[kind]
            self._optimisers[kind].zero_grad(set_to_none=True)
            with self.phase(f"{kind} forward"), self.autocast():
                asked = seen.asked(drafter.config.taps, held[kind], width)
                truth = seen.truth(asked, self.recipe.decay, self.recipe.hard)
                value = loss(drafter, self.drafts, asked, truth)
            with self.phase(f"{kind} backward"):
                value.backward()
            with self.phase(f"{kind} optimiser"):
                nn.utils.clip_grad_norm_(drafter.parameters(), self.recipe.clip)
                self._optimisers[kind].step()
            self._losses[kind] += value.detach()

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
        if self.target.device.type != "cuda":
            return torch.optim.AdamW(groups, betas=(0.9, 0.98))
        rate = torch.zeros((), device=self.target.device)
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True, capturable=True)

    def _rate(self, kind: Kind, rate: float) -> None:
        for group in self._optimisers[kind].param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


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
    with (folder / LOG).open("a") as log, tqdm(desc="training", unit="step", initial=first, disable=None) as bar:
        batches = trainer.texts()
        while (progress := _progress(trainer.step, steps, time.monotonic() - start, seconds)) < 1:
            trainer.train(next(batches), progress)
            bar.update()
            now = time.monotonic()
            if (trainer.step - first) % _SAY == 0:
                means = {kind: round(value, 4) for kind, value in trainer.losses().items()}
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
            "coverages": {str(size): round(share, 5) for size, share in trainer.coverages.items()},
            "held": trainer.held(),
        }
        _say(log, last)
    sizes = ", ".join(f"{size}: {share:.4f}" for size, share in trainer.coverages.items())
    print(f"{trainer.step} steps, coverage {sizes}; {_brief(last['held'])}", flush=True)
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

"""The end of a training: artifacts, each read again and measured as it was stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from power_lab.training import export
from power_lab.training.measuring import Held
from power_lab.training.modules.config import Kind
from power_lab.training.train import CHECKPOINT, LOG, Trainer

NAMES: dict[Kind, str] = {"dspark": "dflash"}
"""Artifacts that are not named as their kind: one file serves DSpark and, without its heads, DFlash."""


def publish(trainer: Trainer, run: Path, out: Path, sha256: str, *, commit: str = "") -> Held:
    """Write an artifact for each drafter of a training into `out`, and what was measured beside it (`<name>.json`).

    Each is read again, and its held-out acceptance measured with the stored values; both figures are in the artifact's `origin`.

    Args:
        trainer: as it was made for the training; run: the training's folder; sha256: of the target's file; commit: for the record.

    Returns:
        held-out acceptance as stored.
    """
    trainer.load(run)
    before = trainer.held()
    entries = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    loss = next((entry["loss"] for entry in reversed(entries) if "loss" in entry), {})
    ids = trainer.drafts.ids.cpu().numpy()
    facts = export.facts(trainer.target.spec, sha256)
    result: Held = {}
    for kind, drafter in trainer.drafters.items():
        name = NAMES.get(kind, kind)
        tensors = export.stored(drafter)
        state = {key: value.to(trainer.target.device) for key, value in export.restored(tensors, drafter).items()}
        drafter.load_state_dict(state)
        after = trainer.measure.held({kind: drafter})
        origin: dict[str, Any] = {
            "recipe": msgspec.to_builtins(trainer.recipe),
            "corpus": trainer.corpus.facts | {"texts": len(trainer.corpus), "all_tokens": len(trainer.corpus.tokens)},
            "steps": trainer.step,
            "loss": loss.get(kind),
            "coverage": round(trainer.coverage, 5),
            "accepted": after,
            "accepted_before_storing": {key: before[key] for key in after},
            "torch": torch.__version__,
            "commit": commit,
        }
        path = out / f"{name}.safetensors"
        export.write(path, kind, drafter, tensors, ids, facts, name=name, origin=origin)
        _check(path, kind, trainer, state)
        path.with_suffix(".json").write_text(json.dumps(origin, indent=1) + "\n")
        for served, accepted in after.items():
            pairs = ", ".join(f"{key}: {before[served][key]:.3f} -> {value:.3f}" for key, value in accepted.items())
            print(f"{path.name} ({path.stat().st_size:,} bytes) as {served}: {pairs}", flush=True)
        result |= after
    print(f"from step {trainer.step} of {run / CHECKPOINT}; coverage {trainer.coverage:.4f}", flush=True)
    return result


def _check(path: Path, kind: Kind, trainer: Trainer, state: dict[str, torch.Tensor]) -> None:
    """What was written is what was measured."""
    found, drafter, ids = export.read(path, trainer.whole)
    again = drafter.state_dict()
    same = all(torch.equal(again[name].cpu(), value.cpu()) for name, value in state.items())
    if found != kind or not same or ids.tolist() != trainer.drafts.ids.tolist():
        raise RuntimeError(f"{path}: reads back differently from what was written")

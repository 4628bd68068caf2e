"""The log of a training as arrays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import xarray as xr


def curves(log: Path) -> xr.Dataset:
    """A training's log (`train.LOG`) as a dataset.

    `loss` (step, kind): means over the steps since the entry before. `accepted` (measured, drafter, sampled, width): mean accepted
    length on held-out texts; the last one is over all of them. `seconds`, `measured_seconds`: since the training, or
    its continuation, began.
    """
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    losses, held = [e for e in entries if "loss" in e], [e for e in entries if "held" in e]
    kinds = sorted({kind for e in losses for kind in e["loss"]})
    drafters = sorted({name for e in held for name in e["held"]})
    widths = sorted({int(key.split()[1]) for e in held for of in e["held"].values() for key in of})
    accepted = np.full((len(held), len(drafters), 2, len(widths)), np.nan, np.float32)
    for i, entry in enumerate(held):
        for name, of in entry["held"].items():
            for key, value in of.items():
                mode, width = key.split()
                accepted[i, drafters.index(name), int(mode == "sampled"), widths.index(int(width))] = value
    loss = np.array([[e["loss"].get(kind, np.nan) for kind in kinds] for e in losses], np.float32)
    return xr.Dataset(
        {
            "loss": (("step", "kind"), loss.reshape(len(losses), len(kinds))),
            "seconds": ("step", [e["seconds"] for e in losses]),
            "accepted": (("measured", "drafter", "sampled", "width"), accepted),
            "measured_seconds": ("measured", [e["seconds"] for e in held]),
        },
        {
            "step": [e["step"] for e in losses],
            "kind": kinds,
            "measured": [e["step"] for e in held],
            "drafter": drafters,
            "sampled": [False, True],
            "width": widths,
        },
        {"coverage": next((e["coverage"] for e in reversed(held) if "coverage" in e), np.nan)},
    )

"""A slice of the campaign of exactness on the real model, and the arithmetic of its benchmarks (bench/speculation.py)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from bench import speculation_campaign, speculation_curve
from bench.speculation_speed import interval
from power_lab.engine import live
from power_lab.engine.scheduler import Outcome
from power_lab.engine.speculation.drafters import DraftAsk
from power_lab.engine.speculation.transaction import Terminal


def asked(model: Path, output: Path, cells: list[int]) -> argparse.Namespace:
    return argparse.Namespace(
        model=str(model), device="cpu", threads=2, drafters=["ngram"], prompts=3, tokens=24, batches=[1, 8], cells=cells,
        commit=None, output=output,
    )  # fmt: skip


def test_a_slice_of_the_campaign_is_whole_and_leaves_its_log(smollm2_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "log.json"
    assert speculation_campaign.run(asked(smollm2_path, output, [0, 1, 2])) == 0
    log = json.loads(output.read_text())
    assert [cell["identical"] for cell in log["cells"]] == [3, 3, 3]
    assert sum(cell["drafted"] for cell in log["cells"]) > sum(cell["accepted"] for cell in log["cells"]) > 0
    assert all(cell["replays"] == 0 for cell in log["cells"])
    assert log["engine"]["digest"] and "commit" in log["run"]  # empty outside of a repository


def test_a_campaign_with_a_wrong_token_fails(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = live.match

    def believing(drafts: Sequence[int], targets: Sequence[int], terminal: Terminal) -> Outcome:
        return right(drafts, [*drafts[:1], *targets[1:]] if drafts else targets, terminal)

    monkeypatch.setattr(live, "match", believing)
    assert speculation_campaign.run(asked(smollm2_path, tmp_path / "log.json", [0])) == 1


def test_the_array_holds_every_pair() -> None:
    drafters = ["lookup", "ngram", "draft-model", "mtp", "dflash", "dflash2", "dspark"]
    cells = speculation_campaign.cases(drafters, [1, 8])
    assert 42 <= len(cells) <= 60
    for a, b in combinations(cells[0], 2):
        seen = {(cell[a], cell[b]) for cell in cells}
        assert len(seen) == len({cell[a] for cell in cells}) * len({cell[b] for cell in cells})


def test_an_interval_of_paired_ratios() -> None:
    plain = np.random.default_rng(1).uniform(1, 2, 200)
    assert interval(plain, plain / 3) == pytest.approx((3, 3))  # pairs that agree leave no doubt
    low, high = interval(plain, plain / np.random.default_rng(2).uniform(2, 4, 200))
    assert 2 < low < 2.9 < high < 4 and high - low < 0.5


def test_a_synthetic_drafter_is_right_as_often_as_it_is_told() -> None:
    known = np.random.default_rng(0).integers(0, 50, 4000).tolist()
    drafter = speculation_curve.Synthetic(known, 0.7, 50, speculation_curve.Waiting(0.0))
    (draft,) = drafter.propose([DraftAsk(0, known[:100], 3000)])
    right = np.mean([a == b for a, b in zip(draft.tokens, known[100:3100], strict=True)])
    assert right == pytest.approx(0.7, abs=0.03)

"""A slice of the campaign of exactness on the real model, and the arithmetic of its benchmarks (bench/speculation.py)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from bench import speculation_campaign, speculation_curve
from bench.speculation_engines import Engines, drafter
from bench.speculation_speed import Speed, interval
from power_lab.engine import live
from power_lab.engine.request import Controlling, Drafting
from power_lab.engine.scheduler import Outcome
from power_lab.engine.speculation.drafters import DraftAsk
from power_lab.engine.speculation.transaction import Terminal


def asked(
    model: Path,
    output: Path,
    cells: list[int],
    drafters: Sequence[str] = ("ngram",),
    prompts: int = 3,
    references: Path | None = None,
) -> argparse.Namespace:
    return argparse.Namespace(
        model=str(model), device="cpu", threads=2, drafters=list(drafters), prompts=prompts, tokens=24, batches=[1, 8],
        cells=cells, commit=None, output=output, references=references,
    )  # fmt: skip


def test_a_slice_of_the_campaign_is_whole_and_leaves_its_log(smollm2_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "log.json"
    assert speculation_campaign.run(asked(smollm2_path, output, [0, 1, 2])) == 0
    log = json.loads(output.read_text())
    assert [cell["identical"] for cell in log["cells"]] == [3, 3, 3]
    assert sum(cell["drafted"] for cell in log["cells"]) > sum(cell["accepted"] for cell in log["cells"]) > 0
    assert all(cell["replays"] == 0 for cell in log["cells"])
    assert (log["array"]["version"], log["array"]["drafters"]) == (2, ["ngram"])
    assert log["engine"]["digest"] and "commit" in log["run"]  # empty outside of a repository


def test_processes_share_what_requests_alone_say(smollm2_path: Path, tmp_path: Path) -> None:
    output, file = tmp_path / "log.json", tmp_path / "references.json"
    assert speculation_campaign.run(asked(smollm2_path, output, [-1], prompts=2, references=file)) == 0
    read = json.loads(file.read_text())
    assert [len(said) for said in read["references"].values()] == [2, 2] and not output.exists()
    assert speculation_campaign.run(asked(smollm2_path, output, [0], prompts=2, references=file)) == 0
    for said in read["references"].values():
        said[1][-1] += 1
    file.write_text(json.dumps(read))
    assert speculation_campaign.run(asked(smollm2_path, output, [0], prompts=2, references=file)) == 1, (
        "they are compared"
    )
    with pytest.raises(SystemExit, match=r"references.json holds what another engine"):
        speculation_campaign.run(asked(smollm2_path, output, [0], references=file))


def test_drafters_that_no_file_brings_are_made(smollm2_path: Path, tmp_path: Path) -> None:
    drafters = ["draft-model=made", "eagle=made"]
    array = speculation_campaign.cases([drafter(text)[0] for text in drafters], [1, 8])
    names = [cell["drafter"] for cell in array]
    cells = [names.index("draft-model"), names.index("eagle")]
    output = tmp_path / "log.json"
    assert speculation_campaign.run(asked(smollm2_path, output, cells, drafters, prompts=2)) == 0
    log = json.loads(output.read_text())
    eagle, model = sorted(log["cells"], key=lambda cell: cell["drafter"] == "draft-model")
    assert (eagle["drafter"], eagle["identical"], model["drafter"], model["identical"]) == (
        "eagle",
        2,
        "draft-model",
        2,
    )
    assert eagle["drafted"] > 0 and model["tokens_per_pass"] > 1.5
    assert all("sha256 " in made for made in log["made"].values()) and set(log["made"]) == {"draft-model", "eagle"}
    with pytest.raises(SystemExit, match="nobody makes a mtp"):
        Engines(asked(smollm2_path, output, [], ["mtp=made"])).of("mtp")


def test_a_campaign_with_a_wrong_token_fails(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = live.match

    def believing(drafts: Sequence[int], targets: Sequence[int], terminal: Terminal) -> Outcome:
        return right(drafts, [*drafts[:1], *targets[1:]] if drafts else targets, terminal)

    monkeypatch.setattr(live, "match", believing)
    assert speculation_campaign.run(asked(smollm2_path, tmp_path / "log.json", [0])) == 1


def test_the_array_holds_every_pair_of_every_drafter_and_controller() -> None:
    drafters = [drafter(text)[0] for text in speculation_campaign.EVERY]
    assert set(drafters) == set(get_args(Drafting)) - {"off", "auto"}
    cells = speculation_campaign.cases(drafters, [1, 8])
    assert 72 <= len(cells) <= 90
    for a, b in combinations(cells[0], 2):
        seen = {(cell[a], cell[b]) for cell in cells}
        assert len(seen) == len({cell[a] for cell in cells}) * len({cell[b] for cell in cells})
    controllers = {cell["width"] for cell in cells if isinstance(cell["width"], str)}
    assert controllers == set(get_args(Controlling)) - {"fixed"}, "which is what numbers are"


@pytest.mark.parametrize("record", ["h200-campaign-2026-11-30.json", "campaign-cpu-2026-11-30.json"])
def test_its_first_cells_are_those_of_the_records(record: str) -> None:
    recorded = json.loads(Path("bench/results", record).read_text())["cells"]
    drafters = [drafter(text)[0] for text in speculation_campaign.EVERY]
    cells = speculation_campaign.cases(drafters, [1, 8])
    assert [{key: cell[key] for key in cells[0]} for cell in recorded] == cells[: len(recorded)]


def test_speed_takes_every_set_at_every_temperature(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = asked(smollm2_path, tmp_path / "log.json", [], prompts=1)
    further = {"widths": [3], "temperature": [0.0, 0.8], "repeats": 1, "extra": 1, "warm_up": 1}
    speed = Speed(argparse.Namespace(**{**vars(args), **further, "tokens": 8}))
    speed.measure()
    speed.tell()
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["temperatures"] == [0.0, 0.8]
    kinds = {"question", "repeated", "loops", "tongues", "random"}
    assert {(cell["kind"], cell["temperature"]) for cell in log["cells"]} == {(k, t) for k in kinds for t in (0.0, 0.8)}
    sets = [(row["temperature"], row["prompts"]) for row in log["arms"] if row["arm"] == "ngram default"]
    names = ["all 1", "adversarial", "question", "repeated", "loops", "tongues", "random"]
    assert sets == [(t, name) for t in (0.0, 0.8) for name in names]
    for at, samples in speed.samples.items():
        assert {record.params["temperature"] for arm in samples.values() for record in arm.records.values()} == {at}
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(" 0.8 ") for line in lines) == 3 * len(names) + len(kinds)
    assert {(row["temperature"], row["kind"]) for row in log["hindsight"]} == {
        (t, k) for k in kinds for t in (0.0, 0.8)
    }


def test_an_interval_of_paired_ratios() -> None:
    plain = np.random.default_rng(1).uniform(1, 2, 200)
    assert interval(plain, plain / 3) == pytest.approx((3, 3))  # pairs that agree leave no doubt
    low, high = interval(plain, plain / np.random.default_rng(2).uniform(2, 4, 200))
    assert 2 < low < 2.9 < high < 4 and high - low < 0.5


def test_a_synthetic_drafter_is_right_as_often_as_it_is_told() -> None:
    known = np.random.default_rng(0).integers(0, 50, 4000).tolist()
    synthetic = speculation_curve.Synthetic(known, 0.7, 50, speculation_curve.Waiting(0.0))
    (draft,) = synthetic.propose([DraftAsk(0, known[:100], 3000)])
    right = np.mean([a == b for a, b in zip(draft.tokens, known[100:3100], strict=True)])
    assert right == pytest.approx(0.7, abs=0.03)

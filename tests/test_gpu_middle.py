"""bench/gpu_middle.py without a GPU: what it compares, that bits that differ are told and not timed, and that its kernels are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_middle
from bench.gpu_middle import Arm, Product
from power_lab.kernels.triton.middle import Tiling, between

ROOT = Path(__file__).parents[1]
HELD = 232448  # bytes of shared memory that a program can have

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.mark.parametrize(("gated", "splits"), [(False, 1), (False, 4), (True, 1)])
def test_candidates_fit_and_differ(gated: bool, splits: int) -> None:
    for rows in gpu_middle.ROWS:
        found = gpu_middle.candidates(gated, splits, rows)
        assert len(set(found)) == len(found) > 5
        assert any(tiling.held for tiling in found) == (splits > 1)
        for t in found:
            assert 2 * t.stages * t.bk * (t.bn * (1 + gated) + t.bm) <= HELD and t.bm < 2 * max(rows, 17)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two candidates, whose sums are as deep and as wide as those of the launch now, which the interpreter's bits depend on."""

    def candidates(gated: bool, splits: int, rows: int) -> list[Tiling]:
        now = between(70, 136, gated, rows)
        assert now
        one = replace(now, stages=now.stages - 1, ahead=gpu_middle.CALLED)
        return [one, replace(one, held=True)] if splits > 1 else [one]

    monkeypatch.setattr(gpu_middle, "candidates", candidates)
    monkeypatch.setattr(gpu_middle, "ROWS", {48: 33})
    monkeypatch.setattr(gpu_middle, "seconds", lambda calls: 1e-6 * len(calls))


@pytest.mark.parametrize("shape", [(70, 1032, False), (70, 136, False), (70, 136, True)])
def test_arms_are_timed_once_their_bits_are_equal(few: None, shape: tuple[int, int, bool]) -> None:
    product = Product(shape, "cpu", 1)
    records = list(gpu_middle.measure(product, 48, 8.0))
    several = product.splits[0] > 1
    assert [r["arm"] for r in records[:2]] == ["now", "middle"] and "bn" not in records[0]
    assert all(r["us"] == 16.0 and r["of_floor"] == 0.5 for r in records), records
    assert [r["apart"] for r in records].count(True) == (2 if several else 0)
    assert {r["ahead"] for r in records if "ahead" in r} == {gpu_middle.CALLED, *gpu_middle.OTHERS}
    line = gpu_middle.said([{"shape": "some", "floor_us": 8.0} | record for record in records])
    assert line.startswith("some") and "now  16.00" in line and ("apart" in line or not several)


def test_what_differs_or_fails_is_told_and_not_timed(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, product = Product.launch, Product((70, 1032, False), "cpu", 1)

    def wrong(self: Product, arm: Arm, weights: Any, out: torch.Tensor) -> None:
        launch(self, arm, weights, out)
        if arm.tiling and arm.tiling.held:
            raise RuntimeError("out of resource")
        if arm.tiling:
            out *= 2

    monkeypatch.setattr(Product, "launch", wrong)
    now, differs, fails, *apart = gpu_middle.measure(product, 48, 8.0)
    assert "us" in now and differs["different"] == [48, 33] and fails["failed"] == "out of resource"
    assert not any("us" in record for record in (differs, fails))
    assert [record["arm"] for record in apart] == ["now"]


@pytest.mark.parametrize("wrong", [True, False])
def test_records_are_kept_and_a_difference_is_the_exit_status(
    wrong: bool, few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: made.append(command[1:]))
    monkeypatch.setattr(gpu_middle, "bandwidth", lambda: 1e12)
    monkeypatch.setattr(gpu_middle, "Product", lambda shape, device: Product((70, 136, False), "cpu", 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    if wrong:
        monkeypatch.setattr(torch, "equal", lambda *_: False)
    path = tmp_path / "middle.json"
    monkeypatch.setattr(sys, "argv", ["gpu_middle.py", "8b o", "--commit", "abc", "--output", str(path)])
    assert gpu_middle.main() == wrong
    assert made == [[str(ROOT / "bench" / "precompile.py"), "middle"]]
    kept = json.loads(path.read_text())
    assert kept["run"]["commit"] == "abc" and {record["shape"] for record in kept["records"]} == {"8b o"}
    assert any("different" in record for record in kept["records"]) == wrong


def test_its_kernels_can_be_found_without_a_gpu() -> None:
    """In a process of its own, since this one interprets: what `bench/precompile.py middle` compiles."""
    code = (
        "from bench import gpu_middle; from power_lab.kernels.triton.variants import DryOps, Variants\n"
        "with Variants(90, None) as found:\n DryOps()\n gpu_middle.rehearse()\nassert len(found) > 300, len(found)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]

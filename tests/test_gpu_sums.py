"""bench/gpu_sums.py without a GPU: it sees bits that differ and does not time what leaves them, and its kernels are found beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu_sums
from bench.gpu_sums import Layer, Pair
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import norm, rope
from power_lab.kernels.triton.parts import Parts, parts_of
from tests import tiny
from tests.kernels.triton.leaving import LeavingOps

ROOT = Path(__file__).parents[1]
SMALL = {"qkv": Layer(1024, 64, 2, 1, 32), "down": Layer(64, 1024, 2, 1, 32)}  # 1,024 of K: four splits

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sums, "CHECKED", (1, 3))
    monkeypatch.setattr(gpu_sums, "MOST", 3)


@pytest.mark.parametrize("part", ["qkv", "down"])
def test_both_ways_leave_the_same_bits_and_a_fault_shows(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(LeavingOps(), SMALL[part], part, QuantType.BF16)
    assert pair.splits == 4 and len(pair.weights) == 1
    assert gpu_sums.different(pair) == []

    def doubled(sums: torch.Tensor | Parts) -> tuple[torch.Tensor, int, torch.Tensor | None]:
        """As `parts_of`, of sums one of which is another."""
        if isinstance(sums, Parts) and sums.splits > 1:
            sums.scratch[1] *= 2
        return parts_of(sums)

    for reader in (norm, rope):
        monkeypatch.setattr(reader, "parts_of", doubled)
    assert gpu_sums.different(pair) == ["1 rows, on", "3 rows, on", "1 rows, on, biased", "3 rows, on, biased"]


def test_both_ways_are_timed_in_both_orders() -> None:
    assert gpu_sums.ORDER == (False, True, True, False)
    assert gpu_sums.sides([1.0, 10.0, 20.0, 3.0]) == (2.0, 15.0)


@pytest.mark.parametrize("wrong", [True, False])
def test_what_differs_is_not_timed(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def told(case: str, different: list[str]) -> Any:
        timed.append(case)
        yield {"case": case, "different": different} if case == "bits" else {"case": case}

    monkeypatch.setattr(gpu_sums, "card", lambda _: "no card")
    monkeypatch.setattr(gpu_sums, "copy_bandwidth", lambda _: 1e12)
    monkeypatch.setattr(gpu_sums, "TritonOps", LeavingOps)
    monkeypatch.setattr(gpu_sums, "bits", lambda _: told("bits", ["1 rows, on"] if wrong else []))
    monkeypatch.setattr(gpu_sums, "pairs", lambda *_: told("pairs", []))
    monkeypatch.setattr(sys, "argv", ["gpu_sums.py", "pairs", "--output", str(tmp_path / "sums.json")])
    assert gpu_sums.main() == int(wrong)
    assert timed == (["bits"] if wrong else ["bits", "pairs"])
    assert [record["case"] for record in json.loads((tmp_path / "sums.json").read_text())["records"]] == timed


def test_steps_are_compared_and_told_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without sums of splits says the same both ways; one that would say something else is told."""
    ops: Any = NumbaOps(tiny.cache_dir(), 1)
    assert [record["different"] for record in gpu_sums.step_bits(tiny.loaded(tiny.Shape(), ops).model, ops)] == [{}]

    class FakeBench:
        """A millisecond a step, half of it apart, and another token where that is wrong."""

        wrong = False

        def __init__(self, *_: object, **__: object) -> None: ...

        def decode(self, batch: int) -> dict[str, float]:
            ms = batch / 2 if ops.apart else batch
            return {"ms": ms, "graph_ms": ms, "floor_fraction": 1 / ms}

        def _requests(self, batch: int, drafts: int) -> list[SimpleNamespace]:
            return [SimpleNamespace(tokens=(1, int(self.wrong and ops.apart)))] * batch

        def close(self) -> None: ...

    monkeypatch.setattr(gpu_sums, "Bench", FakeBench)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    loaded: Any = None
    same, *times = gpu_sums.step(loaded, ops, 1e12)
    assert not same["different"] and [time["batch"] for time in times] == list(gpu_sums.BATCHES)
    assert (times[1]["off_ms"], times[1]["on_ms"], times[1]["runs_ms"]) == (4, 2, [4, 2, 2, 4])
    FakeBench.wrong = True
    assert next(iter(gpu_sums.step(loaded, ops, 1e12)))["different"]


def test_its_kernels_can_be_found_without_a_gpu() -> None:
    """In a process of its own, since this one interprets: what `bench/precompile.py sums` compiles."""
    code = (
        "from bench import gpu_sums; from power_lab.kernels.triton.variants import DryOps, Variants\n"
        "with Variants(90, None) as found:\n gpu_sums.rehearse(DryOps())\nassert len(found) > 200, len(found)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]

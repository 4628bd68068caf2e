"""The record of kernels' resource use: what is worse than it fails, what is better does not, and it can be renewed a family at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernels.triton import recorded
from tests.kernels.triton.recorded import Recorded, Use, differences

ROOT = Path(__file__).parents[3]


def compiled(path: Path, uses: dict[str, Use], *, family: str = "linear", renew: bool = False) -> None:
    with Recorded(family, path, renew=renew) as record:
        for name, use in uses.items():
            record.see(name, use)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ((100, 97, 0), "97 registers, recorded 96"),
        ((101, 96, 0), "101 shared bytes, recorded 100"),
        ((100, 96, 8), "8 stack bytes, recorded 0"),
    ],
)
def test_more_than_was_recorded_fails(tmp_path: Path, now: Use, said: str) -> None:
    path = tmp_path / "record.json"
    compiled(path, {"product": (100, 96, 0)}, renew=True)
    with pytest.raises(AssertionError, match=rf"product: {said}\n.*recorded linear"):
        compiled(path, {"product": now})
    compiled(path, {"product": now}, renew=True)
    compiled(path, {"product": now})


def test_as_much_or_less_passes(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    compiled(path, {"product": (100, 96, 8)}, renew=True)
    compiled(path, {"product": (100, 96, 8)})
    compiled(path, {"product": (96, 80, 0)})


def test_kernels_that_are_not_recorded_or_not_compiled_are_told() -> None:
    lines = differences({"gone": [1, 2, 3], "same": [1, 2, 3]}, {"same": (1, 2, 3), "new": (1, 2, 3)})
    assert lines == ["gone: recorded, but not compiled any more", "new: not recorded"]


def test_variants_of_one_name_count_as_the_most_of_each(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with Recorded("moves", path, renew=True) as record:
        record.see("tap", (10, 40, 0))
        record.see("tap", (20, 30, 0))
    assert json.loads(path.read_text())["kernels"] == {"moves": {"tap": [20, 40, 0]}}


def test_families_are_renewed_apart_and_others_of_another_compiler_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    compiled(path, {"a": (1, 2, 3)}, family="attention", renew=True)
    compiled(path, {"b": (1, 2, 3)}, renew=True)
    assert set(json.loads(path.read_text())["kernels"]) == {"attention", "linear"}
    monkeypatch.setattr(recorded, "compiler", lambda: "Triton 99")
    compiled(path, {"b": (9, 9, 9)})  # counts of another compiler are not compared
    compiled(path, {"b": (9, 9, 9)}, renew=True)
    assert set(json.loads(path.read_text())["kernels"]) == {"linear"}


def test_a_failure_while_compiling_is_not_hidden_and_records_nothing(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(ValueError, match="no such tile"), Recorded("linear", path, renew=True):
        raise ValueError("no such tile")
    assert not path.exists()


def test_the_record_is_of_the_compiler_that_the_tests_run_with() -> None:
    record = json.loads(recorded.PATH.read_text())
    pinned = [
        line for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines() if line.startswith("triton==")
    ]
    assert [record["compiler"]] == [line.replace("triton==", "Triton ") for line in pinned]
    assert set(record["kernels"]) == set(recorded.FAMILIES)

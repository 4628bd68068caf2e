"""bench/gpu.py without a GPU: nothing is timed before its bits were compared, peers are asked by default, and figures say what they are."""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from bench import gpu, gpu_peers, gpu_table
from bench.geometries import GEOMETRIES
from power_lab.engine.models import of_model_type
from power_lab.engine.weights.config_json import JsonConfig

Record = dict[str, Any]


@pytest.mark.parametrize(
    ("asked", "unchecked", "runs"),
    [
        (["decode"], False, ["bits", "decode"]),
        (["where", "prefill"], False, ["bits", "prefill", "where"]),
        (["decode"], True, ["decode"]),
        (["decode", "bits"], True, ["bits", "decode"]),
        (["parity", "peers"], False, ["parity", "peers"]),
    ],
)
def test_bits_come_before_whatever_is_timed(asked: list[str], unchecked: bool, runs: list[str]) -> None:
    assert gpu.ordered(asked, unchecked=unchecked) == runs


def test_peers_are_asked_by_default() -> None:
    assert gpu.ordered(gpu.CASES, unchecked=False) == list(gpu.CASES)
    assert "peers" in gpu.CASES


class FakeBench:
    """Stands in for `Bench`: remembers that it was made, measures nothing."""

    made: ClassVar[list[Record]] = []

    def __init__(self, loaded: Any, device: str, *floors: float, **settings: Any) -> None:
        self.made.append(settings)
        self.engine = SimpleNamespace(context=settings["context"], config=SimpleNamespace(kv_tokens=64))

    def decode(self, batch: int) -> Record:
        return {"phase": "decode", "batch": batch, "tokens_per_s": 1.0}

    def _nothing(self, *_: Any) -> Record:
        return {"phase": "where"}

    verify = rounds = prefill = where = _nothing

    def close(self) -> None: ...


def measured(monkeypatch: pytest.MonkeyPatch, cases: list[str], *, right: bool = True, **more: Any) -> list[Record]:
    facts = SimpleNamespace(digest="d", parameters=1, quantisation={})
    model = SimpleNamespace(spec=None, ops=SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(gpu, "open_model", lambda *_: SimpleNamespace(facts=facts, model=model, context=8192))
    monkeypatch.setattr(gpu, "check_bits", lambda _: {"right": right})
    monkeypatch.setattr(gpu, "check_parity", lambda *_: {"right": True, "not_run": "random weights"})
    monkeypatch.setattr(gpu, "Bench", FakeBench)
    monkeypatch.setattr(gpu_peers, "geometry_of", lambda _: "qwen3-8b")
    monkeypatch.setattr(
        gpu_peers, "_apart", lambda *_: {"phase": "decode", "engine": "transformers", "batch": 1, "failed": "x"}
    )
    FakeBench.made = []
    settings = {"batches": [1], "rows": [1], "at": [1], "prompt": 8, "count": 8, "prefill": 64, "device": "cpu"}
    settings |= {"context": None, "long": 0, "patience": 1.0} | more
    records: list[Record] = []
    gpu.measure("m", argparse.Namespace(cases=cases, **settings), (1.0, 1.0), records, lambda *_: None)
    return records


def test_each_figure_says_what_was_compared_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    records = measured(monkeypatch, ["bits", "parity", "decode", "where"])
    assert [record["checked"] for record in records if "checked" in record] == [
        ["bits"],
        ["bits"],
    ]  # parity did not run
    records = measured(monkeypatch, ["decode"])
    assert [record["checked"] for record in records if "checked" in record] == [[]]


def test_wrong_bits_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="not measured while wrong"):
        measured(monkeypatch, ["bits", "decode"], right=False)
    assert FakeBench.made == []


@pytest.mark.parametrize(("context", "of_engine"), [(None, 0), (0, 8192), (4096, 4096)])
def test_the_models_own_context_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, context: int | None, of_engine: int
) -> None:
    records = measured(monkeypatch, ["bits", "decode"], context=context)
    assert FakeBench.made[0]["context"] == of_engine
    assert [record["context"] for record in records if record["phase"] == "engine"] == [of_engine]
    assert gpu.context("model") == 0 and gpu.context("4096") == 4096


def test_peers_recorded_elsewhere_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [record for record in measured(monkeypatch, ["peers"]) if "engine" in record]
    assert peers[0]["engine"] == "transformers" and "recorded_elsewhere" not in peers[0]
    elsewhere = [record for record in peers if "recorded_elsewhere" in record]
    assert len(elsewhere) == len(gpu_peers.RECORDED["qwen3-8b"])
    (vllm,) = (record for record in elsewhere if (record["engine"], record["batch"]) == (gpu_peers.VLLM, 64))
    assert (vllm["tokens_per_s"], vllm["end_to_end_tokens_per_s"]) == (10207, 9156)


def test_a_peer_that_takes_too_long_is_ended_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("transformers", timeout)

    monkeypatch.setattr(subprocess, "run", late)
    assert gpu_peers._apart("tiny", "static", "cpu", 7.0)["failed"] == "not done after 7 s; --patience gives it more"


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_file_finds_the_geometry_of_its_peers(name: str) -> None:
    config = GEOMETRIES[name]
    spec = of_model_type(config["model_type"]).from_config(
        JsonConfig(config, Path("config.json")), config["vocab_size"]
    )
    assert gpu_peers.geometry_of(spec) == name
    assert gpu_peers.geometry_of(replace(spec, width=spec.width + 64)) is None


def test_the_table_tells_steady_from_whole_and_ours_from_elsewhere() -> None:
    ours = {"model": "m", "phase": "decode", "batch": 1, "tokens_per_s": 234.25, "end_to_end_tokens_per_s": 1230.0}
    ours |= {"gb_per_s": 3551.0, "floor_fraction": 0.9249, "checked": ["bits"]}
    theirs = {
        "model": "m",
        "phase": "decode",
        "batch": 1,
        "engine": "vLLM",
        "tokens_per_s": 195.3,
        "recorded_elsewhere": "there",
    }
    failed = {"model": "m", "phase": "decode", "batch": 1, "engine": "transformers", "failed": "not done"}
    unchecked = ours | {"checked": [], "long": 32768, "batch": 64}
    head, _, *lines, note = gpu_table.table([ours, {"phase": "load"}, theirs, failed, unchecked]).splitlines()
    assert "steady tok/s" in head and note.startswith("* recorded elsewhere")
    assert lines[0].split() == ["m", "Power", "Lab", "1", "234.2", "1,230", "3,551", "0.925", "bits"]
    assert lines[1].split() == ["m", "vLLM*", "1", "195.3"]
    assert lines[2].split() == ["m", "transformers", "1", "failed"]
    assert "one of 32,768" in lines[3] and lines[3].endswith("nothing")
    assert gpu_table.table([{"phase": "prefill"}]) == ""

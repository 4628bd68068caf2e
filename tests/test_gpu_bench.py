"""bench/gpu.py without a GPU: nothing is timed before its bits were compared, peers are asked by default, and figures say what they are.

Its peers are in `test_gpu_peers.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
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
    FakeBench.made = []
    settings = {"batches": [1], "rows": [1], "at": [1], "prompt": 8, "count": 8, "prefill": 64, "device": "cpu"}
    settings |= {"context": None, "long": 0, "patience": 1.0} | more
    records: list[Record] = []
    args = argparse.Namespace(cases=cases, **settings)
    assert gpu.measure("m", args, (1.0, 1.0), records, lambda *_: None) == "qwen3-8b"
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


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *words: str) -> list[Record]:
    """All of bench/gpu.py but what it measures; the records that it leaves. Files have no geometry, and "qwen3-8b.gguf" has one."""

    def measure(model: str, _: Any, __: Any, records: list[Record], ___: Any) -> str | None:
        records.append({"model": model, "phase": "decode", "batch": 1, "tokens_per_s": 2.0})
        return model.removesuffix(".gguf") if model.removesuffix(".gguf") in GEOMETRIES else None

    def peers(geometries: Sequence[str], device: str, patience: float) -> Iterator[tuple[str, Record]]:
        record = {"phase": "decode", "engine": "transformers", "batch": 1, "tokens_per_s": patience}
        yield from ((geometry, record | {"weights": geometry}) for geometry in dict.fromkeys(geometries))
        if "tiny" in geometries:
            raise RuntimeError("a fault")

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu_peers, "records", peers)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words, "--device", "cpu", "--patience", "7", "--output", str(output)])
    try:
        gpu.main()
    finally:
        found = json.loads(output.read_text())["records"]
    return found


def test_the_peers_of_all_models_come_last_and_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["qwen3-8b", "other.gguf", "qwen3-0.6b", "qwen3-8b.gguf"]
    records = run(monkeypatch, tmp_path / "records.json", *models, "--cases", "bits", "peers")
    assert [record["model"] for record in records[:4]] == models and "engine" not in records[3]
    assert records[4]["model"] == "other.gguf" and "not_run" in records[4]
    named = [(record["model"], record["weights"], record["tokens_per_s"]) for record in records[5:]]
    first, third = ("qwen3-8b", "qwen3-8b", 7.0), ("qwen3-0.6b", "qwen3-0.6b", 7.0)
    assert named == [first, ("qwen3-8b.gguf", "qwen3-8b", 7.0), third]  # of one geometry, measured once
    table = capsys.readouterr().out.partition("steady tok/s")[2].splitlines()[2:]
    assert [row.split()[0] for row in table] == [*models[:1] * 2, models[1], *models[2:3] * 2, *models[3:] * 2]


def test_geometries_are_not_opened_for_their_peers_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = run(monkeypatch, tmp_path / "records.json", "qwen3-8b", "qwen3-0.6b.gguf", "--cases", "peers")
    ours = [record["model"] for record in records if "engine" not in record]
    assert ours == ["qwen3-0.6b.gguf"]  # whose geometry only the file tells
    assert [record["model"] for record in records if "engine" in record] == ["qwen3-8b", "qwen3-0.6b.gguf"]


def test_peers_before_a_fault_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a fault"):
        run(monkeypatch, tmp_path / "records.json", "tiny", "--cases", "peers")
    (record,) = json.loads((tmp_path / "records.json").read_text())["records"]
    assert (record["model"], record["engine"]) == ("tiny", "transformers")


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
    records = [ours, {"phase": "load"}, ours | {"model": "n"}, theirs, failed, unchecked]
    head, _, *lines, last, note = gpu_table.table(records).splitlines()
    assert "steady tok/s" in head and note.startswith("* recorded elsewhere")
    assert lines[0].split() == ["m", "Power", "Lab", "1", "234.2", "1,230", "3,551", "0.925", "bits"]
    assert lines[1].split() == ["m", "vLLM*", "1", "195.3"]
    assert lines[2].split() == ["m", "transformers", "1", "failed"]
    assert "one of 32,768" in lines[3] and lines[3].endswith("nothing")
    assert last.split()[0] == "n"  # a model's lines stand together
    assert gpu_table.table([{"phase": "prefill"}]) == ""

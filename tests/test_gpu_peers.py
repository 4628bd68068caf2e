"""bench/gpu_peers.py with real processes and no GPU: all get ready at once, one measures at a time, and none is left."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_peers
from bench.gpu_peers import HOW, RECORDED, Peer

PLENTY = 300.0  # seconds that nothing here takes

STAND_IN = """
import json, os, sys, time
from pathlib import Path

_, name, kind, log = sys.argv

def note(what):
    with Path(log).open("a") as file:
        file.write(f"{what} {name} {os.getpid()}\\n")

note("start")
if kind == "fails":
    sys.stderr.write("a long complaint\\n" * 20_000 + "RuntimeError: why it failed\\n")  # more than a pipe holds
    sys.exit(3)
if kind == "slow":
    time.sleep(10_000)
print("something else")
note("ready")
print("ready", flush=True)
if not sys.stdin.readline():
    sys.exit()
note("begin")
if kind == "endless":
    time.sleep(10_000)
if kind == "breaks":
    os.abort()
note("end")
if kind != "silent":
    print(json.dumps({"tokens_per_s": 1.5, "ready_s": 0.1}))
"""
"""Speaks the protocol and notes what it does."""


class Stand:
    """Starts stand-ins and reads what they noted. kinds: of some, by "geometry how"."""

    def __init__(self, folder: Path, kinds: dict[str, str] | None = None) -> None:
        self.log = folder / "log"
        self.log.touch()
        self._script = folder / "stand_in.py"
        self._script.write_text(STAND_IN)
        self._kinds = kinds or {}

    def command(self, geometry: str, how: str, device: str = "cpu") -> list[str]:
        name = f"{geometry}-{how}"
        return [sys.executable, str(self._script), name, self._kinds.get(f"{geometry} {how}", ""), str(self.log)]

    def noted(self, *what: str) -> list[tuple[str, str]]:
        """(what, who) in order, only of these kinds if there are any."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [(done, name) for done, name, _ in lines if not what or done in what]

    def running(self) -> list[str]:
        pids = {line.split()[2] for line in self.log.read_text().splitlines()}
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def stand(tmp_path: Path) -> Callable[..., Stand]:
    return lambda **kinds: Stand(tmp_path, {key.replace("_", " "): kind for key, kind in kinds.items()})


def test_all_are_ready_before_one_measures_and_one_measures_at_a_time(stand: Callable[..., Stand]) -> None:
    made = stand()
    found = list(gpu_peers.records(["b", "a", "b"], "cpu", PLENTY, made.command))
    names = [f"{geometry}-{how}" for geometry in ("b", "a") for how in HOW]
    measured = [(what, name) for name in names for what in ("begin", "end")]
    assert made.noted()[-len(measured) :] == measured
    assert sorted(name for _, name in made.noted("ready")) == sorted(names)
    assert [(geometry, record["engine"]) for geometry, record in found] == [
        (geometry, f"transformers, {how}") for geometry in ("b", "a") for how in HOW
    ]
    assert found[0][1] == {
        "phase": "decode",
        "engine": "transformers, eager",
        "batch": 1,
        "weights": "b, random, bf16",
        "tokens_per_s": 1.5,
        "ready_s": 0.1,
    }
    assert made.running() == []


def test_what_was_recorded_elsewhere_follows_and_says_so(stand: Callable[..., Stand]) -> None:
    found = list(gpu_peers.records(["qwen3-8b", "smollm2-bf16"], "cpu", PLENTY, stand().command))
    count = len(HOW) + len(RECORDED["qwen3-8b"])
    assert [geometry for geometry, _ in found[:count]] == ["qwen3-8b"] * count
    assert len(found) == count + len(HOW) + len(RECORDED["smollm2-bf16"])
    here, elsewhere = [record for _, record in found[: len(HOW)]], [record for _, record in found[len(HOW) : count]]
    assert not any("recorded_elsewhere" in record for record in here)
    assert all(record["recorded_elsewhere"] == gpu_peers.ELSEWHERE for record in elsewhere)
    (vllm,) = (record for record in elsewhere if (record["engine"], record["batch"]) == (gpu_peers.VLLM, 64))
    assert (vllm["tokens_per_s"], vllm["end_to_end_tokens_per_s"]) == (10207, 9156)


def test_one_that_fails_says_why_and_the_others_are_measured(stand: Callable[..., Stand]) -> None:
    made = stand(a_eager="fails", a_static="breaks", b_eager="silent")
    found = [record for _, record in gpu_peers.records(["a", "b"], "cpu", PLENTY, made.command)]
    assert [record.get("failed") for record in found] == [
        "RuntimeError: why it failed",
        "no message, exit status -6",
        "ended without a record",
        None,
    ]
    assert found[-1]["tokens_per_s"] == 1.5 and made.running() == []
    assert ("begin", "a-eager") not in made.noted()


def test_one_that_is_not_ready_in_time_is_ended_and_says_so(stand: Callable[..., Stand], tmp_path: Path) -> None:
    made = stand(a_static="slow")
    good, slow = (Peer("a", how, made.command("a", how), tmp_path) for how in HOW)
    gpu_peers.until_ready([good], PLENTY)
    gpu_peers.until_ready([good, slow], 0.5)
    assert slow.measure(PLENTY)["failed"] == "not ready after 0.5 s; --patience gives it more"
    assert good.measure(PLENTY)["tokens_per_s"] == 1.5
    assert made.running() == []


def test_none_waits_for_those_that_are_not_ready_in_time(stand: Callable[..., Stand]) -> None:
    made = stand(a_eager="slow", a_static="slow")
    found = [record for _, record in gpu_peers.records(["a"], "cpu", 0.5, made.command)]
    assert [record["failed"].split(";")[0] for record in found] == ["not ready after 0.5 s"] * 2
    assert made.running() == []


def test_one_that_measures_for_too_long_is_ended_and_says_so(stand: Callable[..., Stand], tmp_path: Path) -> None:
    made = stand(a_eager="endless")
    peer = Peer("a", "eager", made.command("a", "eager"), tmp_path)
    gpu_peers.until_ready([peer], PLENTY)
    assert peer.measure(0.5)["failed"] == "not done after 0.5 s; --patience gives it more"
    assert made.running() == []


def test_none_is_left_after_a_fault(stand: Callable[..., Stand]) -> None:
    made = stand(b_static="fails")
    with (
        pytest.raises(KeyboardInterrupt),
        closing(gpu_peers.records(["a", "b"], "cpu", PLENTY, made.command)) as found,
    ):
        assert next(found)[1]["tokens_per_s"] == 1.5
        assert len(made.running()) == 2
        raise KeyboardInterrupt
    assert made.running() == [] and made.noted("begin") == [("begin", "a-eager")]


def test_none_is_left_where_another_cannot_be_started(stand: Callable[..., Stand], tmp_path: Path) -> None:
    made, peers = stand(a_eager="slow"), []

    class Watched(Peer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            peers.append(self)

    def command(geometry: str, how: str, device: str) -> list[str]:
        return made.command(geometry, how) if how == "eager" else [str(tmp_path / "no-such-program")]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(FileNotFoundError):
        patch.setattr(gpu_peers, "Peer", Watched)
        list(gpu_peers.records(["a"], "cpu", PLENTY, command))
    assert [peer._process.poll() for peer in peers] == [-9]


def test_transformers_on_the_cpu() -> None:
    pytest.importorskip("transformers")
    found = list(gpu_peers.records(["tiny"], "cpu", PLENTY))
    for how, (geometry, record) in zip(HOW, found, strict=True):
        assert geometry == "tiny" and "failed" not in record
        named = {"phase": "decode", "engine": f"transformers, {how}", "batch": 1, "weights": "tiny, random, bf16"}
        figures = {"tokens_per_s", "best_tokens_per_s", "runs", "version", "ready_s"}
        assert record.items() >= named.items() and set(record) == {*named, *figures}
        assert record["tokens_per_s"] > 0


def test_a_process_by_hand_and_one_that_is_not_let_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    argv = ["gpu_peers.py", "tiny", "eager", "--device", "cpu", "--prompt", "8", "--count", "4"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "stdin", None)  # by hand nothing is read
    gpu_peers.main()
    assert json.loads(capsys.readouterr().out)["runs"] == gpu_peers.RUNS
    monkeypatch.setattr(sys, "argv", [*argv, "--wait"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    gpu_peers.main()
    assert capsys.readouterr().out == "ready\n"

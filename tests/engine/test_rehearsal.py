"""A rehearsal names what an engine launches, and its processes share the compiling out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from power_lab.engine import compilers as engine_compilers
from power_lab.engine import loader
from power_lab.engine.compilers import Asked, Compilers
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.rehearsal import claims, compile_share, row_counts
from power_lab.kernels.numba.ops import NumbaOps
from tests import drafters, tiny, tiny_gguf

ROOT = Path(__file__).resolve().parents[2]
SMALL = EngineConfig(step_tokens=2, max_batch=1, graph_mb=0)


Rehearsed = Callable[..., list[object]]


@pytest.fixture(scope="module")
def rehearsed() -> Iterator[Rehearsed]:
    """Asks `rehearsed.py`, which imports its libraries once and answers in a fresh process each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("rehearsed.py"))]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        asking, answers = server.stdin, server.stdout

        def ask(*arguments: str) -> list[object]:
            print(json.dumps(arguments), file=asking, flush=True)
            told = json.loads(answers.readline())
            assert "fault" not in told, told["fault"]
            return told["found"]

        yield ask
        os.killpg(server.pid, signal.SIGKILL)  # whoever still answers, too


@pytest.mark.parametrize(
    ("kind", "stored", "graphs"),
    [("qwen3", "F32", "graphs"), ("gemma2", "F32", "eager"), ("llama", "Q4_K", "graphs"), ("llama", "Q4_1", "eager")],
)
def test_no_step_takes_a_variant_that_was_not_rehearsed(
    kind: str, stored: str, graphs: str, rehearsed: Rehearsed
) -> None:
    assert rehearsed("steps", kind, stored, graphs) == []


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_an_engine_launches_was_compiled_for_it(kind: str, rehearsed: Rehearsed) -> None:
    launched = rehearsed("engine", kind, "F32", "run")
    assert len(launched) > 20 and set(launched) <= set(rehearsed("engine", kind, "F32", "asked"))


@pytest.mark.parametrize("drafter", list(drafters.KINDS))
def test_no_draft_takes_a_variant_that_was_not_rehearsed(drafter: str, rehearsed: Rehearsed) -> None:
    assert rehearsed("drafts", drafter, "F32", "graphs") == []
    launched = rehearsed("drafting", drafter, "F32", "run")
    assert len(launched) > 20 and set(launched) <= set(rehearsed("drafting", drafter, "F32", "asked"))


@pytest.mark.parametrize("stored", ["F32", "Q4_K"])
def test_arrays_without_memory_name_the_variants_of_arrays_with_memory(stored: str, rehearsed: Rehearsed) -> None:
    names = rehearsed("keys", "llama", stored, "meta")
    assert len(names) > 20 and names == rehearsed("keys", "llama", stored, "cpu")


def test_row_counts_stand_on_both_sides_of_every_power_of_two() -> None:
    assert row_counts(5, (1, 2, 4, 8)) == [1, 2, 4, 5]
    assert row_counts(8, (1, 2, 4, 8)) == [1, 2, 4, 8]
    assert row_counts(64, (1, 2, 4, 8)) == [1, 2, 4, 8, 9, 16, 17, 18, 20, 24, 32, 33, 48, 64]


def test_what_one_process_has_taken_no_other_takes(tmp_path: Path) -> None:
    first, second = claims(["a", "b", "c"], tmp_path), claims(["a", "b", "c"], tmp_path)
    assert [next(first), next(second), next(first)] == ["a", "b", "c"]
    assert list(second) == list(first) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.done", "all", "b.done", "c.done"]


def test_a_variant_that_fails_does_not_keep_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[str] = []

    def fail() -> None:
        raise RuntimeError("no such instruction")

    assert compile_share({"a": lambda: made.append("a"), "b": fail, "c": lambda: made.append("c")}, tmp_path) == 1
    assert made == ["a", "c"] and "no such instruction" in capsys.readouterr().err


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Of a tiny file's kernels, into a cache of their own."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    tiny_gguf.write(tmp_path / "tiny.gguf", tiny.Shape(kind="llama", head_dim=16))
    return Asked(
        model=str(tmp_path / "tiny.gguf"),
        digest="",
        config=SMALL,
        context=64,
        vocab=258,
        capability=90,
        launchers=False,
    )


def test_processes_compile_each_kernel_once_and_remember_it(asked: Asked) -> None:
    told: list[tuple[int, int]] = []
    with Compilers(asked.command, 2, asked.mark) as compilers:
        assert compilers.wait(lambda stage, done, total: told.append((done, total))) == ""
    done, total = told[-1]
    assert done == total == len(list(asked.mark.parents[1].glob("*/*.cubin"))) > 10
    assert asked.mark.exists()
    with Compilers.of(asked) as compilers:
        assert compilers.wait(lambda *_: pytest.fail("nothing is left to compile")) == ""


def test_a_fault_is_told_and_leaves_no_mark(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with Compilers(asked.command, 1, asked.mark) as compilers:
        assert "status 1: power_lab.errors.ModelFileError" in compilers.wait(lambda *_: None)
    assert not asked.mark.exists()


def test_where_none_can_be_started_it_is_told(asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with Compilers.of(asked) as compilers:
        assert "no compilers could be started" in compilers.wait(lambda *_: None)


def test_who_takes_too_long_is_not_waited_for(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_compilers, "LONGEST", 0)
    with Compilers(asked.command, 1, asked.mark) as compilers:
        assert "not done after 0 s" in compilers.wait(lambda *_: None)
    assert not asked.mark.exists()


def test_a_load_waits_for_compilers_and_tells_their_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    class Late(NumbaOps):
        compiles_for = 90

    seen: list[Asked] = []

    def of(asked: Asked) -> Compilers:
        seen.append(asked)
        none = Compilers()
        none.fault = "no room"
        return none

    monkeypatch.setattr(loader, "select", lambda device, mode, threads, cache, *_: Late(cache, threads))
    monkeypatch.setattr(Compilers, "of", of)
    monkeypatch.setattr(loader, "_tokenizer", lambda checkpoint: tiny.tokenizer())
    paths = Paths(tmp_path, tmp_path, tmp_path)
    config = EngineConfig(model=asked.model, device="cpu", context=128)
    loaded = loader.load(config, paths, lambda *_: None)
    assert loaded.reasons["kernels"].endswith("; no room")
    (told,) = seen
    assert (told.model, told.context, told.vocab, told.capability) == (asked.model, 128, 258, 90)
    assert loaded.facts.digest in told.digest and loaded.facts.sha256 in told.digest


def test_who_leaves_early_leaves_no_process(asked: Asked) -> None:
    with pytest.raises(KeyboardInterrupt), Compilers(asked.command, 2) as compilers:
        running = compilers._running
        raise KeyboardInterrupt
    assert [process.returncode for process in running] == [-9, -9]

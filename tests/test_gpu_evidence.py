"""bench/gpu_evidence.py without a GPU: every cell is run once, time is kept to, and what was finished is never lost."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from bench import gpu_evidence, speculation_campaign
from bench.gpu_evidence import Command, Phase, Run

KNOWN = gpu_evidence.phases(5)


def phase(text: str, *, limit: float = 60.0, needs: tuple[str, ...] = (), times: int = 1) -> Phase:
    """Runs Python, which finds the folder of results as `out`."""

    def commands(out: Path) -> list[Command]:
        return [
            [sys.executable, "-c", f"from pathlib import Path\nout = Path({str(out)!r})\nme = {i}\n{text}"]
            for i in range(times)
        ]

    return Phase(limit, commands, needs)


def run(out: Path, phases: dict[str, Phase], *, limit: float = 100.0, pack: Path | None = None) -> Run:
    made = Run(out, limit, dict(os.environ), "abc", pack)
    for name, each in phases.items():
        made.phase(name, each)
    return made


def statuses(made: Run) -> dict[str, str]:
    return {each["phase"]: each["status"].split(":")[0] for each in made.done}


@pytest.mark.parametrize("processes", [1, 5, 100])
def test_the_processes_of_a_campaign_share_all_cells(processes: int) -> None:
    names = [drafter.partition("=")[0] for drafter in gpu_evidence.DRAFTERS]
    commands = gpu_evidence.campaign(Path("OUT"), processes)
    shares = [command[command.index("--cells") + 1 : command.index("--references")] for command in commands]
    array = speculation_campaign.cases(names, [1, 8])  # type: ignore[arg-type]
    assert {"draft-model", "eagle"} < set(names)
    assert sorted(int(number) for share in shares for number in share) == list(range(len(array)))
    assert len({command[command.index("--output") + 1] for command in commands}) == len(commands) <= processes
    (made,) = gpu_evidence.references(Path("OUT"))
    file = made[made.index("--references") + 1]
    assert all(command[command.index("--references") + 1] == file for command in commands)


def test_some_cells_of_a_campaign() -> None:
    first, second = gpu_evidence.campaign(Path("OUT"), 2, [51, 3, 70, 52])
    found = [command[command.index("--cells") + 1 : command.index("--references")] for command in (first, second)]
    assert sorted(number for share in found for number in share) == ["3", "51", "52", "70"] and all(found)


def test_names_of_phases_and_groups() -> None:
    assert gpu_evidence.chosen(["curve", "models", "gemma"], KNOWN) == ["curve", *gpu_evidence.GROUPS["models"]]
    assert set(gpu_evidence.chosen(["models"], KNOWN)) <= set(KNOWN)
    with pytest.raises(SystemExit, match=r"'speeed' is no phase. Phases: tests, campaign"):
        gpu_evidence.chosen(["speeed"], KNOWN)


def test_peers_are_measured_within_their_phase() -> None:
    (command,) = KNOWN["peers"].commands(Path("OUT"))
    ready = float(command[command.index("--patience") + 1])
    assert ready + 60 < KNOWN["peers"].limit - gpu_evidence.GRACE  # some 60 s are left to measure, one after another


def test_no_two_phases_write_the_same_file() -> None:
    out = Path("OUT")
    commands = [command for name, each in KNOWN.items() if name != "tests" for command in each.commands(out)]
    files = [command[command.index("--output") + 1] for command in commands]
    assert len(set(files)) == len(files) and all(Path(file).parent == out for file in files)


def test_a_failure_a_skip_and_a_success_are_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = tmp_path / "packed" / "all.tar.gz"
    made = run(
        tmp_path / "out",
        {
            "good": phase("(out / f'good-{me}.json').write_text('1'); (out / 'model.gguf').write_text('m')", times=2),
            "skipped": phase("", needs=("no_such_package",)),
            "bad": phase("print('why it failed'); raise SystemExit(3)"),
        },
        pack=pack,
    )
    assert statuses(made) == {"good": "ok", "skipped": "skipped", "bad": "failed"} and not made.good
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["commit"] == "abc" and [each["status"] for each in summary["phases"]][2] == "failed: exit status 3"
    assert "the package no_such_package is not installed" in capsys.readouterr().out
    with tarfile.open(pack) as archive:
        kept = {"good.log", "good-0.json", "good-1.json", "bad.log", "summary.json"}
        assert set(archive.getnames()) == kept
        log = archive.extractfile("bad.log")
        assert log is not None and b"why it failed" in log.read()


def test_what_a_phase_wrote_before_its_time_was_over_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_evidence, "GRACE", 2.0)
    monkeypatch.setattr(gpu_evidence, "LEAST", 0.5)
    text = """
import os, time
(out / 'pid').write_text(str(os.getpid()))
try:
    time.sleep(60)
finally:  # as a benchmark that keeps its records
    (out / 'slow.json').write_text('half')
"""
    made = run(tmp_path, {"slow": phase(text, limit=5.0), "next": phase("")})
    assert statuses(made) == {"slow": "out of time", "next": "ok"} and not made.good
    assert (tmp_path / "slow.json").read_text() == "half"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_no_phase_begins_without_time(tmp_path: Path) -> None:
    made = run(tmp_path, {"late": phase("(out / 'late.json').write_text('1')")}, limit=gpu_evidence.SPARE + 1)
    assert statuses(made) == {"late": "not begun"} and not made.good
    assert not (tmp_path / "late.json").exists()


def test_what_comes_before_a_phase_must_succeed(tmp_path: Path) -> None:
    before = Phase(60, phase("(out / 'ran.json').write_text('1')").commands, (), phase("raise SystemExit(2)").commands)
    assert statuses(run(tmp_path, {"both": before})) == {"both": "failed"}
    assert not (tmp_path / "ran.json").exists()


def test_a_missing_model_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWER_LAB_HOME", str(tmp_path))
    assert "smollm2 is not on this machine: power-lab models add smollm2" in gpu_evidence.missing(KNOWN["speed"])
    assert gpu_evidence.missing(KNOWN["curve"]) == ""


def test_commands_are_told_the_commit_and_the_time(tmp_path: Path) -> None:
    made = Run(tmp_path, 1.0, {}, "abc")
    (curve,) = KNOWN["curve"].commands(tmp_path)
    (monitoring,) = KNOWN["monitoring"].commands(tmp_path)
    (walks,) = KNOWN["walks"].commands(tmp_path)
    for command in (curve, walks):
        assert made._filled(command, 100.0)[-2:] == ["--commit", "abc"]
    assert made._filled(monitoring, 100.0) == monitoring  # takes none
    tests = made._filled(KNOWN["tests"].commands(tmp_path)[0], 200.0)
    assert tests[tests.index("--limit") + 1] == "180"


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_evidence, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_evidence.py", "curve", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        gpu_evidence.main()
    assert "no NVIDIA GPU is here" in capsys.readouterr().err and not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "argv", ["gpu_evidence.py", "curve", "--list"])
    assert gpu_evidence.main() == 0
    assert "speculation.py curve --device cuda" in capsys.readouterr().out

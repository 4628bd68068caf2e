"""All evidence of a GPU machine by one command, in phases that can be chosen, each with its own limit of time and its own file.

    python bench/gpu_evidence.py [PHASE...] --out FOLDER [--gpu 0] [--limit 570] [--pack FILE] [--commit ID] [--list]

`--list` says what would run, and what would be skipped and why; so does the run. Phases run one after another in the order in which they
are named, until the limit; each gets what is left, at most its own limit. A phase leaves FOLDER/NAME.log, what it said, and
FOLDER/NAME.json, its records, written as they come; FOLDER/summary.json has a line for each. What is over when time runs out is kept, and
`--pack` puts the whole folder into one .tar.gz after every phase, for machines that give few files back. Nothing is fetched: a phase whose
model is not on this machine is skipped, and says so. Exit status 1 if a phase failed, ran out of time or was not begun.

Two GPUs of one host take two commands side by side, with other phases and folders:

    python bench/gpu_evidence.py tests speed --gpu 0 --out /tmp/a --pack $OUT/a.tar.gz &
    python bench/gpu_evidence.py campaign models --gpu 1 --out /tmp/b --pack $OUT/b.tar.gz; wait
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.speculation_campaign import EVERY as DRAFTERS  # noqa: E402
from bench.speculation_campaign import cases  # noqa: E402
from power_lab.engine.config import Paths  # noqa: E402
from power_lab.engine.request import Drafting  # noqa: E402
from power_lab.models.catalogue import CATALOGUE  # noqa: E402
from power_lab.models.listing import catalogue_entry  # noqa: E402

GRACE = 10.0  # seconds that a phase has to write what it has, once it is interrupted
SECONDS = "SECONDS"  # of a command's words: stands for the seconds that it has
SPARE = 5.0  # seconds of the whole limit that are left for packing
LEAST = 20.0  # seconds below which no phase is begun
COMMIT = (
    "gpu.py",
    "speculation.py",
    "exactness.py",
    "gpu_fla.py",
    "gpu_sums.py",
    "gpu_walks.py",
    "gpu_middle.py",
    "gpu_steps.py",
)  # scripts that put a given commit into their records

Command = list[str]


@dataclass(frozen=True)
class Phase:
    """One part of the evidence.

    Attributes:
        limit: most seconds that it gets.
        commands: its processes, which run all at once, given the folder of results.
        needs: catalogue models and Python packages without which it is skipped.
        before: commands that run one after another first, such as one that makes a file.
    """

    limit: float
    commands: Callable[[Path], list[Command]]
    needs: tuple[str, ...] = ()
    before: Callable[[Path], list[Command]] = lambda _: []


def phases(processes: int, only: Sequence[int] = ()) -> dict[str, Phase]:
    """All phases by name. processes: of the campaign; only: its cells, all if there are none."""
    return {
        "tests": Phase(560, tests),
        "campaign": Phase(560, partial(campaign, processes=processes, only=only), ("smollm2", "gguf"), references),
        "exactness": Phase(560, partial(bench, "exactness", "exactness.py", "--turn-batch 10"), ("smollm2",)),
        "speed": Phase(420, partial(speed, "speed", "--prompts 100 --drafters hybrid=mtp"), ("smollm2",)),
        "speed-bf16": Phase(420, bf16_speed, ("smollm2", "gguf"), bf16_file),
        "speed-sampled": Phase(
            200, partial(speed, "speed-sampled", "--prompts 0 --temperature 1 --drafters hybrid=mtp"), ("smollm2",)
        ),
        "monitoring": Phase(200, partial(bench, "monitoring", "monitoring.py", MONITORING), ("smollm2",)),
        "smollm2": Phase(200, partial(bench, "smollm2", "gpu.py", f"smollm2 {MODEL}"), ("smollm2",)),
        "gemma": Phase(200, partial(bench, "gemma", "gpu.py", f"gemma3-270m {MODEL}"), ("gemma3-270m",)),
        "qwen3-0.6b": Phase(200, partial(bench, "qwen3-0.6b", "gpu.py", f"qwen3-0.6b {MODEL}")),
        "qwen3-8b": Phase(400, partial(bench, "qwen3-8b", "gpu.py", f"qwen3-8b {MODEL}")),
        "long": Phase(200, partial(bench, "long", "gpu.py", LONG)),
        "sums": Phase(400, partial(apart, "sums"), before=partial(kernels, "sums")),
        "steps": Phase(400, partial(apart, "steps"), before=partial(kernels, "steps")),
        "middle": Phase(200, partial(apart, "middle")),
        "curve": Phase(200, partial(bench, "curve", "speculation.py curve", CURVE)),
        "peers": Phase(480, partial(bench, "peers", "gpu.py", PEERS)),
        "walks": Phase(200, partial(apart, "walks")),
        "fla": Phase(200, partial(apart, "fla"), ("fla", "einops")),
    }


GROUPS = {"models": ("smollm2", "gemma", "qwen3-0.6b", "qwen3-8b", "long")}
"""Names for several phases."""

MODEL = "--cases bits parity decode verify prefill where"  # everything but peers, which have a phase of their own
LONG = "qwen3-8b --cases decode --batches 16 64 --context model --long 32768"  # one long request among short ones
PEERS = "qwen3-8b qwen3-0.6b smollm2-bf16 gemma3-270m-bf16 --cases peers --patience 330"
MONITORING = "--batch 8 --tokens 1000 --pairs 60 --subscribers 1"
CURVE = "--geometry qwen3-8b --draft-us 100 --acceptances 0.5 0.7 0.8 0.9 0.95 1 --widths 1 3 5 7 11 15"
SPEED = "--warm-up 8 --repeats 1 --extra 14 --widths 1 3 7 15 31"


# --- what a phase runs ----------------------------------------------------------------------------------------------------------------


def bench(file: str, name: str, more: str, out: Path, paths: Sequence[str] = ()) -> list[Command]:
    """A benchmark that writes OUT/file.json. name: the script, and its part if it has some; paths: words that may hold spaces."""
    path, *part = name.split()
    return [
        [*script(f"bench/{path}"), *part, "--device", "cuda", *more.split(), *paths, "--output", f"{out}/{file}.json"]
    ]


def script(path: str) -> Command:
    return [sys.executable, str(ROOT / path)]


def tests(out: Path) -> list[Command]:
    return [[*script("tests/gpu/run.py"), "--limit", SECONDS, "--report", f"{out}/tests.json"]]


def apart(name: str, out: Path) -> list[Command]:
    """A script that measures one thing and needs to be told nothing else."""
    return [[*script(f"bench/gpu_{name}.py"), "--output", f"{out}/{name}.json"]]


def kernels(name: str, _: Path) -> list[Command]:
    """Compiles what a script launches, some hundred variants, by all cores."""
    return [[*script("bench/precompile.py"), name]]


def speed(file: str, more: str, out: Path, paths: Sequence[str] = ()) -> list[Command]:
    return bench(file, "speculation.py speed", f"{SPEED} {more}", out, paths)


CAMPAIGN = "--prompts 100 --tokens 256 --drafters"


def references(out: Path) -> list[Command]:
    """What requests alone say, once for all processes of the campaign."""
    file = f"--output {out}/references.log --references {out}/references.json"
    return [
        [
            *script("bench/speculation.py"),
            "campaign",
            "--device",
            "cuda",
            *f"{CAMPAIGN} ngram --cells -1 {file}".split(),
        ]
    ]


def campaign(out: Path, processes: int, only: Sequence[int] = ()) -> list[Command]:
    """All cells of the array, or only some, shared out so that a process needs few of the drafters' engines."""
    drafts = {name: draft for name, _, draft in (drafter.partition("=") for drafter in DRAFTERS)}
    array = cases([cast(Drafting, name) for name in drafts], [1, 8])
    numbers = sorted(only or range(len(array)), key=lambda number: (drafts[array[number]["drafter"]], number))
    commands = []
    for i in range(processes):
        share = sorted(numbers[i * len(numbers) // processes : (i + 1) * len(numbers) // processes])
        more = f"{CAMPAIGN} {' '.join(DRAFTERS)} --cells {' '.join(map(str, share))}"
        said = ("--references", f"{out}/references.json")
        commands += bench(f"campaign-{i}", "speculation.py campaign", more, out, said) if share else []
    return commands


def bf16_file(out: Path) -> list[Command]:
    """SmolLM2 as an unquantised file, with a drafter bound to it."""
    drafter = next((ROOT / "power_lab" / "drafters").glob("*/mtp.safetensors"))
    bind = [sys.executable, "-m", "power_lab.training", "bind", "--draft", str(drafter)]
    return [
        [*script("bench/bf16.py"), str(model_file("smollm2")), f"{out}/bf16.gguf"],
        [*bind, "--model", f"{out}/bf16.gguf", "--out", f"{out}/bf16.safetensors"],
    ]


def bf16_speed(out: Path) -> list[Command]:
    files = ("--model", f"{out}/bf16.gguf", "--drafters", f"hybrid={out}/bf16.safetensors")
    return speed("speed-bf16", "--prompts 100", out, files)


# --- running them ---------------------------------------------------------------------------------------------------------------------


def model_file(name: str) -> Path | None:
    """Of a catalogue model, if it is on this machine."""
    entry = catalogue_entry(CATALOGUE[name], Paths.default())
    return entry.path if entry.present else None


def missing(phase: Phase) -> str:
    """Why a phase cannot run on this machine; empty if it can."""
    for need in phase.needs:
        if need in CATALOGUE and model_file(need) is None:
            return f"{need} is not on this machine: power-lab models add {need}, or copy its file to {Paths.default().models}"
        if need not in CATALOGUE and find_spec(need) is None:
            return f"the package {need} is not installed"
    return ""


class Run:
    """Runs phases and keeps what each came to.

    Args:
        out: folder of results. limit: seconds for all phases. environment: of their processes.
        commit: what is run, where there is no repository. pack: file for the whole folder.
    """

    def __init__(
        self, out: Path, limit: float, environment: dict[str, str], commit: str = "", pack: Path | None = None
    ) -> None:
        self._out, self._environment, self._commit, self._pack = out, environment, commit, pack
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._end = time.monotonic() + limit - SPARE
        self.done: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)

    def phase(self, name: str, phase: Phase) -> None:
        """One phase, or why there is none; never raises for what a command does."""
        start, given = time.monotonic(), min(phase.limit, self._end - time.monotonic())
        commands: list[Command] = []
        if reason := missing(phase):
            status = f"skipped: {reason}"
        elif given < LEAST:
            status = "not begun: no time is left"
        else:
            with (self._out / f"{name}.log").open("w") as log:
                first = phase.before(self._out)
                commands = [self._filled(command, given) for command in phase.commands(self._out)]
                status = "ok"
                for together in (*([command] for command in first), commands):
                    if status == "ok":
                        status = self._together(together, start + given, log)
        self.done.append(
            {
                "phase": name,
                "status": status,
                "seconds": round(time.monotonic() - start, 1),
                "commands": [shlex.join(command) for command in commands],
            }
        )
        print(f"{name:14} {time.monotonic() - start:6.0f} s  {status}", flush=True)
        self._keep()

    @property
    def good(self) -> bool:
        return all(phase["status"] == "ok" or phase["status"].startswith("skipped") for phase in self.done)

    def _filled(self, command: Command, seconds: float) -> Command:
        """With what only a run knows."""
        most = f"{max(1, seconds - 2 * GRACE):.0f}"
        named = self._commit and Path(command[1]).name in COMMIT
        return [most if word == SECONDS else word for word in command] + (["--commit", self._commit] if named else [])

    def _together(self, commands: Sequence[Command], end: float, log: Any) -> str:
        """Processes at once, interrupted at `end` and ended a little later."""
        running = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
            for command in commands
        ]
        try:
            late = _wait(running, end - GRACE)
        finally:
            for number in (signal.SIGINT, signal.SIGKILL):
                left = [process for process in running if process.poll() is None]
                for process in left:
                    os.killpg(process.pid, number)
                if left:
                    _wait(running, time.monotonic() + GRACE)
        if late:
            return f"out of time: {late} of {len(running)} processes had not ended; what they had written is kept"
        failed = [process.returncode for process in running if process.returncode]
        return f"failed: exit status {', '.join(map(str, failed))}" if failed else "ok"

    def _keep(self) -> None:
        made = {"date": self._date, "commit": self._commit, "phases": self.done}
        (self._out / "summary.json").write_text(json.dumps(made, indent=1) + "\n")
        if self._pack:
            self._pack.parent.mkdir(parents=True, exist_ok=True)
            half = self._pack.with_name(f".{self._pack.name}")
            with tarfile.open(half, "w:gz") as archive:
                for path in sorted(self._out.iterdir()):
                    if path.suffix in (".json", ".log"):  # models that were made here stay here
                        archive.add(path, path.name)
            half.replace(self._pack)


def _wait(running: Sequence[subprocess.Popen[bytes]], end: float) -> int:
    """Until all have ended or time is over; how many had not ended then."""
    while (left := sum(process.poll() is None for process in running)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def chosen(names: Iterable[str], known: dict[str, Phase]) -> list[str]:
    """Phases in the order named, groups spelt out, none twice. Raises SystemExit for a name that is neither."""
    spelt = [one for name in names for one in GROUPS.get(name, (name,))]
    for name in spelt:
        if name not in known:
            raise SystemExit(f"{name!r} is no phase. Phases: {', '.join(known)}; groups: {', '.join(GROUPS)}")
    return list(dict.fromkeys(spelt))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="*", metavar="PHASE", help="all by default")
    parser.add_argument("--out", type=Path, help="folder of results")
    parser.add_argument("--gpu", help="the one to use, by its number; else as the environment says")
    parser.add_argument("--limit", type=float, default=570, help="seconds for everything")
    parser.add_argument("--processes", type=int, default=5, help="of the campaign")
    parser.add_argument("--cells", type=int, nargs="+", default=(), help="only these of the campaign")
    parser.add_argument("--pack", type=Path, help="a .tar.gz of the folder, written anew after every phase")
    parser.add_argument("--cache", type=Path, help="compiled kernels to begin with (bench/kernel_cache.py)")
    parser.add_argument("--commit", default="", help="what is run, where there is no repository")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    args = parser.parse_args()
    known = phases(args.processes, args.cells)
    names = chosen(args.phases or known, known)
    if args.list:
        for name in names:
            tell(name, known[name])
        return 0
    if args.out is None:
        parser.error("--out is needed: a folder for the results")
    if not has_gpu():
        parser.error("no NVIDIA GPU is here; --list says what would run")
    if args.cache:
        from bench import kernel_cache

        print(kernel_cache.unpack(args.cache, kernel_cache.default_cache()), "files of compiled kernels", flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": args.gpu} if args.gpu is not None else {}
    run = Run(args.out.resolve(), args.limit, environment, args.commit, args.pack and args.pack.resolve())
    for name in names:
        run.phase(name, known[name])
    return int(not run.good)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def tell(name: str, phase: Phase) -> None:
    reason = missing(phase)
    print(f"{name}: at most {phase.limit:.0f} s" + (f"; skipped: {reason}" if reason else ""))
    for command in () if reason else (*phase.before(Path("OUT")), *phase.commands(Path("OUT"))):
        print(f"    {shlex.join([Path(command[0]).name, *command[1:]]).replace(f'{ROOT}/', '')}")


if __name__ == "__main__":
    sys.exit(main())

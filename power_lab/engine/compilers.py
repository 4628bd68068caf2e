"""Processes that compile a model's kernels side by side while its weights are loaded, where Triton would compile one after another."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from power_lab.engine.config import EngineConfig, child_environment, usable_cores
from power_lab.models import Report

MOST = 16
MEMORY = 1 << 30  # bytes that one takes at most, its libraries included
LONGEST = 900  # seconds until the rest is left to first launches
EVERY = 0.05  # seconds between looks at what is done

_ROOT = Path(__file__).resolve().parents[2]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Whose kernels are compiled.

    Attributes:
        model: file or folder; drafter: the file of one that was trained for it, if any; digest: of what lies there and of the arithmetic.
        native: whether the layers for multi-token prediction that the model has itself draft.
        config: the engine's.
        context: longest request in tokens; vocab: tokens that the tokenizer knows, None if the model alone says how many.
        capability: the GPU's compute capability, as 90.
        launchers: whether the C code that launches them is compiled, too, for which the GPU's driver must be there.
    """

    model: str
    digest: str
    config: EngineConfig
    context: int
    vocab: int | None
    capability: int
    launchers: bool = True
    drafter: str = ""
    native: bool = False

    @property
    def mark(self) -> Path:
        """A file in Triton's cache that is there when all of them have been compiled."""
        from triton import knobs

        config = self.config
        parts = (self.digest, self.context, self.capability, config.step_tokens, config.max_batch, config.graph_mb > 0)
        parts += (config.buckets,) if config.buckets else ()
        said = (config.draft_vocabulary, config.draft_ranking)
        parts += (("said", *said),) if any(said) else ()
        return Path(knobs.cache.dir) / "power-lab" / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    @property
    def command(self) -> tuple[str, str]:
        """A module and its argument, as `Compilers` take them."""
        return "power_lab.engine.rehearsal", msgspec.json.encode(self).decode()


def usable() -> int:
    """How many compilers this machine bears."""
    return max(1, min(MOST, usable_cores(), psutil.virtual_memory().available // MEMORY))


class Compilers:
    """Processes at work; leaving the context ends those that still are.

    Args:
        command: a Python module and its arguments. A folder is added, in which `rehearsal.claims` shares the kernels out.
        count: of processes; 0 where there is nothing to compile.
        mark: a file to make when all is compiled.

    Attributes:
        fault: why there are none although they were asked for; else empty.
    """

    def __init__(self, command: Sequence[str] = (), count: int = 0, mark: Path | None = None) -> None:
        self._mark = mark
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._running: list[subprocess.Popen[bytes]] = []
        self.fault = ""
        if not count:
            return
        try:
            self._start(command, count)
        except OSError as error:  # no room for a folder, no process to be had
            self._end()
            self.fault = f"no compilers could be started: {error}"

    @classmethod
    def of(cls, asked: Asked) -> Compilers:
        """Those of a model's kernels; none when they were compiled before."""
        return cls(asked.command, 0 if asked.mark.exists() else usable(), asked.mark)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _start(self, command: Sequence[str], count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="power-lab-kernels-")
        line = [sys.executable, "-P", "-m", *command, self._folder.name]
        with (self._claims / "log").open("wb") as log:
            for _ in range(count):
                self._running.append(
                    subprocess.Popen(
                        line,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        env=child_environment(_ROOT),
                    )
                )

    def _end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def _claims(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name)

    def wait(self, progress: Report) -> str:
        """Until all is compiled. Returns what went wrong, in one line, or nothing."""
        if not self._running:
            return self.fault
        end = time.monotonic() + LONGEST
        while any(process.poll() is None for process in self._running):
            if time.monotonic() > end:
                return f"compilers were not done after {LONGEST} s"
            progress("kernels", *self._done())
            time.sleep(EVERY)
        done, count = self._done()
        progress("kernels", done, count)
        failed = [process.returncode for process in self._running if process.returncode]
        if not failed:
            self._remember()
            return ""
        said = (self._claims / "log").read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return f"compilers ended with status {failed[0]}: {said or 'they said nothing'}"

    def _remember(self) -> None:
        if self._mark is not None:
            with suppress(OSError):  # an unwritable cache costs the rehearsal each time
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()

    def _done(self) -> tuple[int, int]:
        """Variants that are compiled, and all; 0 of 0 until the first process knows them."""
        with suppress(OSError, ValueError):
            count = int((self._claims / "all").read_text())
            return sum(path.suffix == ".done" for path in self._claims.iterdir()), count
        return 0, 0

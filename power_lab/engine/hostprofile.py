"""The host profile: what the engine's thread may ask of the operating system. Off by default; each change is reported and undone.

On Linux, niceness and affinity belong to a thread and are inherited by the threads that it starts, so the engine's thread asks for
itself and the notebook's side of the process keeps what it has.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from power_lab.engine.report import Decision
from power_lab.errors import ConfigError

Setting = Literal["priority", "affinity", "stream priority"]

TOPOLOGY = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")
_CPUS = 1 << 16  # more than any kernel numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """What to ask for. Without arguments: nothing.

    Attributes:
        nice: niceness of the engine's thread, -20 (first served) to 19; None leaves it.
        physical_cores: keep the engine's thread to one hardware thread of each core.
        least_cores: cores that must be there for that; with fewer, a thread that is tied to some waits for the others' work.
        stream_priority: of the CUDA stream, for the runner to make it with; negative is first served, 0 is CUDA's default.

    Raises ConfigError for a niceness that does not exist.
    """

    nice: int | None = None
    physical_cores: bool = False
    least_cores: int = 3
    stream_priority: int = 0

    def __post_init__(self) -> None:
        if self.nice is not None and not -20 <= self.nice <= 19:
            raise ConfigError("nice", f"{self.nice} is outside -20..19")

    @classmethod
    def of(cls, on: bool) -> HostProfile:
        """The profile behind `host_profile=True`, or none."""
        return cls(nice=-5, physical_cores=True, stream_priority=-1) if on else cls()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one setting.

    Attributes:
        setting: which.
        before, after: niceness or priority as one number, affinity as the CPUs; equal where nothing changed.
        reason: why it is as it is now, the refusal's words included.
        thread: the thread that it was changed for, by Linux's number; 0, the calling process, where threads have no niceness of their own.
    """

    setting: Setting
    before: tuple[int, ...]
    after: tuple[int, ...]
    reason: str
    thread: int

    @property
    def changed(self) -> bool:
        return self.before != self.after

    def decision(self) -> Decision:
        """For `lab.explain()`."""
        now = _listed(self.after)
        value = f"{now} (was {_listed(self.before)})" if self.changed else now
        return Decision(key=f"host {self.setting}", value=value, owner="host", reason=self.reason)


def apply(profile: HostProfile, topology: Path = TOPOLOGY, stream: int | None = None) -> tuple[Change, ...]:
    """Ask for a profile, for the calling thread. Nothing that is refused raises: it is in the change's reason.

    Args:
        profile: what to ask for.
        topology: folder with a `cpuN/topology` for each CPU, as Linux has it.
        stream: priority of the stream that steps run on, read from the device, which was asked for it when it was made; None: it has none.

    Returns one change for each setting that the profile names.
    """
    changes = []
    if profile.nice is not None:
        changes.append(_renice(profile.nice))
    if profile.physical_cores:
        changes.append(_pin(topology, profile.least_cores))
    if profile.stream_priority:
        changes.append(_stream(profile.stream_priority, stream))
    return tuple(changes)


def restore(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Undo what `apply` changed, from any thread of this process. Returns what came of it; a thread that has ended has nothing to undo."""
    undo: dict[Setting, Callable[[int, tuple[int, ...]], None]] = {
        "priority": lambda thread, before: os.setpriority(os.PRIO_PROCESS, thread, before[0]),
        "affinity": lambda thread, before: os.sched_setaffinity(thread, before),
    }
    undone = []
    for change in reversed(changes):
        if not change.changed or change.setting not in undo:  # a stream ends with its runner
            continue
        if change.thread and not (_TASKS / str(change.thread)).exists():  # its number may be another program's by now
            undone.append(msgspec.structs.replace(change, before=change.after, reason="left: the thread has ended"))
            continue
        try:
            undo[change.setting](change.thread, change.before)
        except OSError as error:
            undone.append(msgspec.structs.replace(change, before=change.after, reason=_refusal(error)))
        else:
            undone.append(msgspec.structs.replace(change, before=change.after, after=change.before, reason="restored"))
    return tuple(undone)


def physical_cores(cpus: Sequence[int], topology: Path = TOPOLOGY) -> tuple[int, ...]:
    """Of some CPUs, the first of each core, ascending.

    Raises OSError where the system does not tell which CPUs share a core, ValueError where what it tells is no list of CPUs.
    """
    usable = set(cpus)
    first = set()
    for cpu in usable:
        with (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").open(encoding="ascii") as file:
            siblings = _cpu_list(file.read(4096))
        if cpu not in siblings:
            raise ValueError(f"CPU {cpu} is not among its own siblings")
        first.add(min(siblings & usable))
    return tuple(sorted(first))


def _renice(nice: int) -> Change:
    before = (os.getpriority(os.PRIO_PROCESS, 0),)
    if before[0] <= nice:
        return _change("priority", before, before, f"left: the profile asks for {nice}, which serves it no sooner")
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        return _change("priority", before, before, f"{_refusal(error)}; it takes CAP_SYS_NICE or a nice limit")
    return _change("priority", before, (nice,), "the engine's thread is served before others")


def _pin(topology: Path, least: int) -> Change:
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return _change("affinity", (), (), "this system has none")
    before = tuple(sorted(os.sched_getaffinity(0)))
    try:
        cores = physical_cores(before, topology)
    except (OSError, ValueError) as error:
        return _change("affinity", before, before, f"left: the cores are not known ({error})")
    if len(cores) < least:
        return _change("affinity", before, before, f"left: {len(cores)} physical cores, fewer than {least}")
    if cores == before:
        return _change("affinity", before, before, "left: each CPU is a core of its own")
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        return _change("affinity", before, before, _refusal(error))
    return _change("affinity", before, cores, f"one hardware thread of each of {len(cores)} cores")


def _stream(asked: int, priority: int | None) -> Change:
    if priority is None:
        return _change("stream priority", (), (), "left: not on a CPU, which has no streams")
    if priority == 0:
        return _change("stream priority", (0,), (0,), f"left: the device made no stream of priority {asked}")
    return _change(
        "stream priority", (0,), (priority,), f"steps run on a stream of their own; the profile asks for {asked}"
    )


def _change(setting: Setting, before: tuple[int, ...], after: tuple[int, ...], reason: str) -> Change:
    thread = threading.get_native_id() if sys.platform == "linux" else 0
    return Change(setting=setting, before=before, after=after, reason=reason, thread=thread)


def _refusal(error: OSError) -> str:
    return f"refused: {error.strerror or error}"


def _cpu_list(text: str) -> set[int]:
    """The kernel's notation for sets of CPUs, such as `0-3,8`. Raises ValueError for another."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= first <= last < _CPUS:
            raise ValueError(f"{part!r} is no range of CPUs")
        cpus.update(range(first, last + 1))
    return cpus


def _listed(numbers: tuple[int, ...]) -> str:
    """Runs of numbers as `0-3, 8`, so that an affinity of a hundred CPUs stays readable."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"

"""The host profile: asked of the real system in processes of their own, each change reported with its reason and undone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.hostprofile import Change, HostProfile, apply, physical_cores, restore
from power_lab.engine.request import SamplingParams
from power_lab.errors import ConfigError
from power_lab.kernels.ops import Ops
from tests import tiny

USABLE = sorted(os.sched_getaffinity(0))


def machine(folder: Path, siblings: dict[int, str]) -> Path:
    """A folder that describes CPUs as Linux does."""
    for cpu, text in siblings.items():
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{text}\n")
    return folder


def in_a_process(code: str, *arguments: str) -> Any:
    """Run code that prints JSON: a test's own process stays as it is."""
    head = "import json, os, sys, resource, threading\nfrom pathlib import Path\nfrom power_lab.engine.hostprofile import *\n"
    done = subprocess.run([sys.executable, "-c", head + code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_off_by_default_nothing_is_touched() -> None:
    before = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0))
    assert apply(HostProfile()) == apply(HostProfile.of(False)) == () == restore(())
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)) == before


PRIORITY = """
if "unprivileged" in sys.argv:
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
    if os.geteuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
base = os.getpriority(os.PRIO_PROCESS, 0)
nice = lambda: os.getpriority(os.PRIO_PROCESS, 0) - base
applied, restored, seen = threading.Event(), threading.Event(), []
def engine():
    global changes
    os.setpriority(os.PRIO_PROCESS, 0, base + 5)
    changes = apply(HostProfile(nice=base + int(sys.argv[1])))
    seen.append(nice()); applied.set(); restored.wait(60); seen.append(nice())
thread = threading.Thread(target=engine); thread.start(); applied.wait(60)
seen.append(nice())
undone = restore(changes); restored.set(); thread.join()
(change,) = changes
numbers = [[value[0] - base for value in (change.before, change.after)], [c.after[0] - base for c in undone]]
print(json.dumps([*numbers, change.reason, seen, [c.reason for c in undone]]))
"""


def test_a_niceness_that_is_low_enough_is_left() -> None:
    changed, undone, reason, seen, _ = in_a_process(PRIORITY, "5")
    assert changed == [5, 5] and undone == [] and "serves it no sooner" in reason
    assert seen == [5, 0, 5], "the engine's thread, the main one, and after restoring"


def test_a_refused_priority_says_so_and_changes_nothing() -> None:
    changed, undone, reason, seen, _ = in_a_process(PRIORITY, "3", "unprivileged")
    assert changed == [5, 5] and undone == [] and seen == [5, 0, 5]
    assert reason == "refused: Permission denied; it takes CAP_SYS_NICE or a nice limit"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority wherever the tests run")
def test_a_priority_is_raised_for_the_calling_thread_alone_and_any_thread_gives_it_back() -> None:
    changed, undone, reason, seen, reasons = in_a_process(PRIORITY, "3")
    assert changed == [5, 3] and undone == [5] and seen == [3, 0, 5]
    assert reason == "the engine's thread is served before others" and reasons == ["restored"]


AFFINITY = """
(change,) = changes = apply(HostProfile(physical_cores=True, least_cores=int(sys.argv[2])), Path(sys.argv[1]))
during = sorted(os.sched_getaffinity(0))
undone = restore(changes)
print(json.dumps([change.before, change.after, change.reason, during, sorted(os.sched_getaffinity(0)), len(undone)]))
"""


@pytest.mark.skipif(len(USABLE) < 2, reason="one CPU has no sibling to leave")
def test_the_thread_keeps_to_one_hardware_thread_of_each_core_until_it_is_given_back(tmp_path: Path) -> None:
    """This machine's CPUs, told to be hardware threads of one core."""
    together = ",".join(map(str, USABLE))
    topology = machine(tmp_path, dict.fromkeys(USABLE, together))
    before, after, reason, during, restored, undone = in_a_process(AFFINITY, str(topology), "1")
    assert before == restored == USABLE and after == during == USABLE[:1]
    assert reason == "one hardware thread of each of 1 cores" and undone == 1


def test_few_cores_are_left_alone(tmp_path: Path) -> None:
    topology = machine(tmp_path, {cpu: str(cpu) for cpu in USABLE})
    least = str(len(USABLE) + 1)
    before, after, reason, during, _, undone = in_a_process(AFFINITY, str(topology), least)
    assert before == after == during == USABLE and undone == 0
    assert reason == f"left: {len(USABLE)} physical cores, fewer than {least}"


def test_cores_without_siblings_have_nothing_to_leave(tmp_path: Path) -> None:
    topology = machine(tmp_path, {cpu: str(cpu) for cpu in USABLE})
    before, after, reason, *_ = in_a_process(AFFINITY, str(topology), "1")
    assert before == after == USABLE and reason == "left: each CPU is a core of its own"


@pytest.mark.parametrize("text", ["", "zero", "3-1", "0-99999999", "-1", str(max(USABLE) + 1)])
def test_a_topology_that_makes_no_sense_changes_nothing(tmp_path: Path, text: str) -> None:
    topology = machine(tmp_path, dict.fromkeys(USABLE, text))
    (change,) = apply(HostProfile(physical_cores=True, least_cores=1), topology)
    assert not change.changed and change.reason.startswith("left: the cores are not known (")
    assert sorted(os.sched_getaffinity(0)) == USABLE


def test_a_system_that_tells_no_topology_is_left(tmp_path: Path) -> None:
    (change,) = apply(HostProfile(physical_cores=True), tmp_path)
    assert not change.changed and "No such file" in change.reason


def test_this_machines_cores_are_found() -> None:
    """As psutil counts them."""
    cores, counted = physical_cores(USABLE), psutil.cpu_count(logical=False)
    assert set(cores) <= set(USABLE) and counted is not None
    assert len(cores) == counted if len(USABLE) == psutil.cpu_count() else len(cores) <= counted


@given(cores=st.integers(1, 40), threads=st.integers(1, 4), adjacent=st.booleans(), data=st.data())
def test_one_cpu_of_each_usable_core_is_chosen(
    tmp_path_factory: pytest.TempPathFactory, cores: int, threads: int, adjacent: bool, data: st.DataObject
) -> None:
    total = cores * threads
    core_of = {cpu: cpu // threads if adjacent else cpu % cores for cpu in range(total)}
    siblings = {cpu: ",".join(str(o) for o in core_of if core_of[o] == core_of[cpu]) for cpu in core_of}
    topology = machine(tmp_path_factory.mktemp("cpus"), siblings)
    usable = data.draw(st.lists(st.integers(0, total - 1), min_size=1, unique=True))
    chosen = physical_cores(usable, topology)
    assert set(chosen) <= set(usable)
    assert sorted(core_of[cpu] for cpu in chosen) == sorted({core_of[cpu] for cpu in usable})


def test_ranges_of_cpus_are_read(tmp_path: Path) -> None:
    topology = machine(tmp_path, {0: "0-1,64-65", 1: "0-1,64-65", 64: "0-1,64-65", 2: "2"})
    assert physical_cores((64, 1, 2), topology) == (1, 2)


@pytest.mark.parametrize(
    ("stream", "before", "after", "reason"),
    [
        (-1, (0,), (-1,), "the profile asks for -3"),
        (0, (0,), (0,), "left: the device made no stream of priority -3"),
        (None, (), (), "left: not on a CPU"),
    ],
)
def test_a_stream_priority_is_what_the_device_says(
    stream: int | None, before: tuple[int, ...], after: tuple[int, ...], reason: str
) -> None:
    (change,) = changes = apply(HostProfile(stream_priority=-3), stream=stream)
    assert (change.setting, change.before, change.after) == ("stream priority", before, after)
    assert reason in change.reason and change.changed == (before != after)
    assert restore(changes) == ()


@pytest.mark.parametrize(("capability", "told"), [(0, "none"), (90, "-1 (was 0)")])
def test_an_engine_tells_what_its_own_device_has(
    capability: int, told: str, numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it used to tell of a GPU's stream. torch is asked which stream is the current one in a step."""

    class Streaming:
        compiles_for, current = capability, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(numba_ops(1), name)

        @contextmanager
        def step(self) -> Iterator[None]:
            self.current = -1
            yield
            self.current = 0

    ops = Streaming()
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(priority=ops.current))
    engine = tiny.engine(tiny.Shape(), ops, threaded=True, host_profile=True)  # type: ignore[arg-type]
    try:
        engine.generate([1, 2, 3], SamplingParams(max_tokens=1))  # its thread has begun
        (decision,) = [one for one in engine.explain() if one.key == "host stream priority"]
    finally:
        engine.close()
    assert decision.value == told


def test_the_standard_profile_names_all_three_settings() -> None:
    found = in_a_process("print(json.dumps([c.setting for c in apply(HostProfile.of(True))]))")
    assert found == ["priority", "affinity", "stream priority"]


def test_a_thread_of_another_program_is_never_touched() -> None:
    """As when the engine's thread has ended and the system gave its number to another."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = os.getpriority(os.PRIO_PROCESS, other.pid)
    change = Change(setting="priority", before=(before + 1,), after=(before - 5,), reason="", thread=other.pid)
    (undone,) = restore((change,))
    assert not undone.changed and undone.reason == "left: the thread has ended"
    assert os.getpriority(os.PRIO_PROCESS, other.pid) == before
    other.communicate(b"\n")


def test_changes_are_decisions_of_the_host_and_cross_the_socket() -> None:
    change = Change(setting="affinity", before=tuple(range(8)), after=(0, 1, 2, 6), reason="why", thread=1)
    decision = change.decision()
    assert (decision.key, decision.value, decision.owner) == ("host affinity", "0-2, 6 (was 0-7)", "host")
    assert decision.reason == "why"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=Change) == change


def test_a_niceness_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="outside") as caught:
        HostProfile(nice=-21)
    assert caught.value.key == "nice"

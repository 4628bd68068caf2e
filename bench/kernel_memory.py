"""Memory of a notebook's kernel while it is told much: a real Power Lab kernel, a real engine host, a page that is played.

    python bench/kernel_memory.py [--events 100000] [--warm 50000] [--model smollm2] [--output FILE]

The kernel shows `lab.watch()`, a timeline and an acceptance trace, and its cells generate. An event is a sample of the engine host that
the dashboard takes and sends to the page. They come faster than the 20 a second that are offered, or 100,000 would take 83 minutes: the
host and the dashboard's subscription are told another limit, all else is as it is. A page that is played says every dozen events that it
sees the dashboard, about as often as one at 20 events a second says anything; each second it refreshes the timeline and asks the
acceptance trace for another setting's rounds.

First the engine makes more steps than it keeps, so that the timeline holds all that it can hold, and `--warm` events come. From there on
the kernel's memory is read after every 2,500. `growth_bytes_per_100000_events` is the median of the slopes between all pairs of readings,
for some fall into a refresh; `in_their_second_half` that of the later ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from queue import Empty
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import monitoring  # noqa: E402
from bench.cpu import about  # noqa: E402
from power_lab.engine import vitals  # noqa: E402
from power_lab.engine.config import EngineConfig, Paths  # noqa: E402
from power_lab.engine.engine import Engine  # noqa: E402
from power_lab.engine.host.api import OnProgress  # noqa: E402
from power_lab.engine.monitor import RING  # noqa: E402
from tests.homes import own_home  # noqa: E402
from tests.hosting import Home  # noqa: E402
from tests.jupyter.kernels import Kernel, Outcome  # noqa: E402
from tests.jupyter.pages import Page  # noqa: E402

LIMIT = 100_000  # events for which the kernel may grow by a megabyte
STEP = 2_500  # events between readings: a cell, which may take a minute
BEAT = 12  # events between two words of the page on the dashboard
STEPS = 700  # of each of the runs that fill the engine's ring
FASTEST_HZ = 1000.0

LOADED = """
from power_lab.engine import vitals
from power_lab.engine.config import HostSettings
from power_lab.lab import Lab
vitals.FASTEST_HZ = {fastest}
lab = Lab(settings=HostSettings(factory={factory!r}, client="bench"))
lab.load({model!r}, threads=1, max_batch=1)
"""
FILL = 'run = lab.generate("Count.", max_tokens={steps}, ignore_eos=True, speculate="off")'
SHOWN = """
options = dict(max_tokens=48, ignore_eos=True, speculate="ngram")
run = lab.generate("One, two, three, one, two, three, one,", **options)

class Told:
    taken = 0
    def __init__(self, source):
        self.source = source
    def __call__(self, on_vitals, hz, on_end):
        def take(one):
            on_vitals(one)
            self.taken += 1
        return self.source(take, {hz} if hz > 1 else hz, on_end)

watch = lab.watch(hz=20)
watch._stop()
told = watch._source = Told(watch._source)
watch._begin()
timeline, acceptance = lab.inspect.timeline(live=True), lab.inspect.acceptance(run)
"""
ROUND = """
end = told.taken + {events}
while told.taken < end:
    run = lab.generate("One, two, three, one, two, three, one,", **options)
"""


def make(config: EngineConfig, *, paths: Paths, progress: OnProgress) -> Engine:
    """For hosts: an engine, in a process that offers more samples a second."""
    vitals.FASTEST_HZ = FASTEST_HZ
    return monitoring.make(config, paths=paths, progress=progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--events", type=int, default=LIMIT, help="that count")
    parser.add_argument("--warm", type=int, default=LIMIT // 2, help="events before them")
    parser.add_argument("--hz", type=float, default=400.0, help="samples a second")
    parser.add_argument("--output", type=Path, help="also write the result with machine and commit to this file")
    args = parser.parse_args()
    args.threads = 1
    with tempfile.TemporaryDirectory(prefix="power-lab-memory-") as folder, kernel(Path(folder)) as shown:
        result = measure(shown, args)
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps({"run": about(args), **result}, indent=1) + "\n")


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel of this tree's kernelspec, with an engine host of its own."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    shutil.copytree(ROOT / "power_lab" / "jupyter" / "kernelspec", folder / "kernels" / "power_lab")
    specs = KernelSpecManager(kernel_dirs=[str(folder / "kernels")], ensure_native_kernel=False)
    (folder / "home").mkdir()
    with own_home(folder / "home") as home:
        manager = KernelManager(kernel_name="power_lab", kernel_spec_manager=specs)
        made = Kernel(manager, Home(home), folder, {"PYTHONPATH": str(ROOT)})
        try:
            yield made
        finally:
            made.close()


def measure(kernel: Kernel, args: argparse.Namespace) -> dict[str, Any]:
    """Memory by events, and what else came meanwhile."""
    factory = f"{Path(__file__).resolve()}:make"
    ran(kernel, LOADED.format(fastest=FASTEST_HZ, factory=factory, model=args.model))
    for _ in range(-(-RING // STEPS)):
        ran(kernel, FILL.format(steps=STEPS))
    ran(kernel, SHOWN.format(hz=args.hz))
    comms = dict(zip(("watch", "timeline", "acceptance"), names(kernel), strict=True))
    with looked_at(kernel, comms) as came:
        for _ in range(args.warm // STEP):
            ran(kernel, ROUND.format(events=STEP))
        began, start = time.perf_counter(), counted(kernel)
        readings = [reading(kernel, start)]
        for _ in range(args.events // STEP):
            ran(kernel, ROUND.format(events=STEP))
            readings.append(reading(kernel, start))
        seconds = time.perf_counter() - began
    assert came["watch"] and came["timeline"] and came["acceptance"], came
    return {
        "model": args.model,
        "events_before": start,
        "events": readings[-1]["events"],
        "events_a_second": round(readings[-1]["events"] / seconds, 1),
        "messages_to_the_page": dict(came),
        "growth_bytes_per_100000_events": growth(readings),
        "in_their_second_half": growth(readings[len(readings) // 2 :]),
        "readings": readings,
    }


def ran(kernel: Kernel, code: str) -> Outcome:
    done = kernel.run(code)
    if done.status != "ok":
        raise SystemExit(done.text)
    return done


def names(kernel: Kernel) -> list[str]:
    """The comms of the three views."""
    return ran(kernel, "print(*(view.comm.comm_id for view in (watch, timeline, acceptance)))").text.split()


def counted(kernel: Kernel) -> int:
    return int(ran(kernel, "print(told.taken)").text)


def reading(kernel: Kernel, start: int) -> dict[str, int]:
    """Events since `start`, and the kernel's memory in bytes: its own (USS) and all that it maps (RSS)."""
    events = counted(kernel) - start
    memory = psutil.Process(kernel.pid).memory_full_info()
    return {"events": events, "uss": memory.uss, "rss": memory.rss}


@contextmanager
def looked_at(kernel: Kernel, comms: dict[str, str]) -> Iterator[Counter[str]]:
    """A page that shows the views and takes what they send: how many messages came, by view."""
    came: Counter[str] = Counter()
    of, ended, page = {comm: view for view, comm in comms.items()}, threading.Event(), Page(kernel)

    def say(view: str, **content: Any) -> None:
        page.tell(comms[view], {"method": "custom", "content": content})

    def look() -> None:
        due, told = 0.0, -BEAT
        while not ended.is_set():
            if came["watch"] - told >= BEAT:
                told = came["watch"]
                say("watch", kind="watch", page="bench", on=True)
            if time.monotonic() >= due:
                due = time.monotonic() + 1
                say("timeline", kind="refresh")
                say("acceptance", kind="what-if", drafter="ngram", width=4)
            try:
                message = page.client.get_iopub_msg(timeout=0.1)
            except Empty:
                continue
            if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] in of:
                came[of[message["content"]["comm_id"]]] += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield came
    finally:
        ended.set()
        thread.join()
        page.close()


def growth(readings: Sequence[dict[str, int]]) -> dict[str, int]:
    """Median slopes between readings, in bytes for `LIMIT` events."""
    pairs = [*combinations(readings, 2)]
    return {
        what: round(LIMIT * statistics.median((b[what] - a[what]) / (b["events"] - a["events"]) for a, b in pairs))
        for what in ("uss", "rss")
    }


if __name__ == "__main__":
    main()

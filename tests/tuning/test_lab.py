"""`lab.sweep` on a real host with the fake engine: the lab is afterwards as it was."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path

import pytest

from power_lab.engine.config import HostSettings
from power_lab.errors import ConfigError
from power_lab.lab import connect
from tests import hosting

TINY = f"{Path(__file__).parents[1] / 'engine' / 'host' / 'tiny_engine.py'}:make"


@pytest.fixture
def lab(tmp_path):
    with hosting.home(tmp_path / "h") as home:
        made = connect(paths=home.paths, settings=home.settings)
        made.load("fake", kv_tokens=8192)
        yield made
        made.disconnect()


def engines(lab):
    return sorted(one.config.kv_tokens for one in lab.status().engines)


def test_engines_come_and_go_and_the_lab_has_its_own_settings_again(lab):
    found = lab.sweep(["a", "b"], kv_tokens=[1024, 2048], batch=[1, 2], max_tokens=4, repeats=1, progress=False)
    assert [group[0].config.kv_tokens for group in found.plan.groups] == [1024, 2048]
    assert all(point.measured for point in found.points), [point.reason for point in found.points]
    assert bool(found.exactness)
    assert engines(lab) == [], "none that the sweep needed is left"
    assert lab.last is None, "its runs are its own"
    assert lab.generate("a", max_tokens=4, stream=False).record.engine.config["kv_tokens"] == 8192
    assert engines(lab) == [8192]


def test_the_engine_in_use_stays(lab):
    lab.configure(draft="")
    kept = lab.engine.key
    lab.sweep("a", width=[1, 3], speculate="lookup", max_tokens=4, repeats=1, progress=False)
    assert lab.engine.key == kept


def test_an_engine_that_cannot_be_loaded_is_a_reason(lab):
    found = lab.sweep("a", model=["fake", "broken"], max_tokens=4, repeats=1, progress=False)
    assert [point.reason for point in found.points] == ["", "broken.gguf: truncated at byte 12. Fetch it again."]
    assert lab.generate("a", max_tokens=4, stream=False).record.engine.model == "fake"


def test_graphs_are_recorded_and_swept_on_a_cpu_too(tmp_path):
    with hosting.home(tmp_path / "h") as home:
        tiny = connect(paths=home.paths, settings=HostSettings(factory=TINY, client="test"))
        tiny.load("tiny", kv_tokens=2048)
        found = tiny.sweep(
            "abc", chat=False, graph_mb=[0, 512], max_tokens=8, ignore_eos=True, repeats=1, progress=False
        )
        tiny.disconnect()
    off, on = found.points
    assert off.measured and on.measured and bool(found.exactness), [point.reason for point in found.points]
    assert math.isnan(off.figures["graph_hits"]) and on.figures["graph_hits"] > 0
    assert off.figures["graphs_bytes"] == 0 < on.figures["graphs_bytes"]


def test_a_real_interrupt_gives_back_what_is_whole(lab):
    def strike():
        hosting.eventually(lambda: any(one.runs for one in lab.status().engines))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    found = lab.sweep("slow", width=[1, 3], speculate="lookup", max_tokens=500, repeats=1, warmup=0, progress=False)
    thread.join(hosting.HANG_S)
    assert found.stopped == "interrupted"
    assert not any(point.measured for point in found.points)
    assert "No point was measured" in found.show().to_html()
    hosting.eventually(lambda: not any(one.runs for one in lab.status().engines))
    assert lab.generate("a", max_tokens=4, stream=False).tokens


def test_a_host_that_ends_ends_the_sweep_with_its_reason(lab):
    def end():
        hosting.eventually(lambda: any(one.runs for one in lab.status().engines))
        hosting.kill(lab.status().pid)

    thread = threading.Thread(target=end)
    thread.start()
    found = lab.sweep("slow", width=[1, 3], speculate="lookup", max_tokens=500, repeats=1, progress=False)
    thread.join(hosting.HANG_S)
    assert found.stopped
    assert lab.generate("a", max_tokens=4, stream=False).tokens, "a new host serves the next call"


def test_wrong_settings_load_nothing(lab):
    key = lab.engine.key
    with pytest.raises(ConfigError, match="multiple of 64"):
        lab.sweep("a", kv_tokens=[1000], progress=False)
    assert lab.engine.key == key

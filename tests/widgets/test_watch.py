"""The dashboard: what it keeps, when it asks, and what it says when there is nothing to watch."""

from __future__ import annotations

import asyncio
import re
import time

import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances
from msgspec.structs import replace

from power_lab.engine.vitals import EngineVitals
from power_lab.errors import ConfigError, HostUnavailable
from power_lab.widgets import watch as module
from power_lab.widgets import watch_page
from power_lab.widgets.history import FIELDS, History
from power_lab.widgets.watch import HostSource, Watch, _facts
from tests import hosting
from tests.widgets.reports import vitals


class Source:
    """Samples by hand."""

    def __init__(self, there=True):
        self.there, self.begun, self.closed = there, 0, 0

    def __call__(self, on_vitals, hz, on_end):
        if not self.there:
            raise HostUnavailable("No engine is running.", "Load one.")
        self.begun += 1
        self.on_vitals, self.on_end, self.hz = on_vitals, on_end, hz
        for seq in range(2):
            on_vitals(vitals(seq, at=1000.0 + seq, tokens=10 * seq))
        return self

    def close(self):
        self.closed += 1


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def view(source):
    made = Watch(source)
    yield made
    made.close()


def test_rates_are_over_the_last_second():
    history = History(100)
    for at in range(21):
        sample = vitals(at, at=at * 0.1, tokens=at * 3, drafted=at * 4, accepted=at, passes=at * 2)
        row = history.add(sample, sample.engines[0])
    told = dict(zip(FIELDS, row, strict=True))
    assert told["tokens_per_s"] == pytest.approx(30)
    assert told["acceptance"] == pytest.approx(0.25)
    assert told["tokens_per_pass"] == pytest.approx(1.5)
    assert np.isnan(told["hit_rate"])
    assert np.isnan(told["power_w"])


def test_lines_go_by_time_whatever_the_rate():
    history = History(100)
    for tick, at in enumerate([0.0, 1.0, *np.arange(1.1, 2.05, 0.1)]):
        sample = vitals(tick, at=at, tokens=tick, running=2)
        history.add(sample, sample.engines[0])
    tile = next(one for one in watch_page.TILES if one.field == "running")
    drawn = watch_page._line(tile, history.column("running"), history.column("at"), 100.0, 40.0)
    places = [float(place) for place in re.findall(r"[ML]([\d.]+)", drawn)]
    assert places[:3] == pytest.approx([0.0, 50.0, 55.0], abs=0.1)
    assert places[-1] == 100.0


def test_memory_stays_and_the_oldest_go():
    history = History(10)
    for at in range(1000):
        sample = vitals(at, at=float(at), tokens=at)
        history.add(sample, sample.engines[0])
    assert len(history) == 10
    assert history.column("at").tolist() == list(range(990, 1000))


def test_an_engine_that_began_anew_begins_a_new_history():
    history = History(10)
    for tokens in (5, 9, 2):
        sample = vitals(at=float(tokens), tokens=tokens)
        history.add(sample, sample.engines[0])
    assert history.column("tokens").tolist() == [2]
    other = EngineVitals(
        engine="two", model="m", device="cpu", mode="exact", state="ready", stage="", clients=(), tokens=7
    )
    history.add(vitals(engines=(other,)), other)
    assert len(history) == 1


def test_the_static_view_stands_alone(view):
    html = view.to_html()
    for banned in ("<script", "<link", "href=", "@import", "onclick", "<svg"):
        assert banned not in html, banned
    assert html.count("<img") == html.count('src="data:image/svg+xml,')
    assert html.count("<img") == 9  # the temperature and the power of a CPU cannot be read here
    assert "smollm2" in html
    assert view.summary() == "Watch smollm2: 10.0 tokens/s, 0 running, 0 waiting"
    assert len(html) < 40_000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_graph_hits_are_told_of_every_device(device):
    """A CPU's steps are recorded once a shape and replayed, too; the memory plan and the inspector of shapes count these graphs."""
    told = vitals(engines=(replace(vitals(graph_hit_rate=0.9).engines[0], device=device),))
    history = History(4)
    history.add(told, told.engines[0])
    assert ">graph hits<" in watch_page.page(_facts(told, told.engines[0]), history)
    assert "graph hits" in watch_page.picture(history)
    assert history.column("graph_hit_rate").tolist() == [0.9]


def on_a_gpu(seq):
    """A sample after the engine was loaded again on a device whose temperature and power can be read."""
    engine = replace(vitals().engines[0], engine="two", device="cuda")
    seen = vitals(seq, at=2000.0 + seq, engines=(engine,))
    return replace(seen, device=replace(seen.device, name="H200", temperature_c=41.0, power_w=None if seq else 120.0))


def test_the_tiles_are_those_of_the_engine_that_is_shown_now(view, source):
    assert "temperature_c" not in view.facts["tiles"]
    source.on_vitals(on_a_gpu(0))
    assert {"temperature_c", "power_w", "graph_hit_rate"} <= set(view.facts["tiles"])
    assert ">temperature<" in view.to_html()
    source.on_vitals(on_a_gpu(1))
    assert "power_w" in view.facts["tiles"], "a sensor that fails once keeps its tile"
    source.on_vitals(vitals(9, at=3000.0))
    assert "temperature_c" not in view.facts["tiles"], "loaded on the CPU again"


def test_names_cannot_reach_the_page(view, source):
    evil = EngineVitals(
        engine="e", model="<script>x", device="<b>", mode="exact", state="ready", stage="", clients=(), drafter="<i>"
    )
    source.on_vitals(vitals(engines=(evil,)))
    assert "<script" not in view.to_html()
    assert "<i>" not in view.to_html()


def test_out_of_sight_it_keeps_its_history_and_sends_nothing(view, source, monkeypatch):
    assert view.asking
    view._answer(view, {"kind": "watch", "page": "p", "on": True}, [])
    view._answer(view, {"kind": "watch", "page": "q", "on": True}, [])
    view._answer(view, {"kind": "watch", "page": "p", "on": False}, [])
    assert view.asking and not view.resting
    view._answer(view, {"kind": "watch", "page": "q", "on": False}, [])
    assert view.resting
    assert (source.begun, source.closed, source.hz) == (2, 1, module.REST_HZ)
    kept, frame = len(view.history), view.frame
    source.on_vitals(vitals(3, at=1005.0, tokens=60))
    assert len(view.history) == kept + 1
    assert view.frame == frame
    sent = []
    monkeypatch.setattr(view, "send", lambda content, buffers=(): sent.append(buffers))
    view._answer(view, {"kind": "watch", "page": "q", "on": True}, [])
    assert view.asking and not view.resting and source.hz == view.hz
    assert len(sent[0][0]) == len(view.history) * len(FIELDS) * 8, "what happened out of sight is told"


def test_it_rests_for_a_while_only(view, source, monkeypatch):
    view._answer(view, {"kind": "watch", "page": "p", "on": True}, [])
    view._answer(view, {"kind": "watch", "page": "p", "on": False}, [])
    for kept in (True, False):
        monkeypatch.setattr(module, "REST_S", 900.0 if kept else 0.0)
        view._turned = 0.0
        source.on_vitals(vitals(at=1100.0))
        assert view.asking == kept
    kept = len(view.history)
    source.on_vitals(vitals(at=1200.0))  # on its way
    assert len(view.history) == kept
    view._answer(view, {"kind": "watch", "page": "p", "on": False}, [])
    assert not view.asking, "what does not ask does not begin to rest"


def test_without_a_page_it_stops_by_itself(view, source, monkeypatch):
    monkeypatch.setattr(module, "UNASKED_S", 0.0)
    view._turned = 0.0
    source.on_vitals(vitals())
    assert not view.asking


def test_a_page_that_fell_silent_is_gone_but_not_in_busy_seconds(source, monkeypatch):
    monkeypatch.setattr(module, "UNASKED_S", 0.0)
    asyncio.run(silence(source))


async def silence(source):
    view = Watch(source)
    view._answer(view, {"kind": "watch", "page": "p", "on": True}, [])
    for _ in range(module.LEASE + 5):  # samples while the loop is busy: it turns once at most
        view._turned = 0.0
        source.on_vitals(vitals())
    await asyncio.sleep(0)
    assert view._pages == {"p": 1}
    for _ in range(module.LEASE + 5):
        view._turned = 0.0
        source.on_vitals(vitals())
        await asyncio.sleep(0)
    assert not view._pages
    assert not view.asking
    view.close()


def test_a_new_page_gets_the_history(view, monkeypatch):
    sent = []
    monkeypatch.setattr(view, "send", lambda content, buffers=(): sent.append((content, buffers)))
    for _ in range(2):
        view._answer(view, {"kind": "watch", "page": "p", "on": True}, [])
    assert len(sent) == 1
    assert len(sent[0][1][0]) == len(view.history) * len(FIELDS) * 8
    for junk in ({"page": 1}, {"page": "x" * 65}, {}):
        view._answer(view, {"kind": "watch", "on": True, **junk}, [])
    assert list(view._pages) == ["p"]
    for page in range(40):
        view._answer(view, {"kind": "watch", "page": str(page), "on": True}, [])
    assert len(view._pages) == 16


def test_the_end_is_told_at_once_and_the_next_word_tries_again(view, source):
    source.on_end(HostUnavailable("The host has gone.", "Load it again."))
    assert view.facts["state"] == "ended"
    assert "The host has gone" in view.facts["message"]
    assert not view.asking
    assert "<img" in view.to_html()  # the last snapshot
    source.there = False
    view._answer(view, {"kind": "watch", "page": "p", "on": True}, [])
    assert view.facts["state"] == "none"
    source.there = True
    view._answer(view, {"kind": "watch", "page": "p", "on": True}, [])
    assert view.facts["state"] == "live"


def test_nothing_to_watch_says_what_to_do():
    view = Watch(Source(there=False))
    assert "No engine to watch" in view.to_html()
    assert "Load one." in view.to_html()
    assert view.export("json")
    assert view.dataset.sizes["sample"] == 0
    view.close()


def test_an_engine_that_loads_says_its_stage(view, source):
    loading = EngineVitals(
        engine="", model="m", device="cpu", mode="exact", state="loading", stage="weights", clients=()
    )
    source.on_vitals(vitals(engines=(loading,)))
    assert view.facts["state"] == "loading"
    assert view.facts["message"] == "weights"


@pytest.mark.parametrize("hz", [0.5, 21, float("nan")])
def test_rates_that_are_not_offered_are_refused(source, hz):
    with pytest.raises(ConfigError):
        Watch(source, hz=hz)
    assert not source.begun


def test_samples_as_data_and_as_files(view):
    data = view.dataset
    assert data.sizes["sample"] == 2
    assert data.tokens_per_s.attrs["units"] == "token/s"
    assert all(variable.attrs["units"] for variable in data.variables.values())
    for kind in view.formats:
        assert view.export(kind)


def test_closing_leaves_nothing():
    before = set(_instances)
    source = Source()
    view = Watch(source)
    view.close()
    assert source.closed == 1
    assert set(_instances) == before


def test_frames_cost_little(view, source):
    began = time.thread_time()
    for at in range(200):
        source.on_vitals(vitals(at, tokens=10 + at))
    assert len(view.history) == 202
    assert np.frombuffer(view.frame).shape == (len(FIELDS),)
    assert time.thread_time() >= began


def test_the_script_is_text_and_small():
    assert isinstance(Watch._esm, str)
    assert len(Watch._esm.encode()) < 20_000


def test_leaving_a_host_is_not_told_as_its_end(tmp_path):
    with hosting.home(tmp_path / "h") as home:
        engine = home.engine()
        ends, seen = [], []
        source = HostSource(home.paths, home.settings)
        left = source(seen.append, 20.0, ends.append)
        hosting.eventually(lambda: bool(seen))
        left.close()
        assert not ends
        stays = source(seen.append, 20.0, ends.append)
        hosting.kill(engine.client.pid)
        hosting.eventually(lambda: bool(ends))
        assert "is gone" in str(ends[0])
        stays.close()
        assert len(ends) == 1

"""Subscriptions, Stop and Release at real hosts."""

from __future__ import annotations

import socket
import threading
import time

import msgspec
import psutil
import pytest

from power_lab.engine.config import EngineConfig
from power_lab.engine.host import protocol as wire
from power_lab.engine.host.client import HostClient
from power_lab.engine.host.pulse import BACKLOG, SUBSCRIPTIONS
from power_lab.engine.request import SamplingParams
from power_lab.engine.vitals import LensAsk, Vitals
from power_lab.errors import ConfigError, EngineClosed, HostUnavailable, PowerLabError, QueueFull, RequestCancelled
from tests.hosting import HANG_S, Home, eventually, kill, raises

LONG = SamplingParams(max_tokens=1_000_000, seed=1)


def test_samples_tell_counters_rates_and_who_runs_what(home: Home):
    engine = home.engine()
    seen: list[Vitals] = []
    feed = engine.subscribe(seen.append, hz=20)
    run = engine.submit("slow", LONG)
    eventually(lambda: bool(seen) and seen[-1].of(engine.key) is not None and seen[-1].of(engine.key).tokens_per_s > 0)  # type: ignore[union-attr]
    last = seen[-1]
    told = last.of(engine.key)
    assert told is not None and last.of("other") is None
    assert [sample.seq for sample in seen] == list(range(1, len(seen) + 1))
    assert (told.state, told.model, told.ends_in_s) == ("ready", "fake", None)
    assert told.clients == last.clients and told.clients[0].startswith("test (pid ")
    assert [one.client for one in told.runs] == list(told.clients)
    assert all(one.client for sample in seen for one in sample.engines[0].runs), "from its first sample on"
    assert last.pid == engine.client.pid and last.resident > 0 and last.device.name == "cpu"
    assert seen[0].engines[0].tokens_per_s == 0, "a first sample has nothing to compare with"
    feed.close()
    run.settle()


def test_two_subscribers_have_their_own_pace(home: Home):
    engine = home.engine()
    fast: list[Vitals] = []
    slow: list[Vitals] = []
    feeds = [engine.subscribe(fast.append, hz=20), home.client().subscribe(slow.append, hz=1)]
    eventually(lambda: len(fast) > 25)
    assert 1 <= len(slow) < len(fast) / 2
    for feed in feeds:
        feed.close()
        feed.close()
    count = len(fast)
    engine.status()  # the cancel has arrived before this
    settled = len(fast)
    time.sleep(0.2)
    assert len(fast) == settled <= count + 1


@pytest.mark.parametrize("hz", [0.0, 0.1, 20.5, -1.0, float("nan"), float("inf")])
def test_other_rates_are_refused(home: Home, hz: float):
    ends: list[PowerLabError] = []
    feed = home.client().subscribe(lambda vitals: None, hz, ends.append)
    eventually(lambda: bool(ends))
    assert isinstance(ends[0], ConfigError) and "hz" in ends[0].message and not feed.open


def test_subscriptions_of_a_client_are_bounded(home: Home):
    client = home.client()
    ends: list[PowerLabError] = []
    feeds = [client.subscribe(lambda vitals: None, 1.0, ends.append) for _ in range(SUBSCRIPTIONS + 1)]
    eventually(lambda: bool(ends))
    assert [type(end) for end in ends] == [QueueFull]
    assert [feed.open for feed in feeds] == [True] * SUBSCRIPTIONS + [False]


def test_the_end_of_the_host_is_told(home: Home):
    engine = home.engine()
    ends: list[PowerLabError] = []
    engine.subscribe(lambda vitals: None, 20, ends.append)
    kill(engine.client.pid)
    eventually(lambda: bool(ends))
    assert isinstance(ends[0], HostUnavailable)


def test_a_hundred_subscriptions_leave_nothing(home: Home):
    engine = home.engine()
    process = psutil.Process(engine.client.pid)
    seen: list[Vitals] = []

    def subscribed() -> None:
        before = len(seen)
        feed = engine.subscribe(seen.append, 20)
        eventually(lambda: len(seen) > before)
        feed.close()

    subscribed()
    engine.status()
    before = process.num_fds()
    for _ in range(100):
        subscribed()
    assert engine.client._mail == {}  # noqa: SLF001
    engine.status()
    eventually(lambda: process.num_fds() <= before)
    eventually(lambda: process.num_threads() <= 8)
    feeds = [engine.subscribe(lambda vitals: None, 1) for _ in range(SUBSCRIPTIONS)]
    assert engine.status().running == 0 and all(feed.open for feed in feeds)


def test_whoever_does_not_read_gets_fewer_samples(home: Home):
    engine = home.engine()
    runs = [engine.submit("slow", LONG) for _ in range(40)]  # so that samples are large
    sock = _connected(home)
    for number in range(1, SUBSCRIPTIONS + 1):
        sock.sendall(wire.pack(wire.Subscribe(id=number, hz=20), wire.REQUEST_LIMIT))
    time.sleep(2.5)
    sock.sendall(wire.pack(wire.Query(id=99, kind="engines"), wire.REQUEST_LIMIT))
    sizes = []
    while not isinstance(reply := wire.reply_of(wire.receive_frame(sock, wire.REPLY_LIMIT) or b""), wire.Answer):
        if isinstance(reply, wire.Sample):
            sizes.append(len(wire.pack(reply, wire.REPLY_LIMIT)))
    sent = SUBSCRIPTIONS * 20 * 2.5 * max(sizes)
    assert sum(sizes) < sent / 2 and sum(sizes) < BACKLOG * SUBSCRIPTIONS + (1 << 20)
    for run in runs:
        run.cancel()
    assert {run.result().finish for run in runs} == {"cancelled"}
    sock.close()


def test_subscribe_and_cancel_under_load_lose_no_output(home: Home):
    engine = home.engine()
    runs = [engine.submit("slow", SamplingParams(max_tokens=60, seed=seed)) for seed in range(4)]
    feeds = []
    for _ in range(30):
        feeds.append(engine.subscribe(lambda vitals: None, 20))
        if len(feeds) > 4:
            feeds.pop(0).close()
    deltas: list[list[int]] = [[] for _ in runs]
    for run, told in zip(runs, deltas, strict=True):
        record = run.result(on_delta=lambda delta, told=told: told.append(delta.tokens))
        assert record.finish == "length" and told == list(range(1, 61))


def test_stop_ends_the_runs_of_all_clients_of_one_engine(home: Home):
    mine, theirs, other = home.engine(), home.engine(), home.engine(model="another")
    runs = [engine.submit("slow", LONG) for engine in (mine, theirs, other)]
    observer = HostClient.find(home.paths, home.settings)
    assert observer is not None
    eventually(lambda: sum(engine.runs for engine in observer.status().engines) == 3)
    observer.stop_runs(mine.key)
    assert [run.result(HANG_S).finish for run in runs[:2]] == ["cancelled"] * 2
    assert other.status().running == 1, "other engines go on"
    runs[2].settle()
    raises(EngineClosed, lambda: observer.stop_runs("nothing"))
    assert mine.submit("again", SamplingParams(max_tokens=2)).result().finish == "length"
    observer.close()


def test_release_closes_an_engine_over_its_holders_heads(home: Home):
    mine, theirs = home.engine(), home.engine()
    run = theirs.submit("slow", LONG)
    observer = HostClient.find(home.paths, home.settings)
    assert observer is not None
    eventually(lambda: theirs.status().running == 1)
    observer.release(mine.key)
    assert run.result(HANG_S).finish == "cancelled"
    for call in (
        lambda: mine.submit("x", SamplingParams()).result(),
        theirs.status,
        lambda: observer.release(mine.key),
    ):
        error = raises(EngineClosed, call)
        assert f"closed by test (pid {psutil.Process().pid})" in str(error) and "lab.load" in error.remedy
    again = home.engine()
    assert again.key == mine.key
    assert again.submit("x", SamplingParams(max_tokens=2)).result().finish == "length"
    raises(EngineClosed, lambda: observer.release("nothing"))
    observer.close()


def test_release_of_an_engine_that_loads_takes_effect_when_it_is_there(home: Home):
    client, observer = home.client(), home.client()
    seen: list[Vitals] = []
    observer.subscribe(seen.append, 20)
    with client.ask(lambda number: wire.Load(id=number, config=EngineConfig(model="slow-load"))) as mail:
        eventually(lambda: any(engine.stage == "weights" for sample in seen for engine in sample.engines))
        loading = next(engine for engine in seen[-1].engines)
        assert (loading.state, loading.model) == ("loading", "slow-load")
        observer.release(loading.engine)

        def loaded() -> None:
            while not isinstance(mail.next(HANG_S), wire.Loaded):
                continue

        assert "closed by" in str(raises(EngineClosed, loaded))
    eventually(lambda: not observer.status().engines)


def test_arguments_of_questions_arrive(home: Home):
    engine = home.engine()
    asked = raises(ConfigError, lambda: engine.lookup([1, 2], chat=False, cache_key="k"))
    assert "([1, 2], False, 'k')" in str(asked)
    assert engine.steps() == ()
    assert "lens" in str(raises(ConfigError, lambda: engine.client.query("lens", engine.key)))


SLOW_LOOK = LensAsk(tokens=(1, 2, 3), prompt=1, position=2, params=SamplingParams(), namespace="slow")


def test_a_look_that_nobody_wants_any_more_ends_in_the_engine(home: Home):
    engine, stop = home.engine(), threading.Event()
    assert engine.lens(msgspec.structs.replace(SLOW_LOOK, position=1), stop.is_set).exact
    thread = threading.Thread(target=lambda: raises(RequestCancelled, lambda: engine.lens(SLOW_LOOK, stop.is_set)))
    thread.start()
    eventually(lambda: engine.status().running == 1)
    stop.set()
    thread.join(HANG_S)
    eventually(lambda: engine.status().running == 0)


def test_a_look_ends_with_its_client(home: Home):
    engine, another = home.engine(), home.engine()
    thread = threading.Thread(target=lambda: raises(HostUnavailable, lambda: engine.lens(SLOW_LOOK)))
    thread.start()
    eventually(lambda: another.status().running == 1)
    engine.client.close()
    thread.join(HANG_S)
    eventually(lambda: another.status().running == 0)


def _connected(home: Home) -> socket.socket:
    """A client that reads only when it is told to."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(HANG_S)
    sock.connect(str(next(home.paths.runtime.rglob("*.sock"))))
    client = home.client()
    welcome = client.welcome
    hello = wire.Hello(
        protocol=wire.PROTOCOL, package=welcome.package, revision=welcome.revision, client="stuck", observer=True
    )
    sock.sendall(wire.pack(hello, wire.HELLO_LIMIT))
    assert isinstance(wire.reply_of(wire.receive_frame(sock, wire.REPLY_LIMIT) or b""), wire.Welcome)
    return sock

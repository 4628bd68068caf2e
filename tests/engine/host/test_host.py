"""The host as its clients see it. Real processes."""

from __future__ import annotations

import gc
import os
import threading

import msgspec
import pytest

from power_lab.engine.chat import Turn
from power_lab.engine.config import EngineConfig, HostSettings
from power_lab.engine.host import protocol as wire
from power_lab.engine.host.client import HostClient
from power_lab.engine.host.place import Place
from power_lab.engine.request import SamplingParams
from power_lab.errors import (
    CapacityError,
    ConfigError,
    EngineClosed,
    EngineInUse,
    ModelFileError,
    PowerLabError,
    ProtocolError,
    QueueFull,
    RequestCancelled,
)
from tests import hosting
from tests.hosting import Home, ended, eventually, raises


def test_output_streams_and_the_record_is_whole(home: Home):
    engine = home.engine()
    deltas = []
    record = engine.submit("hello", SamplingParams(max_tokens=5, seed=1)).result(on_delta=deltas.append)
    assert [delta.tokens for delta in deltas] == [1, 2, 3, 4, 5]
    assert "".join(delta.text for delta in deltas) == record.text
    assert (record.finish, record.params["seed"], record.engine) == ("length", 1, engine.facts)


def test_all_kinds_of_prompts_arrive(home: Home):
    engine = home.engine()
    for prompt in ("text", [1, 2, 3], [{"role": "user", "content": "hi"}]):
        assert engine.submit(prompt, SamplingParams(max_tokens=2)).result().finish == "length"
    for wrong in ([1, "a"], [{"role": 1}], [1.5], [1, {"role": "user"}], [{"role": "user", "content": {1}}]):
        assert "prompt" in str(raises(ConfigError, lambda p=wrong: engine.submit(p, SamplingParams()).result()))


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def test_tools_and_template_options_arrive(home: Home):
    engine = home.engine()
    options = {"enable_thinking": False, "limits": [1, 2.5, None, {"é": "x"}]}
    run = engine.submit("echo", SamplingParams(), tools=TOOLS, template_options=options)
    assert str(raises(CapacityError, run.result)) == repr((TOOLS, options))
    for wrong, key in (
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "parameters": 3}]}, "tools[0].parameters"),
        ({"template_options": {"messages": []}}, "template_options.messages"),
        ({"template_options": {"x": {1}}}, "template_options.x"),
    ):
        assert raises(ConfigError, lambda w=wrong: engine.submit("text", SamplingParams(), **w)).key == key


def test_every_question_is_answered(home: Home):
    engine = home.engine()
    assert engine.explain()[0].key == "mode"
    assert engine.memory().total == 8
    assert engine.blocks()[0].state == "dummy"
    assert engine.status().running == 0
    assert engine.tokenize("ab") == [97, 98]
    assert engine.continuation([1], [2], "c") == [1, 2, 99]
    message = {"role": "user", "content": "c"}
    turn = Turn(prompt=(1,), output=(2,), messages=(message,), message=message, tools=(*TOOLS,), history="keep")
    found = engine.next_prompt(turn)
    assert (found.tokens, found.answer, found.kept, found.reason) == ((1, 2, 99), "w2 ", 2, repr(turn))
    wrong = msgspec.structs.replace(turn, history="never")
    assert "history" in str(raises(ConfigError, lambda: engine.next_prompt(wrong)))
    assert engine.client.query("facts", engine.key) == engine.facts
    assert "nonsense" in str(raises(EngineClosed, lambda: engine.client.query("memory", "nonsense")))


def test_listeners_hear_from_the_reader_thread_and_their_errors_stay_theirs(home: Home):
    engine = home.engine()
    heard, done = [], threading.Event()

    def listen(delta):
        heard.append(threading.current_thread().name)
        raise ZeroDivisionError

    engine.submit("a", SamplingParams(max_tokens=3), on_delta=listen, on_done=lambda _: done.set())
    assert done.wait(30)
    assert heard == ["power-lab-client"] * 3
    assert engine.submit("b", SamplingParams(max_tokens=1)).result().finish == "length"


def test_many_runs_share_one_connection(home: Home):
    engine = home.engine()
    runs = [engine.submit(f"slow {i}", SamplingParams(max_tokens=5)) for i in range(20)]
    alone = [engine.submit(f"slow {i}", SamplingParams(max_tokens=5)).result().tokens for i in range(0, 20, 7)]
    assert [run.result().tokens for run in runs][::7] == alone


def test_a_cancelled_run_gives_its_record_and_the_engine_goes_on(home: Home):
    engine = home.engine()
    run = engine.submit("slow", SamplingParams(max_tokens=10_000))
    first = threading.Event()
    record = None

    def cancel_at_first(delta):
        if not first.is_set():
            first.set()
            run.cancel()

    record = run.result(on_delta=cancel_at_first)
    assert record.finish == "cancelled"
    assert 0 < len(record.tokens) < 10_000
    run.cancel()  # of a finished run: nothing
    assert engine.submit("again", SamplingParams(max_tokens=2)).result().finish == "length"


def test_a_run_that_nobody_waits_for_leaves_nothing_behind(home: Home):
    engine = home.engine()
    engine.submit("slow", SamplingParams(max_tokens=100_000)).cancel()
    eventually(lambda: not engine.client._mail)


@pytest.mark.parametrize("wait", [False, True], ids=["at once", "under way"])
def test_a_cancelled_load_is_answered_and_goes_on_without_a_lease(home: Home, wait: bool):
    client = home.client()
    mail = client.open_mail()
    client.send(wire.Load(id=mail.id, config=EngineConfig(model="slow-load")))
    if wait:
        assert isinstance(mail.next(30), wire.Progress)
    client.send(wire.Cancel(id=mail.id))
    with pytest.raises(RequestCancelled):
        while True:
            mail.next(30)
    assert all(not info.clients for info in client.status().engines)


def test_a_wait_that_times_out_leaves_the_run_alone(home: Home):
    run = home.engine().submit("slow", SamplingParams(max_tokens=20))
    with pytest.raises(TimeoutError, match="goes on"):
        while True:
            run.result(timeout=0.001)
    assert run.result().finish == "length"


def test_typed_errors_come_back_typed_with_the_log(home: Home):
    engine = home.engine()
    error = raises(CapacityError, lambda: engine.submit("raise typed", SamplingParams()).result())
    assert str(error) == "needs 9 blocks, 8 are there. Use less."
    assert error.__notes__ == [f"Engine log: {home.paths.state / 'host.log'}"]
    assert engine.submit("again", SamplingParams(max_tokens=2)).result().finish == "length"


def test_a_bug_comes_back_with_its_traceback_and_the_log_names_no_prompt(home: Home):
    engine = home.engine()
    error = raises(PowerLabError, lambda: engine.submit("raise bug", SamplingParams()).result())
    assert "ZeroDivisionError" in str(error)
    assert "fake_engine.py" in error.__notes__[0]
    assert "ZeroDivisionError" in home.log
    assert "raise bug" not in home.log


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        ("broken", ModelFileError, "truncated at byte 12"),
        ("bug", PowerLabError, "ZeroDivision"),
        ("exits", PowerLabError, "SystemExit: 3"),
    ],
)
def test_loading_errors_come_back_whole_and_loading_can_be_tried_again(home: Home, model, kind, words):
    client = home.client()
    for _ in range(2):
        assert words in str(raises(kind, lambda: client.load(EngineConfig(model=model))))
    assert client.status().engines == ()
    assert home.engine(client).facts.model == "fake"


def test_equal_settings_share_an_engine_and_others_do_not(home: Home):
    one, two = home.client(client="one"), home.client(client="two")
    first, second = one.load(EngineConfig(model="fake")), two.load(EngineConfig(model="fake"))
    assert (first.engine, first.shared, second.shared) == (second.engine, False, True)
    assert two.load(EngineConfig(model="fake", threads=os.cpu_count() or 1)).engine == first.engine
    assert two.load(EngineConfig(model="fake", kv_tokens=64)).engine != first.engine
    shown = {info.engine: {client.name for client in info.clients} for info in one.status().engines}
    assert shown[first.engine] == {"one", "two"}


def test_a_second_client_watches_a_load_that_is_under_way(home: Home):
    one, two = home.client(), home.client()
    stages: dict[int, list[int]] = {0: [], 1: []}

    def load(number: int, client: HostClient) -> None:
        client.load(EngineConfig(model="slow-load"), progress=lambda stage, done, total: stages[number].append(done))

    threads = [threading.Thread(target=load, args=pair) for pair in enumerate((one, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [stages[0][-1], stages[1][-1]] == [4, 4]
    assert len(one.status().engines) == 1


def test_a_relative_file_is_the_clients_and_links_are_followed(home: Home, tmp_path, monkeypatch):
    (tmp_path / "real.gguf").write_bytes(b"x")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "real.gguf")
    monkeypatch.chdir(tmp_path)
    client = home.client()
    relative, link = client.load(EngineConfig(model="real.gguf")), client.load(EngineConfig(model="link.gguf"))
    assert relative.engine == link.engine
    assert client.status().engines[0].config.model == str(tmp_path / "real.gguf")


def test_a_lease_ends_with_unload_and_the_unused_engine_at_once(home: Home):
    one, two = home.engine(), home.engine()
    one.close()
    raises(EngineClosed, lambda: one.submit("x", SamplingParams()).result())
    assert two.submit("x", SamplingParams(max_tokens=1)).result().finish == "length"
    two.close()
    assert two.client.status().engines == ()


@pytest.fixture
def stranger(home: Home, tmp_path):
    """Another process that holds the engine."""
    named = "home.settings = hosting.HostSettings(factory=hosting.FACTORY, client='other.ipynb')"
    with hosting.beside(home, f"{named}; engine = home.engine()", "sys.stdin.read()") as process:
        yield process
        process.kill()


def test_a_change_under_another_live_client_is_refused_by_name(home: Home, stranger):
    engine = home.engine()
    change = EngineConfig(model="fake", kv_tokens=64)
    error = raises(EngineInUse, lambda: engine.client.load(change, replaces=engine.key))
    assert f"other.ipynb (pid {stranger.pid})" in str(error)
    assert len(engine.client.status().engines) == 1, "what is refused changes nothing"
    assert f"other.ipynb (pid {stranger.pid})" in str(raises(EngineInUse, engine.client.shutdown))
    stranger.kill()
    eventually(lambda: len(engine.client.status().clients) == 1)
    assert engine.client.load(change, replaces=engine.key).engine != engine.key
    assert len(engine.client.status().engines) == 1, "the replaced engine is closed"


def test_a_killed_clients_runs_end_and_its_engine_stays(home: Home, stranger):
    engine = home.engine()
    stranger.kill()
    eventually(lambda: len(engine.client.status().clients) == 1)
    assert engine.submit("x", SamplingParams(max_tokens=1)).result().finish == "length"


def test_a_client_that_leaves_takes_its_runs_along(home: Home):
    watcher = home.client()
    leaver = home.engine()
    leaver.submit("slow", SamplingParams(max_tokens=100_000))
    eventually(lambda: watcher.status().engines[0].runs == 1)
    leaver.client.close()
    eventually(lambda: watcher.status().engines[0].runs == 0)
    info = watcher.status().engines[0]
    assert info.clients == ()
    assert info.ends_in_s is not None


def test_a_client_that_is_forgotten_lets_go(home: Home):
    watcher = home.client()
    forgotten = HostClient.connect(home.paths, home.settings)
    assert len(watcher.status().clients) == 2
    del forgotten
    gc.collect()
    eventually(lambda: len(watcher.status().clients) == 1)


def test_a_client_whose_name_is_no_unicode_is_served(home: Home):
    client = home.client(client="caf\udce9.ipynb")
    assert [one.name for one in client.status().clients] == ["caf?.ipynb"]


def test_names_forge_no_line_of_the_log(home: Home):
    home.engine(home.client(client="a\nERROR forged\x1b[31m"), model="fake\nERROR forged")
    assert not [line for line in home.log.splitlines() if line.startswith("ERROR")]
    assert "\x1b" not in home.log


def test_an_observer_holds_nothing(home: Home):
    home.engine()
    observer = HostClient.find(home.paths, home.settings)
    assert observer is not None
    info = next(client for client in observer.status().clients if client.observer)
    assert info.pid == os.getpid()
    raises(EngineClosed, lambda: observer.load(EngineConfig(model="fake")))
    key = observer.status().engines[0].engine
    assert observer.query("status", key).running == 0
    observer.close()


def test_idle_engines_end_then_the_empty_host(home: Home):
    home.settings = HostSettings(factory=home.settings.factory, idle_s=0.0, linger_s=0.0)
    engine = home.engine()
    run = engine.submit("slow", SamplingParams(max_tokens=40))
    assert run.result().finish == "length", "a held engine is not idle"
    pid = engine.client.pid
    engine.client.close()
    eventually(lambda: ended(pid))
    assert "it was idle for 0 s" in home.log
    assert not Place.of(home.paths).socket.exists()
    assert home.engine().client.pid != pid


def test_too_many_questions_and_runs_are_refused_one_by_one(home: Home):
    client = home.client()
    mails = [client.open_mail() for _ in range(200)]
    for mail in mails:
        client.send(wire.Load(id=mail.id, config=EngineConfig(model="slow-load")))
    refused = 0
    for mail in mails:
        try:
            while not isinstance(mail.next(30), wire.Loaded):
                continue
        except QueueFull:
            refused += 1
    assert 0 < refused < 200


def test_an_oversized_prompt_is_refused_before_it_is_sent(home: Home):
    engine = home.engine()
    raises(ProtocolError, lambda: engine.submit("x" * (17 << 20), SamplingParams()))
    assert engine.submit("x", SamplingParams(max_tokens=1)).result().finish == "length"

"""The lab's calls on real hosts with the fake engine: what they return, what they refuse, what survives an interrupt."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from power_lab import bars, display
from power_lab.engine.chat import Turn
from power_lab.engine.config import HostSettings
from power_lab.engine.host import client as client_module
from power_lab.engine.host import protocol as wire
from power_lab.errors import (
    CapacityError,
    ConfigError,
    EngineInUse,
    HostUnavailable,
    ModelFileError,
    ProtocolError,
    RequestCancelled,
    StepFailed,
)
from power_lab.lab import Lab, connect, derived_seed, sampling
from tests import hosting
from tests.hosting import Home, eventually, kill, raises


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with hosting.home(tmp_path / "h") as made:
        yield made


@pytest.fixture
def lab(home: Home) -> Iterator[Lab]:
    made = another(home)
    made.load("fake")
    yield made
    made.disconnect()


def another(home: Home) -> Lab:
    return connect(paths=home.paths, settings=home.settings)


@contextmanager
def interrupt_when(condition: Callable[[], bool]) -> Iterator[None]:
    """A Ctrl-C for the main thread as soon as `condition` holds; it must arrive as KeyboardInterrupt."""

    def strike() -> None:
        eventually(condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join(hosting.HANG_S)


def test_making_a_lab_starts_nothing(home: Home):
    lab = another(home)
    assert repr(lab) == "<Lab: no engine yet; the next call loads 'smollm2'>"
    assert lab.status() is None
    assert lab.shutdown() == "No engine host is running."
    lab.unload()
    lab.replace_host()
    assert not home.hosts()


def test_a_run_has_text_tokens_and_the_seed_it_was_given(lab: Lab):
    run = lab.generate("hi", max_tokens=3, seed=5)
    assert run is lab.last
    assert (len(run.tokens), run.finish, run.record.params["seed"]) == (3, "length", 5)
    assert lab.generate("hi", max_tokens=3, seed=5).tokens == run.tokens


def test_output_is_printed_only_when_asked_for_outside_notebooks(lab: Lab, capsys):
    lab.generate("hi", max_tokens=3)
    assert capsys.readouterr().out == ""
    run = lab.generate("hi", max_tokens=3, stream=True)
    assert capsys.readouterr().out == f"{run.text}\n[{' · '.join(run.facts())}]\n"


def test_numpy_numbers_and_a_lone_stop_string_are_taken(lab: Lab):
    record = lab.generate("hi", max_tokens=np.int64(2), temperature=np.float32(0.5), stop="end").record
    assert (record.params["max_tokens"], record.params["temperature"], record.params["stop"]) == (2, 0.5, ["end"])


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"max_token": 3}, "max_token"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_wrong_parameters_are_named_before_anything_is_sent(home: Home, params, word):
    lab = another(home)
    for call in (
        lambda: lab.generate("hi", **params),
        lambda: lab.generate_many(["hi"], **params),
        lambda: lab.chat(**params),
    ):
        assert word in str(raises(ConfigError, call))
    assert not home.hosts()


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda lab: lab.generate(None), "prompt: NoneType found"),
        (lambda lab: lab.generate(5), "prompt: int found"),
        (lambda lab: lab.generate(b"abc"), "prompt: bytes found"),
        (lambda lab: lab.generate({"role": "user", "content": "x"}), "prompt: dict found"),
        (lambda lab: lab.generate("x", deadline_s="5"), "deadline_s"),
        (lambda lab: lab.generate("x", cache_key=None), "cache_key"),
        (lambda lab: lab.generate("x", chat="yes"), "chat"),
        (lambda lab: lab.generate("x", temperature=np.array([0.1, 0.2])), "temperature"),
        (lambda lab: lab.generate_many("hello"), "prompts: str found"),
        (lambda lab: lab.generate_many(None), "prompts: NoneType found"),
        (lambda lab: lab.generate_many(["a", 5]), "prompt: int found"),
        (lambda lab: lab.tokenize(5), "text"),
    ],
)
def test_arguments_of_wrong_types_are_named_and_cost_no_connection(lab: Lab, call, word):
    client = lab.engine.client
    assert word in str(raises(ConfigError, lambda: call(lab)))
    assert client.open
    assert lab.status().engines[0].runs == 0


def test_what_no_frame_can_hold_is_refused_and_costs_no_connection(lab: Lab):
    client = lab.engine.client
    assert "surrogates" in str(raises(ProtocolError, lambda: lab.generate("\ud800")))
    assert "64 bits" in str(raises(ProtocolError, lambda: lab.generate([1 << 70])))
    assert client.open


def test_wrong_settings_are_named_and_change_nothing(lab: Lab):
    before = lab.facts
    assert "kvtokens: unknown setting" in str(raises(ConfigError, lambda: lab.load("fake", kvtokens=1)))
    assert "kv_tokens" in str(raises(ConfigError, lambda: lab.configure(kv_tokens=65)))
    raises(ModelFileError, lambda: lab.load("broken"))
    assert lab.facts == before
    assert lab.generate("hi", max_tokens=1).finish == "length"


def test_many_runs_come_in_order_with_seeds_of_their_own(lab: Lab):
    runs = lab.generate_many([f"p{i}" for i in range(150)], max_tokens=2, seed=9, progress=False)
    assert [run.record.params["seed"] for run in runs] == [derived_seed(9, i) for i in range(150)]
    assert runs[77].tokens == lab.generate("p77", max_tokens=2, seed=derived_seed(9, 77)).tokens
    assert lab.generate_many([]) == []
    assert lab.generate_many((prompt for prompt in ["p77"]), max_tokens=2, seed=9)[0].finish == "length"
    drawn = lab.generate_many(["a", "b"], max_tokens=1)
    assert len({run.record.params["seed"] for run in drawn}) == 2


def test_derived_seeds_are_fixed_for_ever():
    assert (derived_seed(0, 0), derived_seed(7, 3)) == (3273689370428929672, 4337573840354611155)


def test_a_failing_run_among_many_cancels_the_rest(lab: Lab):
    raises(CapacityError, lambda: lab.generate_many(["slow", "raise typed", "slow"], max_tokens=20))
    assert [run and run.finish for run in lab.last_many] == ["cancelled", None, "cancelled"]
    eventually(lambda: lab.engine.status().running == 0)


def test_a_failed_step_is_an_error_and_its_output_is_kept(lab: Lab):
    raises(StepFailed, lambda: lab.generate("fail", max_tokens=2))
    assert lab.last is not None
    assert lab.last.finish == "error"


def test_a_chat_continues_the_exact_tokens(lab: Lab):
    chat = lab.chat("Be brief.", max_tokens=4, seed=1)
    first, second = chat.say("one"), chat.say("two", max_tokens=2)
    expected = [*first.record.prompt_tokens, *first.tokens, *b"two"]
    assert list(second.record.prompt_tokens) == expected
    assert (len(second.tokens), chat.turns) == (2, [first, second])
    raises(ConfigError, lambda: chat.say("three", max_tokens=0))
    assert chat.turns == [first, second]


def test_a_chat_says_what_to_do_with_it(lab: Lab):
    chat = lab.chat("You are brief.", max_tokens=2)
    assert repr(chat) == """<Conversation: 0 turns, system 'You are brief.'; .say("...") is the next>"""
    chat.say("hi")
    assert repr(chat).startswith("<Conversation: 1 turn, ")
    assert "system" not in repr(lab.chat())


def test_tools_template_options_and_results_of_calls_reach_every_turn(lab: Lab):
    tools, options = [{"name": "f"}], {"enable_thinking": False}
    chat = lab.chat("S", max_tokens=2, tools=tools, template_options=options, history="keep")
    first = chat.say("one")
    message = {"role": "tool", "content": "3"}
    second = chat.say(message, max_tokens=1)
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": "one"}]
    turn = Turn(
        prompt=first.record.prompt_tokens,
        output=first.record.tokens,
        messages=tuple(asked),
        message=message,
        tools=tuple(tools),
        template_options=options,
        history="keep",
    )
    assert chat.reasons == ["", repr(turn)], "the fake engine says what it was asked"
    answers = [{"role": "assistant", "content": run.text} for run in (first, second)]
    assert chat.messages == [*asked, answers[0], message, answers[1]]
    assert raises(ConfigError, lambda: lab.generate("x", tools=[{}])).key == "tools[0].name"


def test_a_chat_does_not_go_on_with_another_model(lab: Lab):
    chat = lab.chat(max_tokens=2)
    chat.say("one")
    lab.load("fake-2")
    error = raises(ConfigError, lambda: chat.say("two"))
    assert "held with fake, and fake-2 is loaded" in str(error)
    lab.load("fake")
    assert len(chat.say("two").tokens) == 2


def test_threads_get_their_own_runs(lab: Lab, monkeypatch):
    both = threading.Barrier(2, timeout=hosting.HANG_S)

    class Shown(display.Silent):
        def done(self, run: object) -> None:
            both.wait()  # by now each thread has set `lab.last`

    monkeypatch.setattr(display, "stream_for", lambda wanted: Shown())
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda count: lab.generate("hi", max_tokens=count), (3, 7)))
    assert [len(run.tokens) for run in runs] == [3, 7]


def test_an_interrupt_leaves_the_model_loaded_and_the_output_so_far(lab: Lab):
    pid = lab.engine.client.pid
    with interrupt_when(lambda: lab.status().engines[0].runs == 1):
        lab.generate("slow", max_tokens=100_000)
    assert lab.last is not None
    assert lab.last.finish == "cancelled"
    assert lab.status().engines[0].runs == 0
    assert lab.generate("hi", max_tokens=2).finish == "length"
    assert lab.engine.client.pid == pid


def test_an_interrupt_ends_all_of_many_runs(lab: Lab):
    with interrupt_when(lambda: lab.status().engines[0].runs == 30):
        lab.generate_many(["slow"] * 30, max_tokens=100_000)
    assert lab.status().engines[0].runs == 0
    assert len(lab.generate_many(["a", "b"], max_tokens=1)) == 2


def test_an_interrupt_of_many_runs_keeps_those_that_came_and_what_the_others_had(lab: Lab, monkeypatch):
    came: list[None] = []
    monkeypatch.setattr(bars.CountBar, "update", lambda bar: came.append(None))
    # With all in flight again it waits for ends: struck in the middle of sending, the connection would have to go.
    with interrupt_when(lambda: len(came) == 70 and lab.status().engines[0].runs == 64):
        lab.generate_many(["slow", *(f"p{i}" for i in range(70)), *["slow"] * 70], max_tokens=2_000)
    ends = [None if run is None else run.finish for run in lab.last_many]
    assert ends[1:71] == ["length"] * 70, "the first, which is slow, holds up no other"
    assert (ends[0], set(ends[71:])) == ("cancelled", {"cancelled", None})
    assert lab.last_many[0] is not None
    assert lab.last_many[0].tokens
    assert lab.generate_many(["a", "b"], max_tokens=1) == lab.last_many


def test_an_interrupted_load_leaves_no_lease(home: Home, lab: Lab):
    with interrupt_when(lambda: len(lab.status().engines) == 2):
        lab.load("slow-load")
    assert lab.facts.model == "fake"
    eventually(lambda: [len(info.clients) for info in lab.status().engines] == [1, 0])


@pytest.mark.parametrize(
    "change",
    [lambda lab: lab.configure(kv_tokens=128), lambda lab: lab.load("fake", kv_tokens=128)],
    ids=["configure", "load"],
)
def test_an_interrupt_after_the_load_leaves_one_engine_and_it_works(lab: Lab, monkeypatch, change):
    def late(bar: bars.LoadBar, stage: str, done: int, total: int) -> None:
        eventually(lambda: any(info.facts and info.config.kv_tokens == 128 for info in lab.status().engines))
        raise KeyboardInterrupt

    monkeypatch.setattr(bars.LoadBar, "__call__", late)
    with pytest.raises(KeyboardInterrupt):
        change(lab)
    assert [(info.config.kv_tokens, len(info.clients)) for info in lab.status().engines] == [(128, 1)]
    assert lab.generate("hi", max_tokens=2).record.engine.config["kv_tokens"] == 128


def test_a_second_interrupt_while_a_load_is_withdrawn_leaves_no_lease(home: Home, lab: Lab, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    usual = client_module.HostClient.send

    def send(client: client_module.HostClient, frame: wire.Request) -> None:
        (interrupt if isinstance(frame, wire.Cancel) else usual)(client, frame)

    monkeypatch.setattr(bars.LoadBar, "__call__", interrupt)
    monkeypatch.setattr(client_module.HostClient, "send", send)
    with pytest.raises(KeyboardInterrupt):
        lab.load("slow-load")
    monkeypatch.undo()
    eventually(lambda: all(not info.clients for info in another(home).status().engines))
    assert lab.generate("hi", max_tokens=2).record.engine.model == "fake"


def test_a_listener_that_fails_cancels_its_run(lab: Lab, monkeypatch):
    class Broken:
        def delta(self, delta):
            raise BrokenPipeError

        def done(self, run):
            return

    monkeypatch.setattr("power_lab.display.stream_for", lambda wanted: Broken())
    with pytest.raises(BrokenPipeError):
        lab.generate("slow", max_tokens=100_000)
    assert lab.status().engines[0].runs == 0


def test_a_killed_host_is_a_clear_error_then_the_same_model_comes_back(lab: Lab):
    lab.load("fake", kv_tokens=128)
    pid = lab.engine.client.pid
    thread = threading.Thread(target=lambda: (eventually(lambda: lab.status().engines[0].runs == 1), kill(pid)))
    thread.start()
    assert f"pid {pid}" in str(raises(HostUnavailable, lambda: lab.generate("slow", max_tokens=100_000)))
    thread.join(hosting.HANG_S)
    run = lab.generate("hi", max_tokens=2)
    assert run.record.engine.config["kv_tokens"] == 128
    assert lab.engine.client.pid != pid


def test_a_host_that_ends_in_between_goes_unnoticed(lab: Lab):
    kill(lab.engine.client.pid)
    assert lab.generate("hi", max_tokens=2).finish == "length"


@pytest.mark.parametrize(
    "change", [lambda lab: lab.load("fake"), lambda lab: lab.configure(kv_tokens=128)], ids=["load", "configure"]
)
def test_a_load_that_meets_a_breaking_connection_is_made_again(lab: Lab, change):
    pid = lab.engine.client.pid
    os.kill(pid, signal.SIGSTOP)  # it takes calls, and answers none
    thread = threading.Thread(target=lambda: (eventually(lambda: bool(lab._client and lab._client._mail)), kill(pid)))
    thread.start()
    change(lab)
    thread.join(hosting.HANG_S)
    assert lab.engine.client.pid != pid
    assert lab.generate("hi", max_tokens=2).finish == "length"


def test_the_bar_of_a_load_leaves_its_outcome(lab: Lab, monkeypatch):
    left: list[str] = []

    class Bar:
        def show(self, stage: str, note: str, done: int, total: int) -> None:
            return

        def close(self, outcome: str) -> None:
            left.append(outcome)

    monkeypatch.setattr(bars, "make_bar", lambda unit="": Bar())
    for error in (None, ConfigError("model", "unknown"), KeyboardInterrupt()):
        with suppress(ConfigError, KeyboardInterrupt), bars.LoadBar() as bar:
            bar("kernels: rope", 1, 3)
            if error is not None:
                raise error
    assert [words.partition(" in ")[0].partition(" after ")[0] for words in left] == ["Loaded", "Not loaded", "Stopped"]
    assert left[-1].endswith("s: kernels")


def test_a_load_that_ends_its_host_is_not_made_again(lab: Lab, monkeypatch):
    pid = lab.engine.client.pid
    monkeypatch.setattr(bars.LoadBar, "__call__", lambda *_: kill(pid))
    raises(HostUnavailable, lambda: lab.load("slow-load"))
    assert lab._client is not None and lab._client.pid == pid, "no other host was started"


def test_a_run_that_others_end_is_an_error(home: Home):
    home.settings = HostSettings(factory=home.settings.factory, drain_s=0)
    lab = another(home).load("fake")
    pid = lab.engine.client.pid
    thread = threading.Thread(
        target=lambda: (eventually(lambda: lab.status().engines[0].runs == 1), os.kill(pid, signal.SIGTERM))
    )
    thread.start()
    raises(RequestCancelled, lambda: lab.generate("slow", max_tokens=100_000))
    thread.join(hosting.HANG_S)


def test_load_replaces_configure_changes_unload_drops(lab: Lab):
    lab.load("fake", kv_tokens=128)
    lab.configure(max_batch=2)
    (info,) = lab.status().engines
    assert (info.config.kv_tokens, info.config.max_batch) == (128, 2)
    lab.unload()
    assert lab.status().engines == ()
    assert lab.generate("hi", max_tokens=1).record.engine.config["kv_tokens"] == 128


def test_two_labs_share_an_engine_and_the_second_finds_it_loaded(home: Home, lab: Lab):
    second = another(home).load("fake")
    assert second.engine.key == lab.engine.key
    assert len(lab.status().engines[0].clients) == 2
    second.disconnect()
    eventually(lambda: len(lab.status().engines[0].clients) == 1)
    assert lab.shutdown() == "The engine host has ended."


def test_others_are_named_and_keep_their_engine(home: Home, lab: Lab):
    answers = "sys.stdin.readline(); print(lab.generate('hi', max_tokens=2).finish)"
    with hosting.beside(home, hosting.LOAD, answers) as other:
        name = f"test (pid {other.pid})"
        for refused in (lambda: lab.configure(kv_tokens=64), lambda: lab.shutdown(force=True), lab.replace_host):
            assert name in str(raises(EngineInUse, refused))
        assert lab.generate("hi", max_tokens=2).finish == "length"
        assert name in lab.shutdown()
        assert other.communicate("go\n")[0] == "length\n"
    assert another(home).shutdown() == "The engine host has ended."


def test_replace_host_ends_one_of_another_version(home: Home, lab: Lab, monkeypatch):
    pid = lab.engine.client.pid
    lab.disconnect()
    with monkeypatch.context() as patch:
        patch.setattr(client_module, "code_digest", lambda: "f" * 64)
        lab.replace_host()
    assert not home.hosts()
    assert lab.generate("hi", max_tokens=1).finish == "length"
    assert lab.engine.client.pid != pid


def test_what_a_lab_tells_is_plain_data_that_shows_itself(lab: Lab):
    decisions, memory, status = lab.explain(), lab.memory(), lab.status()
    assert decisions[0].key == "mode"
    assert "the default" in repr(decisions)
    assert memory.total == 8
    assert "workspace" in repr(memory)
    assert status.pid == lab.engine.client.pid
    assert "an unused engine after 15 min" in repr(status)
    for shown in (decisions, memory, status):
        assert shown._repr_html_().startswith("<table>")
    assert lab.tokenize("a") == [97]
    assert lab.blocks()[0].state == "dummy"
    assert "fake (fake.gguf), exact on cpu" in repr(lab)


def test_sampling_takes_no_unknown_key():
    assert sampling({"stop": ["a", "b"]}).stop == ("a", "b")
    raises(ConfigError, lambda: sampling({"n": 2}))

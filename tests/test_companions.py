"""Drafters that come with a model, taken where a request names them: on real hosts, with the fake engine and with the default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from power_lab import companions
from power_lab.companions import Taken
from power_lab.engine.config import EngineConfig, HostSettings, Paths
from power_lab.engine.speculation.drafters.neural import shipped
from power_lab.engine.speculation.drafters.neural.choice import remedy, serving
from power_lab.errors import ConfigError
from power_lab.lab import Lab, connect
from tests import hosting
from tests.hosting import Home, raises

SMOLLM2 = companions.identity("smollm2")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with hosting.home(tmp_path / "h") as made:
        yield made


@pytest.fixture
def lab(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Without an engine yet; every model comes with three drafters."""
    monkeypatch.setattr(shipped, "names", lambda sha256: ("dflash", "dflash2", "mtp"))
    monkeypatch.setattr(shipped, "default", lambda sha256: "mtp")
    made = connect(paths=home.paths, settings=home.settings)
    yield made
    made.disconnect()


def drafts(lab: Lab) -> list[str]:
    """The setting of each engine that there is."""
    status = lab.status()
    return [] if status is None else [engine.config.draft for engine in status.engines]


@pytest.mark.parametrize(
    ("speculate", "taken", "name", "draft"),
    [
        ("mtp", None, "", ""),
        ("hybrid", None, "", ""),
        ("eagle", None, "", ""),  # no model comes with one: the engine's to refuse
        ("dflash", None, "dflash", "dflash"),
        ("dspark", None, "dflash", "dflash"),
        ("dspark", "dflash", "", ""),
        ("dflash2", "dflash", "dflash2", "dflash2"),
        ("mtp", "dflash", "mtp", "auto"),
        ("hybrid", "dflash2", "mtp", "auto"),
    ],
)
def test_what_smollm2_needs_for_each_drafter(speculate: str, taken: str | None, name: str, draft: str) -> None:
    before = None if taken is None else Taken(taken, taken, "any")
    found = companions.wanted(speculate, SMOLLM2, before, loaded=True)
    assert found == (Taken(name, draft, speculate, taken or "mtp") if name else None)


def test_an_unknown_model_comes_with_none() -> None:
    assert companions.identity("/a/file.gguf") == ""
    assert companions.wanted("dflash", "0" * 64, None, loaded=True) is None


def test_only_what_the_user_left_open_is_chosen() -> None:
    open_, chosen = EngineConfig(), (EngineConfig(draft="mtp"), EngineConfig(draft=""), EngineConfig(draft="smollm2"))
    assert [companions.may_choose(name, open_) for name in ("dflash", "hybrid", "auto", "ngram", "off")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not any(companions.may_choose("dflash", config) for config in chosen)


def test_an_engine_s_remedy_names_the_same_drafter() -> None:
    assert serving("dspark", SMOLLM2) == "dflash" and serving("eagle", SMOLLM2) == ""
    assert 'draft="mtp"' in remedy("hybrid", "smollm2", SMOLLM2)
    assert ".safetensors" in remedy("eagle", "smollm2", SMOLLM2)


def test_a_first_call_loads_the_drafter_that_it_names(home: Home, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.generate("hi", max_tokens=2, speculate="dflash")
    assert drafts(lab) == ["dflash"]
    assert home.log.count(" loads ") == 1, "the default drafter is not loaded first"
    said = "speculate='dflash': the engine is loaded with the drafter 'dflash', which comes with the model.\n"
    assert said in capsys.readouterr().err
    lab.generate("hi", max_tokens=2, speculate="dspark")
    assert home.log.count(" loads ") == 1 and "speculate" not in capsys.readouterr().err


def test_a_later_one_changes_the_engine_in_use_and_says_so(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.load("fake", kv_tokens=128)
    before = lab.generate("hi", max_tokens=4, seed=1)
    assert drafts(lab) == ["auto"] and "this lab asked" not in repr(lab.explain())
    capsys.readouterr()
    after = lab.generate("hi", max_tokens=4, seed=1, speculate="dspark")
    assert drafts(lab) == ["dflash"], "in the place of the one before"
    assert after.tokens == before.tokens
    assert after.record.engine.config["kv_tokens"] == 128
    assert "drafter 'dflash' instead of 'mtp'" in capsys.readouterr().err
    row = next(row for row in lab.explain() if row.key == "draft")
    assert (row.value, row.reason) == (
        "dflash",
        "a fake has any; this lab asked for it, since a request had speculate='dspark'",
    )
    lab.generate("hi", max_tokens=4, speculate="auto")
    assert drafts(lab) == ["dflash"], "`auto` is whatever there is"
    lab.generate("hi", max_tokens=4, speculate="hybrid")
    assert drafts(lab) == ["auto"]


def test_many_runs_and_chats_take_one_too(home: Home, lab: Lab) -> None:
    lab.load("fake")
    lab.generate_many([], speculate="dflash")
    assert drafts(lab) == ["auto"], "nobody asked"
    lab.generate_many(["a", "b", "c"], max_tokens=2, speculate="dflash", progress=False)
    assert drafts(lab) == ["dflash"] and home.log.count(" loads ") == 2
    talk = lab.chat(max_tokens=2, speculate="dflash2")
    talk.say("one"), talk.say("two")
    assert drafts(lab) == ["dflash2"] and home.log.count(" loads ") == 3


@pytest.mark.parametrize("draft", ["mtp", ""])
def test_a_drafter_that_was_chosen_stays(lab: Lab, draft: str) -> None:
    lab.load("fake", draft=draft)
    lab.generate("hi", max_tokens=2, speculate="dflash")  # a real engine refuses
    assert drafts(lab) == [draft]


def test_settings_that_are_changed_are_the_user_s_own(lab: Lab) -> None:
    lab.generate("hi", max_tokens=2, speculate="dflash")
    lab.configure(kv_tokens=256)
    assert drafts(lab) == ["auto"]
    lab.generate("hi", max_tokens=2, speculate="dflash")
    lab.unload()
    lab.generate("hi", max_tokens=2)
    assert drafts(lab) == ["dflash"], "an engine comes back as it was"


def test_work_that_borrows_the_engine_begins_with_the_user_s_settings(lab: Lab) -> None:
    lab.generate("hi", max_tokens=2, speculate="dflash")
    with lab.borrowed(lambda *_: None) as engine_of:
        engine_of(lab._config)
        assert drafts(lab) == ["auto"]
    lab.generate("hi", max_tokens=2)
    assert drafts(lab) == ["dflash"]


def test_an_engine_that_others_use_stays_and_the_error_says_what_to_do(home: Home, lab: Lab) -> None:
    lab.load("fake")
    with hosting.beside(home, hosting.LOAD, "sys.stdin.readline()") as other:
        error = raises(ConfigError, lambda: lab.generate("hi", max_tokens=2, speculate="dflash"))
        assert drafts(lab) == ["auto"]
        other.communicate("go\n")
    assert isinstance(error, ConfigError) and error.key == "speculate"
    assert f"test (pid {other.pid})" in error.message and "has 'mtp'" in error.message
    assert error.remedy == 'lab.load("fake", draft="dflash") loads an engine of your own.'


def test_smollm2_says_the_same_with_each_drafter_that_it_comes_with(home: Home, smollm2_path: Path) -> None:
    home.settings = HostSettings(client="test")
    home.paths = Paths(
        Paths.default().cache, home.paths.runtime, home.paths.state
    )  # kernels are compiled once a machine
    lab = connect(paths=home.paths, settings=home.settings).load(str(smollm2_path), kv_tokens=2048, max_batch=2)
    prompt = "Count from one to twenty in words."
    plain = lab.generate(prompt, max_tokens=24)
    for name in ("dflash", "dspark", "dflash2", "hybrid"):
        run = lab.generate(prompt, max_tokens=24, speculate=name, width=4, controller="fixed")
        assert run.tokens == plain.tokens
        assert run.speculation.row()["drafted"] > 0 and run.record.params["speculate"] == name
        reason = next(row.reason for row in lab.explain() if row.key == "draft")
        assert ("this lab asked for it" in reason) == (name != "hybrid")
    lab.load(str(smollm2_path), kv_tokens=2048, max_batch=2, draft="mtp")
    refused = raises(ConfigError, lambda: lab.generate(prompt, max_tokens=8, speculate="dflash"))
    assert 'draft="dflash"' in refused.remedy
    lab.shutdown()

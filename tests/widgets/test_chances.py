"""Probabilities of tokens: as the run recorded them, or as the engine says when it is asked, the target's and the draft's."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from power_lab.engine.inspection import LensAsk, LensReport
from power_lab.errors import EngineClosed, RequestCancelled
from power_lab.run import Run
from power_lab.widgets.acceptance import Acceptance
from power_lab.widgets.chances import HINT
from tests.factories import run_record
from tests.hosting import eventually
from tests.widgets.answers import asked, settle
from tests.widgets.test_lens import answer

RECORD = run_record(60, seed=2)
REFUSED = next(one for one in RECORD.rounds if one.rejected and len(one.emitted) > one.accepted)
KEPT = next(one for one in RECORD.rounds if one.accepted)


class Engine:
    """Answers as an engine of the run's model."""

    facts = RECORD.engine

    def __init__(self, **changes: Any) -> None:
        self.seen: list[int] = []
        self.changes = changes

    def lens(self, ask: LensAsk, cancelled: Any) -> LensReport:
        self.seen.append(ask.position)
        return msgspec.structs.replace(answer(ask), **self.changes)


def titles(engine: Any, monkeypatch: pytest.MonkeyPatch, *questions: dict[str, Any]) -> list[dict[str, Any]]:
    view = Acceptance(Run(RECORD), engine=lambda: engine)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(view, "send", lambda message, buffers=None: sent.append(message))
    for question in questions:
        asked(view, {"kind": "chance", **question})
    view.close()
    return sent


def test_the_targets_and_the_drafts_probabilities_are_told_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, at = Engine(), REFUSED.start + REFUSED.accepted
    own, refused, again = titles(
        engine,
        monkeypatch,
        {"position": at, "rejected": False},
        {"position": at, "rejected": True},
        {"position": at, "rejected": False},
    )
    assert own["title"].startswith(
        f"correction · position {at} · token {REFUSED.emitted[-1]} · probability 30.0% (logprob -1.20)"
    )
    assert "mtp gave it 10.0%" in own["title"] and own["known"]
    assert refused["title"].startswith(f"rejected · for position {at} · token {REFUSED.rejected[0]}")
    assert "probability 50.0%" in refused["title"] and "mtp gave it 80.0%" in refused["title"]
    assert again == own and engine.seen == [at], "both are of one position, which is computed once"


def test_a_copy_has_no_probability_and_a_run_without_drafts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    at = KEPT.start
    report = answer(LensAsk.of(RECORD, at))
    assert report.draft is not None
    copied = msgspec.structs.replace(report.draft, drafter="ngram", candidates=(), probability=None)
    (told,) = titles(Engine(draft=copied), monkeypatch, {"position": at})
    assert told["title"].endswith("ngram drafted it and has no probability for it")
    (plain,) = titles(Engine(draft=None, why="The run did not speculate."), monkeypatch, {"position": at})
    assert plain["title"].endswith("· The run did not speculate")
    (other,) = titles(Engine(exact=False, piece="x"), monkeypatch, {"position": at})
    assert other["title"].endswith("computed again, the target says “x” here")


def test_without_the_runs_engine_the_page_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Engine):
        def lens(self, ask: LensAsk, cancelled: Any) -> LensReport:
            raise EngineClosed("The engine was closed.", "Load it again.")

    class Other(Engine):
        facts = msgspec.structs.replace(RECORD.engine, sha256="ff" * 32)

    for engine, why in ((None, "none is loaded"), (Gone(), "was closed"), (Other(), "another one is loaded")):
        (told,) = titles(engine, monkeypatch, {"position": KEPT.start})
        assert why in told["title"] and not told["known"]


def test_questions_about_nothing_are_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    junk: list[dict[str, Any]] = [{}, {"position": "1"}, {"position": True}, {"position": 0}, {"position": 10**6}]
    plain = next(one for one in RECORD.rounds if not one.drafted)
    assert titles(engine, monkeypatch, *junk, {"position": plain.start, "rejected": True}) == []
    assert engine.seen == []


def test_the_next_token_ends_the_question_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[int] = []
    free = threading.Event()

    class Slow(Engine):
        def lens(self, ask: LensAsk, cancelled: Any) -> LensReport:
            self.seen.append(ask.position)
            while not free.wait(0.01):
                if cancelled():
                    given_up.append(ask.position)
                    raise RequestCancelled("Nobody wants it.")
            return answer(ask)

    engine = Slow()
    view = Acceptance(Run(RECORD), engine=lambda: engine)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(view, "send", lambda message, buffers=None: sent.append(message))
    first = RECORD.rounds[0].start
    for at in (first, first + 1):
        view._answer(view, {"kind": "chance", "position": at}, [])
        eventually(lambda at=at: at in engine.seen)
    eventually(lambda: given_up == [first])
    free.set()
    settle()
    assert [message["position"] for message in sent] == [first + 1]
    view.close()


def test_a_page_without_an_engine_says_how_to_have_them() -> None:
    html = Acceptance(Run(RECORD)).to_html()
    weighed = sum(bool(one.rejected) and len(one.emitted) > one.accepted for one in RECORD.rounds)
    assert html.count(HINT) == len(RECORD.tokens) + weighed == html.count("data-at=")
    assert HINT not in Acceptance(Run(run_record(60, logprobs=True))).to_html()

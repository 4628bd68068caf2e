"""The logit lens shows what an engine says of a position, leads to other positions, and refuses what a round has not."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from power_lab.engine.inspection import LensAsk, LensDraft, LensReport, LensToken
from power_lab.errors import ConfigError, EngineClosed, RequestCancelled
from power_lab.jupyter.cancel import Tokens
from power_lab.run import Run
from power_lab.widgets.inspect import Inspect
from power_lab.widgets.lens import Lens
from tests.factories import run_record
from tests.hosting import eventually
from tests.widgets.answers import asked, settle

RUN = Run(run_record(60, seed=2))
Cancelled = Callable[[], bool] | None


def answer(ask: LensAsk, cancelled: Cancelled = None, *, greedy: bool = False, draft: bool = True) -> LensReport:
    """What an engine could say: the run's own token has the best score, its draft is the second, a third is left out by the chain."""
    said = ask.tokens[ask.position]
    other = ask.drafted if ask.drafted >= 0 and ask.drafted != said else said + 1

    def token(one: int, raw: float, left: float, noise: float) -> LensToken:
        score = (math.log(left) + noise) if left else None
        return LensToken(
            token=one, piece=f" <t{one}>", raw=raw, probability=left, noise=None if greedy else noise, score=score
        )

    guess = LensDraft(
        drafter="mtp",
        candidates=((other, f" <t{other}>", 0.8), (said, f" <t{said}>", 0.1), (9999, "rare", 0.05)),
        chosen=ask.drafted if ask.drafted >= 0 else other,
        piece=f" <t{ask.drafted}>",
        kept=ask.accepted,
        why="Kept: they agree." if ask.accepted else "Not kept: the noise decided.",
        probability=0.1,
    )
    return LensReport(
        position=ask.position,
        index=ask.position - ask.prompt,
        seed=5,
        temperature=0.0 if greedy else 0.7,
        candidates=(token(other, 0.5, 0.6, -1.0), token(said, 0.3, 0.4, 2.0), token(8888, 0.2, 0.0, 0.1)),
        chosen=said,
        piece=f" <t{said}>",
        said=said,
        exact=True,
        context="before ",
        draft=guess if draft else None,
        why="" if draft else "The run did not speculate.",
        noise="How the noise comes about.",
    )


def first_refused() -> int:
    return next(at for at, entry in enumerate(RUN.record.rounds) if entry.rejected)


def test_it_begins_where_a_draft_was_refused_and_asks_for_that_position() -> None:
    seen: list[LensAsk] = []

    def look(ask: LensAsk, cancelled: Cancelled) -> LensReport:
        seen.append(ask)
        return answer(ask)

    view = Lens(look, RUN, top=7)
    at = first_refused()
    entry = RUN.record.rounds[at]
    assert (view.round, view.row) == (at, entry.accepted)
    assert seen[0].position == entry.start + entry.accepted
    assert seen[0].drafted == entry.drafted[entry.accepted]
    assert not seen[0].accepted and seen[0].top == 7
    html = view.to_html().split("</style>")[1]
    assert "Not kept: the noise decided." in html
    assert "pl-correction" in html and "pl-rejected" in html
    assert "&lt;t" in html
    assert not re.search(r"<t\d", html)
    assert ">never<" in html  # what the sampler chain left out
    assert view.summary().endswith("not kept")
    view.close()


def test_the_data_holds_both_distributions_and_the_draw() -> None:
    data = Lens(answer, RUN).dataset
    assert data.attrs["schema"] == "power-lab.lens/1"
    assert data.sizes["candidate"] == 4  # three of the target, one that only the drafter named
    assert data.chosen.values.sum() == 1
    assert math.isnan(data.raw.sel(candidate=9999))
    assert float(data.draft.sel(candidate=9999)) == 0.05
    assert math.isnan(data.score.sel(candidate=8888))
    best = int(data.candidate[int(np.nanargmax(data.score.values))])
    assert best == int(data.candidate[int(np.argmax(data.chosen.values))])
    assert all(variable.attrs["units"] for variable in data.variables.values())


@pytest.mark.parametrize("greedy", [False, True])
def test_without_noise_or_draft_their_columns_are_left_out(greedy: bool) -> None:
    view = Lens(lambda ask, _: answer(ask, greedy=greedy, draft=not greedy), RUN)
    html = view.to_html()
    assert (">noise<" in html) == (not greedy)
    assert (">logit<" in html) == greedy
    assert ("draft’s p" in html) == (not greedy)
    assert ("The run did not speculate." in html) == greedy
    assert view.export("svg").startswith(b"<svg")
    view.close()


def test_the_buttons_walk_over_rounds_and_stop_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    view = Lens(answer, RUN, round=0, row=0)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(view, "send", lambda message, buffers=None: sent.append(message))
    first = view.report.position
    asked(view, {"kind": "go", "to": "before"})
    assert view.report.position == first
    for step in range(1, len(RUN.tokens)):
        asked(view, {"kind": "go", "to": "after"})
        assert view.report.position == first + step
    asked(view, {"kind": "go", "to": "after"})
    assert view.report.position == first + len(RUN.tokens) - 1
    asked(view, {"kind": "go", "to": "before"})
    assert view.report.position == first + len(RUN.tokens) - 2
    assert all(message["kind"] == "body" for message in sent)
    view.close()
    refused = Lens(answer, RUN, round=0, row=0)
    monkeypatch.setattr(refused, "send", lambda message, buffers=None: None)
    asked(refused, {"kind": "go", "to": "refused"})
    assert refused.round == first_refused()
    for junk in ({"kind": "go"}, {"kind": "go", "to": 3}, {"kind": "go", "to": "x"}):
        asked(refused, junk)
    assert refused.round == first_refused()
    refused.close()


def test_of_a_long_run_it_asks_and_shows_no_more_than_of_a_short_one() -> None:
    run, seen = Run(run_record(10_000, seed=2)), []

    def look(ask: LensAsk, cancelled: Cancelled) -> LensReport:
        seen.append(ask)
        return msgspec.structs.replace(answer(ask), context="word " * 40)

    rounds = run.record.rounds
    views = [Lens(look, run, round=at) for at in (len(rounds) // 2, len(rounds) - 2)]
    for view, ask in zip(views, seen, strict=True):
        assert len(ask.tokens) == ask.position + 1  # what comes after does not matter
        assert len(view.to_html()) < 16_000
        view.close()


def test_a_gone_engine_keeps_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[bool] = []

    def look(ask: LensAsk, cancelled: Cancelled) -> LensReport:
        if gone:
            raise EngineClosed("The engine was closed.", "Load it again.")
        return answer(ask)

    view = Lens(look, RUN, round=0, row=0)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(view, "send", lambda message, buffers=None: sent.append(message))
    gone.append(True)
    asked(view, {"kind": "go", "to": "after"})
    assert sent == [{"kind": "gone", "message": "The engine was closed. Load it again."}]
    assert view.report.position == RUN.record.rounds[view.round].start + view.row
    view.close()


class Slow:
    """An engine whose looks last until somebody lets go of them or wants them no more."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.given_up: list[int] = []
        self.free = threading.Event()

    def look(self, ask: LensAsk, cancelled: Cancelled) -> LensReport:
        if cancelled is None:  # the first look, of the cell
            return answer(ask)
        self.begun.append(ask.position)
        while not self.free.wait(0.01):
            if cancelled():
                self.given_up.append(ask.position)
                raise RequestCancelled("Nobody wants it.")
        return answer(ask)


def test_a_newer_click_ends_the_walk_before_it_and_goes_on_from_where_that_led(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent = Slow(), list[dict[str, Any]]()
    view = Lens(engine.look, RUN, round=0, row=0)
    monkeypatch.setattr(view, "send", lambda message, buffers=None: sent.append(message))
    first = view.report.position
    for clicks in range(1, 4):
        view._answer(view, {"kind": "go", "to": "after"}, [])
        eventually(lambda clicks=clicks: len(engine.begun) == clicks)
    eventually(lambda: len(engine.given_up) == 2)
    engine.free.set()
    settle()
    assert engine.begun == [first + 1, first + 2, first + 3] and sorted(engine.given_up) == [first + 1, first + 2]
    assert view.report.position == first + 3
    assert [message["kind"] for message in sent] == ["body"], "nobody waits for what was superseded"
    view.close()


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_walk_that_is_stopped_leaves_the_position_and_says_so(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent, shared = Slow(), list[dict[str, Any]](), Tokens()
    monkeypatch.setattr("power_lab.widgets.view.tokens", lambda: shared)
    view = Lens(engine.look, RUN, round=0, row=0)
    monkeypatch.setattr(view, "send", lambda message, buffers=None: sent.append(message))
    first = view.report.position
    view._answer(view, {"kind": "go", "to": "after"}, [])
    eventually(lambda: len(engine.begun) == 1 and len(shared) == 1)
    shared.cancel_all() if how == "stop" else view.close()
    settle()
    assert sent == [{"kind": "stopped", "asked": "go"}] and view.report.position == first and not len(shared)
    engine.free.set()
    asked(view, {"kind": "go", "to": "after"})
    assert view.report.position == first + 1, "the next click counts from what is shown"
    view.close()


@pytest.mark.parametrize(("where", "named"), [((999, 0), "round"), ((-1, 0), "round"), ((0, 99), "row")])
def test_places_that_a_run_has_not_are_refused(where: tuple[int, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Lens(answer, RUN, *where)


def test_a_lab_gives_lens_and_timeline() -> None:
    class Engine:
        lens = staticmethod(answer)

        def steps(self) -> tuple[()]:
            return ()

    inspect = Inspect(Engine())
    assert inspect.lens(RUN).report.exact
    assert inspect.timeline().summary() == "No steps yet"
    assert inspect.timeline(RUN).dataset.sizes["step"] == len(RUN.record.steps)
    inspect.close()

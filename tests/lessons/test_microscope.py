"""The microscope sees what the engine did, and changes nothing of it."""

from __future__ import annotations

import numpy as np
import pytest

from power_lab.kernels import reference
from power_lab.lessons import Microscope, explore, lattice_of, position_table, slots_chart, walk_table, window_table

QUESTION = "What is the capital of France, and what is it known for?"
SETTINGS = {"max_tokens": 24, "speculate": "mtp", "width": 4, "controller": "fixed"}


@pytest.fixture(scope="module")
def scope(smollm2_path):
    with Microscope(str(smollm2_path), threads=1, kv_tokens=1024) as scope:
        yield scope


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_windows_are_the_rounds_of_the_record(scope, temperature):
    run = scope.generate(QUESTION, temperature=temperature, seed=2, **SETTINGS)
    assert len(scope.windows) == len(run.record.rounds)
    for window, entry in zip(scope.windows, run.record.rounds, strict=True):
        assert (window.drafts, window.accepted, window.emitted) == (entry.drafted, entry.accepted, entry.emitted)
        assert window.rows[0].position == entry.start == window.start + 1
        assert window.committed == entry.start + entry.accepted
        for row in window.rows[:-1]:
            assert row.drafter is not None
            assert row.drafter.token == row.draft
            assert row.drafter.position == row.position


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draw_is_the_largest_of_its_scores_and_noise(scope, temperature):
    scope.generate(QUESTION, temperature=temperature, seed=5, **SETTINGS)
    for window in scope.windows[:6]:
        for row in window.rows:
            for draw in filter(None, (row.target, row.drafter)):
                assert draw.probabilities.sum() == pytest.approx(1)
                assert draw.probability(draw.top(1)[0]) == draw.probabilities.max()
                some = [*draw.top(40), draw.token]
                assert some[int(np.argmax(draw.scores[some] + draw.noise(some)))] == draw.token
                if temperature:
                    assert draw.noise([7])[0] == pytest.approx(reference.gumbel(5, draw.position, 7))


def test_an_interrupt_in_the_middle_of_a_step_moves_nothing(scope):
    want = scope.generate(QUESTION, max_tokens=24).tokens
    ticket = scope.start(QUESTION, **SETTINGS)
    while len(scope.windows) < 3:
        scope.step()
    before = scope.blocks(), len(scope.windows)
    scope.interrupt_next()
    with pytest.raises(KeyboardInterrupt):
        scope.step()
    scope.engine.check()
    assert (scope.blocks(), len(scope.windows)) == before
    assert list(ticket.result().tokens) == want


def test_a_lattice_is_made_of_the_targets_own_probabilities(scope):
    text, grid = "On Monday, I met", lattice_of(scope, "On Monday, I met", positions=2, best=3)
    start = scope.engine.tokenize(text)
    first = scope.next_draw(start).scores
    assert grid.ids[0] == np.argsort(-first, kind="stable")[:3].tolist()
    np.testing.assert_allclose(grid.unary[0], first[grid.ids[0]])
    for at, token in enumerate(grid.ids[0]):
        after = scope.next_draw([*start, token]).scores[grid.ids[1]]
        np.testing.assert_allclose(grid.unary[1] + grid.pair[0][at], after, rtol=1e-9)
    figure = walk_table(grid, [0, 0], [1, 2])
    assert figure.text.count("the walk") == figure.text.count("best alone") == 2
    total = float(grid.unary[1][2] + grid.pair[0][1][2])
    assert f"{total:.2f}" in figure.text
    assert grid.say([1, 2]) == grid.texts[0][1] + grid.texts[1][2]


def test_figures_say_in_text_what_they_show(scope):
    run = scope.generate(QUESTION, temperature=0.8, seed=2, **SETTINGS)
    window = scope.windows[1]
    for figure in (
        window_table(window, scope.piece),
        position_table(window.rows[0], scope.piece),
        slots_chart(scope.windows[1:4], scope.piece),
    ):
        assert scope.piece(window.drafts[0]).strip() in figure.text
        assert scope.piece(window.drafts[0]).strip() in figure._repr_html_()
    copied = scope.generate(
        "Say: one two three. Say: one two", max_tokens=16, speculate="ngram", width=3, controller="fixed"
    )
    results = {width: copied.what_if(width=width, controller="fixed") for width in (1, 2, 3)}
    page = explore(results, chosen=2)._repr_html_()
    assert page.count("<details") == 3
    assert page.count(" open>") == 1
    assert run.text

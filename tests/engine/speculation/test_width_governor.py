"""TensorSharp's cost governor with its published constants (spec/seeds.md 2.4)."""

from __future__ import annotations

import pytest

from power_lab.engine.speculation.width import WidthAsk
from power_lab.engine.speculation.width.governor import GovernorController, Sample, per_token, without_worst
from tests.engine.speculation.test_width_controllers import Table

NOTHING = Table({}, {})


class Engine:
    """Rounds of one request: what they cost and emit with drafts and without."""

    def __init__(self) -> None:
        self.controller = GovernorController()
        self.controller.begin(1, "mtp")
        self.why = ""

    def round(self, spec: float = 1.0, accepted: int = 1, plain: float = 1.0, drafted: int = 4) -> bool:
        """Whether it speculated."""
        choice = self.controller.ask([WidthAsk(1, 4)], 0, NOTHING)[0]
        self.why = choice.why
        if choice.drafts:
            if drafted:
                assert self.controller.keep([WidthAsk(1, drafted)], 0, NOTHING)[0].drafts == drafted
            self.controller.observe(1, drafted, accepted, spec)
        else:
            self.controller.observe(1, 0, 0, plain)
        return bool(choice.drafts)

    def run(self, count: int, **costs: float) -> str:
        """S and p for each round."""
        return "".join("S" if self.round(**costs) else "p" for _ in range(count))  # type: ignore[arg-type]


def test_a_token_is_the_sum_of_times_over_the_sum_of_tokens() -> None:
    samples = [Sample(2.0, 1, 0), Sample(1.0, 4, 3)]
    assert per_token(samples) == pytest.approx(0.6)
    assert without_worst(samples) == pytest.approx(0.25)
    assert without_worst(samples[:1]) == 2.0


def test_a_race_is_eight_rounds_and_three_without_and_a_win_holds_for_64() -> None:
    engine = Engine()
    assert engine.run(8 + 3, spec=1.5, accepted=1) == "S" * 8 + "p" * 3  # 0.75 a token against 1
    assert engine.run(64, spec=1.5) == "S" * 64
    assert engine.run(11, spec=1.5) == "S" * 8 + "p" * 3, "then it is run again"


@pytest.mark.parametrize(("spec", "wins"), [(2.29, True), (2.31, False)])
def test_drafts_win_up_to_15_percent(spec: float, wins: bool) -> None:
    engine = Engine()
    engine.run(11, spec=spec, accepted=1)
    assert engine.round(spec=spec) == wins


def test_the_first_round_of_each_side_and_the_worst_of_the_probe_do_not_count() -> None:
    engine = Engine()
    engine.round(spec=100.0)
    engine.run(3, spec=1.5)
    engine.round(spec=50.0)
    engine.run(3, spec=1.5)
    engine.round(plain=0.0001)
    engine.run(2, plain=1.0)
    assert engine.run(5, spec=1.5) == "SSSSS"


def test_losses_park_for_32_doubling_to_256_with_three_probes_between() -> None:
    engine = Engine()
    said = engine.run(8 + 3, spec=9.0)
    assert said == "S" * 8 + "p" * 3
    for park in (32, 64, 128, 256, 256, 256):
        assert engine.run(park, spec=9.0) == "p" * park
        assert engine.run(3, spec=9.0) == "SSS", "the pause was the other side's measure"


def test_four_measured_probes_without_an_accepted_draft_are_lost_at_once() -> None:
    engine = Engine()
    assert engine.run(37, spec=0.1, accepted=0) == "S" * 5 + "p" * 32
    assert "without an accepted draft" in engine.why


def test_a_drafter_that_had_nothing_is_a_round_of_one_token() -> None:
    engine = Engine()
    engine.run(8, spec=1.2, accepted=0, drafted=0)
    assert engine.run(1) == "p"
    never = Engine()
    never.run(1, spec=1.0, accepted=0, drafted=0)
    never.run(7, spec=2.4, accepted=1)  # 1.2 a token; a round without drafts would make it worse, not better
    never.run(3, plain=1.0)
    assert not never.round()


def test_a_loss_among_the_last_eight_rounds_of_a_win_parks() -> None:
    engine = Engine()
    engine.run(11, spec=1.5)
    assert engine.run(8, spec=1.5) == "S" * 8
    # Seven rounds of 1.5 and one of 9.0 over 16 tokens: 1.22 a token.
    assert engine.round(spec=9.0)
    assert not engine.round()
    assert "1218.75 ms a token with drafts, 1000.00 without" in engine.why


def test_a_win_forgets_losses_and_a_request_forgets_all_but_one() -> None:
    engine = Engine()
    engine.run(11, spec=9.0)
    engine.run(32)
    engine.run(3, spec=9.0)  # the second loss: 64 rounds
    engine.controller.begin(2, "mtp")
    assert engine.run(33, spec=9.0) == "p" * 32 + "S", "a new request waits 32 at most"
    engine.run(2, spec=1.0)  # won
    assert engine.run(9, spec=9.0).startswith("S")


def test_each_drafter_runs_its_own_race() -> None:
    engine = Engine()
    engine.run(11, spec=9.0)
    engine.controller.begin(2, "ngram")
    asked = engine.controller.ask([WidthAsk(1, 4), WidthAsk(2, 4)], 0, NOTHING)
    assert [choice.drafts for choice in asked] == [0, 4]

"""What draws come to before they are committed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.live import Live
from power_lab.engine.plan import Span
from power_lab.engine.request import Finish, Request, SamplingParams
from power_lab.engine.speculation.transaction import match
from tests import tiny

TOKENS = st.integers(-1, tiny.END)
TOKENIZER = tiny.tokenizer()


@settings(max_examples=300, deadline=None)
@given(
    before=st.lists(st.integers(0, 255), max_size=3),
    targets=st.lists(TOKENS, min_size=1, max_size=4),
    wrong=st.integers(0, 4),
    stops=st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=2), max_size=2).map(tuple),
    room=st.integers(1, 5),
    data=st.data(),
)
def test_a_window_is_what_its_tokens_are_one_by_one(
    before: list[int], targets: list[int], wrong: int, stops: tuple[str, ...], room: int, data: st.DataObject
) -> None:
    """With drafts or with none: outcome, text and reason are those of `match` and of one decoder."""
    ends = frozenset({tiny.END, *data.draw(st.sets(st.sampled_from([max(0, token) for token in targets])))})
    drafts = [token if row != wrong else token + 1 for row, token in enumerate(targets[:-1])]
    known = [0, *before]
    request = Request(0, 1, SamplingParams(stop=stops, seed=0), known, len(known) + room, ends)
    live = Live(request, TOKENIZER, 0.0, None, None)
    live._decoder.push(before)
    decoder, text, count = live._decoder.clone(), [], 0

    def terminal(token: int) -> Finish | None:
        nonlocal count
        count += 1
        if token in ends:
            return Finish.STOP
        text.append(decoder.push([token]))
        return Finish.STOP if decoder.stopped is not None else Finish.LENGTH if count >= room else None

    span = Span(0, len(known) - 1, (known[-1], *drafts), len(drafts), len(targets), (1,))
    (outcome, verdict), (again, _) = live.verify(span, targets), live.verify(span, targets)
    assert again == outcome == match(drafts, targets, terminal)
    assert verdict.text == "".join(text) and verdict.decoder.flush() == decoder.flush()
    why = {Finish.STOP: ("token", "string"), Finish.LENGTH: (f"{len(known) + room - 1} tokens",)}
    expected = why.get(outcome.finish, ("The model's logits" if outcome.finish is Finish.ERROR else "",))
    assert verdict.detail.startswith(expected)  # type: ignore[arg-type]

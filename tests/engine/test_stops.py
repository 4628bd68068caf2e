"""Ends inside a speculation window: tokens, text, finish and log-probabilities are those of plain decoding, with no bonus token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from power_lab.engine.request import SamplingParams
from power_lab.engine.trace import Delta, RunRecord
from power_lab.kernels.ops import Ops
from tests import tiny
from tests.engine.test_exactness import Oracle, prompt_of

PROMPT = prompt_of(21, 60)
EMIT = 40


def answer(ops: Ops, width: int, known: list[int] | None = None, **params: Any) -> tuple[RunRecord, str]:
    """One run; with `known` the drafter proposes exactly those tokens, `width` at a time. Also the text as it was streamed."""
    engine = tiny.engine(tiny.Shape(scale=1.8), ops)
    streamed: list[str] = []
    if known is not None:
        oracle = Oracle([*PROMPT, *known])
        oracle._guess = lambda token: token
        engine._proposer._make = lambda _: oracle
        params |= {"speculate": "ngram", "width": width, "controller": "fixed"}

    def listen(delta: Delta) -> None:
        streamed.append(delta.text)

    ticket = engine.submit(PROMPT, SamplingParams(**{"max_tokens": EMIT, **params}), on_delta=listen)
    record = ticket.result()
    engine.check()
    assert engine.status().used_blocks == 0
    return record, "".join(streamed)


@pytest.fixture(scope="module")
def plain(numba_ops: Callable[[int], Ops]) -> RunRecord:
    return answer(numba_ops(2), 1, ignore_eos=True)[0]


@pytest.mark.parametrize("width", [1, 2, 5, 11])
@pytest.mark.parametrize("at", [0, 1, 6, 7, 25, EMIT - 1])
def test_a_stop_token_ends_the_window(at: int, width: int, plain: RunRecord, numba_ops: Callable[[int], Ops]) -> None:
    stop = plain.tokens[at]
    first = plain.tokens.index(stop)
    off, _ = answer(numba_ops(2), width, stop_tokens=(stop,), ignore_eos=True)
    on, streamed = answer(numba_ops(2), width, list(plain.tokens), stop_tokens=(stop,), ignore_eos=True)
    assert on.tokens == off.tokens == plain.tokens[: first + 1]
    assert (on.text, on.finish, on.finish_detail) == (off.text, off.finish, off.finish_detail)
    assert on.finish == "stop" and streamed == on.text
    assert sum(len(r.emitted) for r in on.rounds) == first + 1, "a bonus token came after the stop"


@pytest.mark.parametrize("width", [1, 4, 11])
@pytest.mark.parametrize("at", [0, 5, 9, 24])
def test_a_stop_string_ends_the_window_and_is_cut(at: int, width: int, numba_ops: Callable[[int], Ops]) -> None:
    common: dict[str, Any] = {"ignore_eos": True, "logit_bias": dict.fromkeys((*range(32), *range(127, 256)), -1000.0)}
    whole, _ = answer(numba_ops(2), 1, **common)
    stop = whole.text[at : at + 3]
    off, off_stream = answer(numba_ops(2), 1, stop=(stop,), **common)
    on, on_stream = answer(numba_ops(2), width, list(whole.tokens), stop=(stop,), **common)
    assert (on.tokens, on.text, on.finish, on.finish_detail) == (off.tokens, off.text, off.finish, off.finish_detail)
    assert on_stream == off_stream == on.text == whole.text[: whole.text.index(stop)]
    assert on.finish == "stop" and len(on.tokens) == whole.text.index(stop) + 3


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_max_tokens_is_kept_inside_a_window(count: int, plain: RunRecord, numba_ops: Callable[[int], Ops]) -> None:
    on, streamed = answer(numba_ops(2), 7, list(plain.tokens), max_tokens=count, ignore_eos=True)
    assert on.tokens == plain.tokens[:count]
    assert on.finish == "length" and streamed == on.text


def test_log_probabilities_do_not_depend_on_speculation(plain: RunRecord, numba_ops: Callable[[int], Ops]) -> None:
    off, _ = answer(numba_ops(2), 1, logprobs=3, temperature=0.7, seed=4, ignore_eos=True)
    on, _ = answer(numba_ops(2), 5, list(off.tokens), logprobs=3, temperature=0.7, seed=4, ignore_eos=True)
    assert on.tokens == off.tokens and len(on.rounds) < len(off.rounds)
    assert [p for r in on.rounds for p in r.logprobs] == [p for r in off.rounds for p in r.logprobs]
    for r in on.rounds:
        for token, entry in zip(r.emitted, r.logprobs, strict=True):
            assert (
                entry.value <= 0
                and len(entry.top_ids) == 3
                and list(entry.top_values) == sorted(entry.top_values)[::-1]
            )
            assert token not in entry.top_ids or entry.top_values[entry.top_ids.index(token)] == entry.value


def test_log_probabilities_go_to_who_asked(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(), numba_ops(2))
    quiet = engine.submit(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    asked = engine.submit(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0))
    assert [len(r.logprobs) for r in asked.result().rounds] == [1, 1, 1]
    assert [len(r.logprobs) for r in quiet.result().rounds] == [0, 0, 0]


def test_the_end_token_ends_the_request_unless_ignored(numba_ops: Callable[[int], Ops]) -> None:
    bias = {tiny.END: 1000.0}
    off, _ = answer(numba_ops(2), 1, logit_bias=bias)
    on, _ = answer(numba_ops(2), 4, [tiny.END] * 10, logit_bias=bias)
    assert on.tokens == off.tokens == (tiny.END,) and on.text == "" and on.finish == "stop"
    ignored, _ = answer(numba_ops(2), 4, [tiny.END] * 50, logit_bias=bias, ignore_eos=True)
    assert ignored.tokens == (tiny.END,) * EMIT

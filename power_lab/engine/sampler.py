"""Sampling controls for a step: requests' parameters as flat arrays for the sampling kernel, and log-probabilities on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from power_lab.engine.plan import StepPlan
from power_lab.engine.request import Request, SamplingParams
from power_lab.engine.trace import Logprob
from power_lab.kernels.ops import Draw

COLUMNS: dict[str, tuple[tuple[int, ...], str, Any]] = {
    "temperature": ((), "float32", 0),
    "top_k": ((), "int32", 0),
    "top_p": ((), "float32", 1),
    "min_p": ((), "float32", 0),
    "repetition": ((), "float32", 1),
    "presence": ((), "float32", 0),
    "seeds": ((), "int64", 0),
    "positions": ((), "int64", 0),
    "history_span": ((3,), "int64", 0),
    "bias_span": ((2,), "int64", 0),
}
"""Of `SampleRows`: shape of a row's value, dtype, and the value of a row that is only padding: a greedy draw."""

_PARAMS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition": "repetition_penalty",
    "presence": "presence_penalty",
    "seeds": "seed",
}


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """What penalties and biases read, as in `SampleRows`, on the host; the spans have a row for each logit row."""

    history: np.ndarray
    history_span: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    bias_span: np.ndarray


class Asked(NamedTuple):
    """What the draws of a step ask for.

    Attributes:
        params: of each request that has some. draw: what no row goes beyond.
        listed: whether any has penalties or biases. logprobs: most alternatives that one asks for, None: nobody does.
    """

    params: list[SamplingParams]
    draw: Draw
    listed: bool
    logprobs: int | None

    @classmethod
    def of(cls, params: list[SamplingParams]) -> Asked:
        drawn = [p for p in params if p.temperature > 0]
        draw = "limited" if any(p.top_k or p.top_p < 1 for p in drawn) else "random" if drawn else "greedy"
        listed = any(p.penalised or p.logit_bias for p in params)
        return cls(params, draw, listed, max((p.logprobs for p in params if p.logprobs is not None), default=None))


def params_of(plan: StepPlan, requests: Mapping[int, Request]) -> list[SamplingParams]:
    """Of each span with draws."""
    return [requests[span.request_id].params for span in plan.spans if span.sampled]


def lists(plan: StepPlan, requests: Mapping[int, Request]) -> Lists | None:
    """Histories and biases of a step's logit rows; None when no request of it has penalties or biases.

    Row i of a window sees its request's tokens and the drafts before it: exactly what it would see if they were accepted, which is
    the only case in which its draw counts.
    """
    sampled = [(span, requests[span.request_id]) for span in plan.spans if span.sampled]
    if not any(request.penalised or request.params.logit_bias for _, request in sampled):
        return None
    histories, spans, ids, values, bias_spans = [], [], [], [], []
    at = bias_at = 0
    for span, request in sampled:
        known = len(request.tokens)
        if request.penalised:
            histories.append(np.asarray([*request.tokens, *span.tokens[span.rows - span.drafts :]], np.int32))
            spans += [(at, at + request.prompt_len, at + known + row) for row in range(span.sampled)]
            at += known + span.drafts
        else:
            spans += [(at, at, at)] * span.sampled
        bias = request.params.logit_bias
        if bias:
            tokens = np.fromiter(bias, np.int32, len(bias))
            order = np.argsort(tokens)
            ids.append(tokens[order])
            values.append(np.fromiter(bias.values(), np.float32, len(bias))[order])
        bias_spans += [(bias_at, bias_at + len(bias))] * span.sampled
        bias_at += len(bias)
    return Lists(
        history=np.concatenate(histories) if histories else np.zeros(1, np.int32),
        history_span=np.asarray(spans, np.int64).reshape(-1, 3),
        bias_ids=np.concatenate(ids) if ids else np.zeros(1, np.int32),
        bias_values=np.concatenate(values) if values else np.zeros(1, np.float32),
        bias_span=np.asarray(bias_spans, np.int64).reshape(-1, 2),
    )


def fill(
    host: Mapping[str, np.ndarray], params: Sequence[SamplingParams], counts: Sequence[int], given: Lists | None
) -> None:
    """Write the columns of `COLUMNS` for so many logit rows of each request, but for positions; rows beyond them draw greedily and are not
    looked at."""
    total = sum(counts)
    for name, of in _PARAMS.items():
        values = [getattr(one, of) for one in params]
        host[name][:total] = values if total == len(values) else np.repeat(values, counts)
    if given is None:
        host["history_span"][:total], host["bias_span"][:total] = 0, 0
    else:
        host["history_span"][:total], host["bias_span"][:total] = given.history_span, given.bias_span
    if total < len(host["positions"]):
        for name, (_, _, padding) in COLUMNS.items():
            host[name][total:] = padding


def logprobs(fetched: Sequence[np.ndarray], plan: StepPlan, requests: Mapping[int, Request]) -> list[Logprob]:
    """Log-probabilities of the drawn tokens for all sampled rows, of the three arrays of `Ops.logprobs`."""
    values, ids, best = fetched
    counts = [requests[span.request_id].params.logprobs or 0 for span in plan.spans for _ in range(span.sampled)]
    return [
        Logprob(float(values[i]), tuple(ids[i, :count].tolist()), tuple(best[i, :count].tolist()))
        for i, count in enumerate(counts)
    ]

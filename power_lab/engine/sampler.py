"""Sampling controls for a step: requests' parameters as flat arrays for the sampling kernel, and log-probabilities on request."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from power_lab.engine.plan import StepPlan
from power_lab.engine.request import Request
from power_lab.engine.trace import Logprob
from power_lab.kernels.ops import Array, Ops, SampleRows


def controls(plan: StepPlan, requests: Mapping[int, Request]) -> SampleRows:
    """Structure of arrays over the plan's sampled rows.

    Row i of a window sees its request's tokens and the drafts before it: exactly what it would see if they were accepted, which is
    the only case in which its draw counts.
    """
    sampled = [(span, requests[span.request_id]) for span in plan.spans if span.sampled]
    counts = np.array([span.sampled for span, _ in sampled])
    params = [request.params for _, request in sampled]

    def column(values: list, dtype: type) -> np.ndarray:
        return np.repeat(np.asarray(values, dtype), counts)

    histories, spans, biases, bias_spans = [], [], [], []
    at = bias_at = 0
    for span, request in sampled:
        known = len(request.tokens)
        if request.params.repetition_penalty != 1.0 or request.params.presence_penalty != 0.0:
            histories.append(np.asarray([*request.tokens, *span.tokens[span.rows - span.drafts :]], np.int32))
            spans += [(at, at + request.prompt_len, at + known + row) for row in range(span.sampled)]
            at += known + span.drafts
        else:
            spans += [(at, at, at)] * span.sampled
        bias = request.params.logit_bias
        biases += sorted(bias.items())
        bias_spans += [(bias_at, bias_at + len(bias))] * span.sampled
        bias_at += len(bias)
    return SampleRows(
        temperature=column([p.temperature for p in params], np.float32),
        top_k=column([p.top_k for p in params], np.int32),
        top_p=column([p.top_p for p in params], np.float32),
        min_p=column([p.min_p for p in params], np.float32),
        repetition=column([p.repetition_penalty for p in params], np.float32),
        presence=column([p.presence_penalty for p in params], np.float32),
        seeds=column([p.seed for p in params], np.uint64),
        positions=np.concatenate([np.arange(len(r.tokens), len(r.tokens) + s.sampled) for s, r in sampled]).astype(
            np.int64
        ),
        history=np.concatenate(histories) if histories else np.zeros(0, np.int32),
        history_span=np.asarray(spans, np.int64).reshape(-1, 3),
        bias_ids=np.asarray([token for token, _ in biases], np.int32),
        bias_values=np.asarray([value for _, value in biases], np.float32),
        bias_span=np.asarray(bias_spans, np.int64).reshape(-1, 2),
    )


def logprobs(
    ops: Ops, logits: Array, tokens: Array, plan: StepPlan, requests: Mapping[int, Request]
) -> list[Logprob] | None:
    """Log-probabilities of the drawn tokens for all sampled rows, when some request of the plan asks for them."""
    wanted = [
        requests[span.request_id].params.logprobs for span in plan.spans if span.sampled for _ in range(span.sampled)
    ]
    if all(count is None for count in wanted):
        return None
    drawn = ops.asarray(np.maximum(ops.tohost(tokens), 0))  # -1 where nothing could be drawn
    values, ids, best = ops.logprobs(logits, drawn, max(count or 0 for count in wanted))
    return [
        Logprob(float(values[i]), tuple(ids[i, : count or 0].tolist()), tuple(best[i, : count or 0].tolist()))
        for i, count in enumerate(wanted)
    ]

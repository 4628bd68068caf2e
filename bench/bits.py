"""Whether a model's logits are the same bits however its text is computed, and how far they are from the f32 CPU reference."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded
from power_lab.engine.models.decoder import Decoder, Workspace
from power_lab.engine.plan import StepPlan
from power_lab.engine.request import SamplingParams
from power_lab.kernels.ops import BLOCK, Batch

LENGTH = 600
"""Tokens of the text: past two canonical KV splits, and past the context at which other engines begin to differ."""

Window = tuple[int, int, Sequence[int]]  # sequence, first position, tokens


class Sequences:
    """Paged caches for several texts, whose windows are computed in any order, with the logits of every row.

    Args:
        model: the decoder.
        count, length: of the texts.
        rows: most rows at once.
    """

    def __init__(self, model: Decoder, count: int, length: int, rows: int) -> None:
        self._model = model
        self._pages = -(-length // BLOCK)
        self._caches = model.caches(count * self._pages + 1)
        self._work = Workspace.make(model.spec, model.ops, rows, rows, model.weights.head.operand)
        self._tables = 1 + np.arange(count * self._pages, dtype=np.int32).reshape(count, self._pages)

    def run(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """Logits f32 [tokens, V] of each window. Its keys and values replace what lay at its positions."""
        ops = self._model.ops
        owner = np.concatenate([np.full(len(tokens), i, np.int32) for i, (_, _, tokens) in enumerate(windows)])
        positions = np.concatenate([start + np.arange(len(tokens), dtype=np.int32) for _, start, tokens in windows])
        tables = self._tables[[sequence for sequence, _, _ in windows]]
        slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        batch = Batch(
            ids=ops.asarray(np.concatenate([np.asarray(tokens, np.int32) for _, _, tokens in windows])),
            positions=ops.asarray(positions),
            slots=ops.asarray(slots),
            table_of=ops.asarray(owner),
            tables=ops.asarray(tables),
            sampled=ops.asarray(np.arange(len(owner), dtype=np.int32)),
        )
        logits = ops.tohost(self._model.forward(batch, self._caches, self._work))
        return np.split(logits, np.cumsum([len(tokens) for _, _, tokens in windows])[:-1])


def check(loaded: Loaded, prompt: Sequence[int]) -> dict[str, int]:
    """Continue a prompt in the engine to LENGTH tokens, then compute the logits of that text in every way there is.

    Returns how many of its rows differ from those of one prefill, for each way; all 0 is what exact mode promises.
    """
    text, decoded = _written(loaded, prompt)
    model = loaded.model
    (whole,) = Sequences(model, 1, LENGTH, LENGTH).run([(0, 0, text)])
    want = list(map(_digest, whole))
    different = {"decoded by the engine": sum(want[at] != digest for at, digest in decoded.items())}
    for name, chunk in (("chunks of 64", 64), ("chunks of 7", 7), ("token by token", 1)):
        different[name] = _count(model, 1, chunk, want, _chunks(text, chunk))
    different["verify windows"] = _count(model, 1, 17, want, _verified(text, model.spec.vocab))
    different["batch of 8"] = _count(model, 8, 8 * 16, want, _together(text, 8))
    return different


def parity(model: Decoder, reference: Decoder, tokens: Sequence[int]) -> tuple[float, float]:
    """Mean divergence KL(reference, model) of next-token distributions in nats, and how often the likeliest token is the same."""
    rows = []
    for each in (reference, model):
        (logits,) = Sequences(each, 1, len(tokens), len(tokens)).run([(0, 0, tokens)])
        wide = logits.astype(np.float64)
        rows.append(wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True))
    want, got = rows
    divergence = (np.exp(want) * (want - got)).sum(-1).mean()
    return float(divergence), float((want.argmax(-1) == got.argmax(-1)).mean())


def _written(loaded: Loaded, prompt: Sequence[int]) -> tuple[list[int], dict[int, bytes]]:
    """A text of LENGTH tokens that the engine wrote on, and digests of the logits that it drew from, by position."""
    seen: dict[int, bytes] = {}

    def observe(plan: StepPlan, logits: np.ndarray) -> None:
        (span,) = plan.spans
        if span.sampled:
            seen[span.start + span.rows - 1] = _digest(logits[0])

    engine = Engine(EngineConfig(kv_tokens=2048), loaded=loaded, threaded=False, observer=observe)
    params = SamplingParams(max_tokens=LENGTH - len(prompt), temperature=1.0, seed=0, ignore_eos=True)
    record = engine.submit(list(prompt), params).result()
    engine.close()
    if loaded.facts.device == "cuda":
        torch.cuda.synchronize()  # a step that was begun ahead may still be running, on a stream of its own
    return [*prompt, *record.tokens], seen


def _count(
    model: Decoder, sequences: int, rows: int, want: Sequence[bytes], steps: Iterable[list[tuple[Window, int]]]
) -> int:
    """Rows that differ from `want`. Each step is windows, each with how many of its rows hold the text's own tokens."""
    caches = Sequences(model, sequences, LENGTH, rows)
    different, compared = 0, 0
    for step in steps:
        for logits, ((_, start, _), right) in zip(caches.run([window for window, _ in step]), step, strict=True):
            different += sum(_digest(row) != want[start + i] for i, row in enumerate(logits[:right]))
            compared += right
    assert compared >= sequences * LENGTH, "rows were left out"
    return different


def _chunks(text: Sequence[int], chunk: int) -> Iterator[list[tuple[Window, int]]]:
    for start in range(0, LENGTH, chunk):
        tokens = text[start : start + chunk]
        yield [((0, start, tokens), len(tokens))]


def _verified(text: Sequence[int], vocab: int) -> Iterator[list[tuple[Window, int]]]:
    """Windows of 1 to 17 rows whose drafts turn wrong somewhere; the next window overwrites what was wrong."""
    rng, start = random.Random(1), 0
    while start < LENGTH:
        tokens = list(text[start : start + rng.randrange(1, 18)])
        right = rng.randrange(1, len(tokens) + 1)
        tokens[right:] = [(token + 1) % vocab for token in tokens[right:]]
        yield [((0, start, tokens), right)]
        start += right


def _together(text: Sequence[int], count: int) -> Iterator[list[tuple[Window, int]]]:
    """The same text in several places of a batch, each at its own pace of 1 to 16 rows a step, or resting."""
    rng, starts = random.Random(2), [0] * count
    while min(starts) < LENGTH:
        step: list[tuple[Window, int]] = []
        for sequence, start in enumerate(starts):
            tokens = text[start : start + rng.randrange(17)]
            if tokens:
                step.append(((sequence, start, tokens), len(tokens)))
                starts[sequence] += len(tokens)
        if step:
            yield step


def _digest(row: np.ndarray) -> bytes:
    return hashlib.sha256(row.tobytes()).digest()

"""The forward pass on a device whose products may leave sums to their readers, through Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from power_lab.engine.plan import StepPlan
from power_lab.engine.request import SamplingParams
from power_lab.kernels.triton import linear
from tests import drafters, tiny
from tests.kernels.triton.leaving import LeavingOps

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings(
        "ignore:invalid value encountered:RuntimeWarning"
    ),  # of padding rows, which read what was never written
]


def logits(kind: str, stored: str, *, apart: bool) -> tuple[list[bytes], int]:
    """Bits of all logits of two requests, and of how many products sums were left apart."""
    seen: list[bytes] = []

    def observe(_: StepPlan, rows: np.ndarray) -> None:
        assert not np.isnan(rows).any(), "sums were read after their scratch had gone to another product"
        seen.append(rows.tobytes())

    ops = LeavingOps(apart=apart)
    shape = tiny.Shape(kind=kind, width=512, ffn=512, heads=4, kv_heads=1, head_dim=128, stored=stored)
    engine = tiny.engine(shape, ops, kv_tokens=1024, observer=observe)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for ticket in [engine.submit(prompt, params) for prompt in ([1, 2], [3])]:
        ticket.result()
    engine.close()
    return seen, ops.left


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "stored"), [("qwen2", "Q4_K"), ("olmo2", "BF16"), ("gemma3", "BF16")])
def test_sums_that_are_left_to_their_readers_change_no_bits(
    kind: str, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases of q k v, norms behind parts instead of before them, and both: two splits of every product, which models of this size lack."""
    monkeypatch.setattr(linear, "reduction", lambda columns, cols, gated, stored: (1, 512) if gated else (2, 256))
    (want, none), (got, left) = logits(kind, stored, apart=False), logits(kind, stored, apart=True)
    assert want == got
    assert (none, left) == (0, 5 * len(want)), "q k v and output of two layers and down of the first"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("drafter", ["mtp", "eagle"])
def test_nor_do_they_change_drafts(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter's layers leave sums, too: one that read them too late would draft from NaN."""
    monkeypatch.setattr(linear, "reduction", lambda columns, cols, gated, stored: (1, 512) if gated else (2, 32))
    found = []
    for apart in (False, True):
        ops = LeavingOps(apart=apart)
        engine = drafters.engine(drafters.KINDS[drafter](tiny.Shape(), ops), kv_tokens=1024)
        params = SamplingParams(max_tokens=3, speculate=drafter, width=2, controller="fixed", ignore_eos=True)
        record = engine.submit([1, 2], params).result()
        engine.close()
        found.append((record.tokens, [one.drafted for one in record.rounds], ops.left))
    (tokens, drafted, none), (same, again, left) = found
    assert tokens == same and drafted == again and any(drafted)
    assert none == 0 < left

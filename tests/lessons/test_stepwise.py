"""The film of an engine: what it shows is what the engine did, and watching changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from power_lab.errors import ConfigError
from power_lab.lessons import PoolWalk, SoftmaxWalk, Stepwise, canonical_splits
from power_lab.lessons.arithmetic import exp, fma, tree_sum
from power_lab.lessons.exercises.paged_kv import shared

PROMPTS = {"A": "Tell me a story about a lighthouse keeper who finds a letter.", "B": "Why is the sky blue?", "C": "Hi."}
TEXT = "The lamp is lit at dusk and put out at dawn. The log names each ship that passes. " * 18
ROOM = {"context": 256, "kv_tokens": 256, "max_batch": 2, "step_tokens": 32, "threads": 1}


@pytest.fixture(scope="module")
def floor(smollm2_path):
    with Stepwise(str(smollm2_path), **ROOM) as floor:
        for name, tokens in {"A": 100, "B": 90, "C": 4}.items():
            floor.submit(name, PROMPTS[name], max_tokens=tokens, ignore_eos=True)
        floor.runs = floor.run()
        yield floor


@pytest.fixture(scope="module")
def scope(smollm2_path):
    with Stepwise(str(smollm2_path), attention=3, context=512, kv_tokens=1024, threads=1) as scope:
        scope.submit("long", TEXT, chat=False, max_tokens=2)
        scope.submit("short", "Why?", max_tokens=3, ignore_eos=True)
        scope.run()
        yield scope


def test_frames_add_up_to_the_runs(floor):
    for name, run in floor.runs.items():
        parts = [frame.part(name) for frame in floor.frames if frame.part(name)]
        assert sum(part.phase == "decode" for part in parts) <= len(run.tokens) <= sum(part.rows for part in parts)
        assert sorted(floor.logits[name]) == [len(run.record.prompt_tokens) + i for i in range(len(run.tokens))]
        for position, token in zip(sorted(floor.logits[name]), run.tokens, strict=True):
            assert floor.logits[name][position].argmax() == token
    assert sorted(name for frame in floor.frames for name in frame.ended) == ["A", "B", "C"]
    assert all(frame.rows == frame.record.prefill_rows + frame.record.decode_rows for frame in floor.frames)
    assert "C" in floor.frames[0].waiting


def test_a_request_loses_its_blocks_and_keeps_its_bits(floor, smollm2_path):
    (lost,) = {part.name for frame in floor.frames for part in frame.parts if part.preempted}
    with Stepwise(str(smollm2_path), **ROOM | {"kv_tokens": 1024}) as alone:
        tokens = len(floor.runs[lost].tokens)
        alone.generate(lost, PROMPTS[lost], max_tokens=tokens, ignore_eos=True)
        for position, logits in alone.logits[lost].items():
            assert np.array_equal(logits.view(np.int32), floor.logits[lost][position].view(np.int32))


def test_padding_changes_no_bit(floor, smollm2_path):
    with Stepwise(str(smollm2_path), buckets=(4, 32), **ROOM | {"kv_tokens": 1024}) as padded:
        padded.submit("B", PROMPTS["B"], max_tokens=6, ignore_eos=True)
        padded.run()
        assert {frame.record.shape[0] for frame in padded.frames} == {4, 32}
        assert sum(frame.record.padded_rows for frame in padded.frames) > 0
        for position, logits in padded.logits["B"].items():
            assert np.array_equal(logits.view(np.int32), floor.logits["B"][position].view(np.int32))


def test_the_engine_shares_rows_by_the_rule_of_the_exercise(floor):
    frame = floor.frames[0]
    lacking = [len(floor.runs[part.name].record.prompt_tokens) for part in frame.parts]
    assert [part.rows for part in frame.parts] == shared(lacking, 32)[: len(frame.parts)]


def test_the_walk_shows_each_step(floor):
    walk = PoolWalk(floor.frames, at=0)
    assert "<b>Step 0</b>" in walk.body()
    assert walk.events()[0] == 0
    assert all(earlier < later for earlier, later in zip(walk.events(), walk.events()[1:], strict=False))
    walk.asked("go", {"to": "next"})
    assert walk.at == 1
    walk.go("event")
    assert walk.at == next(place for place in walk.events() if place > 1)
    walk.go("first")
    walk.go("back")
    walk.go("<script>")
    assert walk.at == 0
    assert "preempted" in walk.body()
    assert walk.dataset.sizes == {"step": len(floor.frames), "request": 3, "block": 5}
    assert walk.export("svg").startswith(b"<svg")
    assert int(walk.dataset.rows.sum()) == sum(frame.rows for frame in floor.frames)


def test_numpy_in_the_canonical_order_has_the_kernels_bits(scope):
    row = next(row for row in scope.attended if row.position > 256)
    keys, values = row.dense()
    for window in (0, 100):
        kernel = scope.attend([*scope.attended[:2], row], window=window)[-1]
        for head in (0, 8):
            ours = _canonical(row, keys[:, head // 3], values[:, head // 3], head, canonical_splits(row.position, window))
            assert np.array_equal(ours.view(np.int32), kernel[head].view(np.int32))
        if not window:
            assert np.array_equal(kernel.view(np.int32), row.out.view(np.int32))


def _canonical(row, keys, values, head, cuts):
    best = total = weighted = None
    for first, last in cuts:
        scores = np.zeros(last - first, np.float32)
        for d, number in enumerate(row.q[head]):
            scores = fma(number, keys[first:last, d], scores)
        scores = scores * np.float32(row.scale)
        top = scores.max()
        weights, out = exp(scores - top), np.zeros(values.shape[1], np.float32)
        for weight, value in zip(weights, values[first:last], strict=True):
            out = fma(weight, value, out)
        some = tree_sum(weights)
        if best is None:
            best, total, weighted = top, some, out
        else:
            larger = max(best, top)
            old, new = exp(best - larger), exp(top - larger)
            total, weighted, best = fma(some, new, total * old), fma(out, new, weighted * old), larger
    return weighted / total


def test_the_softmax_walk_ends_where_softmax_does(scope):
    row = next(row for row in scope.attended if row.position > 256)
    walk = SoftmaxWalk(row, head=4, at=0)
    keys, _ = row.dense()
    scores = row.scale * keys[:, 1].astype(float) @ row.q[4].astype(float)
    assert walk.tiles[-1].total == pytest.approx(np.exp(scores - scores.max()).sum())
    assert sum(tile.share for tile in walk.tiles) == pytest.approx(1)
    assert [tile.page for tile in walk.tiles] == list(row.table)
    assert "nothing to rescale" in walk.body()
    walk.go("last")
    assert walk.at == len(walk.tiles) - 1


def test_attention_of_ones_own_takes_the_kernels_place(smollm2_path):
    seen = []

    def attend(q, keys, values, scale, rows):
        seen.append((q.shape, keys.shape, rows))
        return values[-1].repeat(3, axis=0)

    with Stepwise(str(smollm2_path), instead=attend, **ROOM) as engine:
        engine.generate("x", "Hi.", max_tokens=1)
    assert {shape for shape, _, _ in seen} == {(9, 64)}
    assert max(keys[0] for _, keys, _ in seen) == max(rows for _, _, rows in seen)


def test_what_is_not_there_is_refused(floor, scope):
    with pytest.raises(ConfigError, match="no step to look at"):
        PoolWalk([])
    with pytest.raises(ConfigError, match="no step"):
        PoolWalk(floor.frames, at=len(floor.frames))
    with pytest.raises(ConfigError, match="head"):
        SoftmaxWalk(scope.attended[0], head=9)
    with pytest.raises(ConfigError, match="ascending"):
        Stepwise(buckets=(4, 2))
    floor.submit("again", "Hi.", max_tokens=1)
    with pytest.raises(ConfigError, match="still running"):
        floor.submit("again", "Hi.", max_tokens=1)
    floor.run()

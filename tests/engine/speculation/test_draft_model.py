"""A second model as the drafter: it changes no token, keeps its cursor right, gives its blocks back, and fits its target or is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.loader import LoadedDraft
from power_lab.engine.memory import RESERVE
from power_lab.engine.request import SamplingParams
from power_lab.engine.scheduler import Limits
from power_lab.engine.speculation.drafters import DraftAsk
from power_lab.engine.speculation.drafters import model as modelled
from power_lab.engine.speculation.drafters.binding import check_reach, check_vocabulary
from power_lab.engine.speculation.drafters.model import ModelDrafter
from power_lab.engine.tokenizer import Tokenizer
from power_lab.engine.trace import RunRecord
from power_lab.errors import ConfigError
from power_lab.kernels.ops import Ops
from power_lab.kernels.table import select
from tests import tiny, tiny_gguf
from tests.engine.test_exactness import SAMPLING, prompt_of
from tests.engine.tokenizer.toys import byte_level
from tests.lagged import Lagged
from tests.pairs import all_pairs

TARGET = tiny.Shape()
OTHER = tiny.Shape(layers=1, seed=9)
CONTEXT = 512


def engine(ops: Ops, target: tiny.Shape = TARGET, draft: tiny.Shape = OTHER, **settings: Any) -> Engine:
    """A tiny engine with a draft model, that the caller steps."""
    loaded = tiny.loaded(target, ops)
    other = tiny.loaded(draft, ops)
    nbytes = sum(other.facts.quantisation.values())
    loaded = replace(loaded, draft=LoadedDraft(other.model, "other", other.facts.sha256, nbytes))
    config = EngineConfig(**{"kv_tokens": 2048, "step_tokens": 256, **settings})
    return Engine(config, loaded=loaded, threaded=False)


def drafter_of(engine: Engine) -> ModelDrafter:
    assert engine._draft is not None
    return engine._draft


def lone(
    ops: Ops, shape: tiny.Shape = OTHER, pages: int = 40, step_tokens: int = 64, max_batch: int = 4
) -> ModelDrafter:
    """A drafter without an engine."""
    limits = Limits(step_tokens=step_tokens, sampled_rows=64, max_batch=max_batch, queue=8)
    made = ModelDrafter(tiny.loaded(shape, ops).model, limits, CONTEXT, clock=lambda: 0.0, graph_bytes=1 << 20)
    made.make_pool(pages)
    return made


def plain(ops: Ops, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[tuple[int, ...]]:
    """What each request says alone, without speculation."""
    outputs = []
    for prompt, params in asked:
        outputs.append(
            tiny.engine(TARGET, ops).submit(prompt, structs.replace(params, speculate="off")).result().tokens
        )
    return outputs


def drafted(record: RunRecord) -> list[int]:
    return [len(r.drafted) for r in record.rounds]


# --- what it drafts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "logit_bias": {3: 2.0}}],
    ids=str,
)
def test_a_draft_model_that_is_the_target_fills_every_window_and_is_never_wrong(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], late: bool, sampling: dict[str, Any]
) -> None:
    """Also where tokens are drawn by chance: both draw with the same noise."""
    ops = behind(numba_ops(2)) if late else numba_ops(2)
    params = SamplingParams(
        max_tokens=60, seed=3, speculate="draft-model", width=5, controller="fixed", ignore_eos=True, **sampling
    )
    record = engine(ops, draft=TARGET).submit(prompt_of(1, 100), params).result()
    first, *rounds = record.rounds
    assert (first.drafted, first.note) == ((), ""), "the prompt's own round asks for nothing"
    left = 60 - len(first.emitted)
    for r in rounds:
        assert len(r.drafted) == min(5, left - 1) == r.accepted
        left -= len(r.emitted)
    assert len(rounds) == 10 and record.tokens == plain(numba_ops(2), [(prompt_of(1, 100), params)])[0]


def test_drawing_with_the_targets_noise_is_right_more_often_than_guessing_the_likeliest(
    numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target rounded to four bits as its draft, at temperature 0.8."""

    def accepted() -> float:
        lab, right, all = engine(numba_ops(2), draft=tiny.Shape(stored="mixed")), 0, 0
        for seed in range(3):
            params = SamplingParams(
                max_tokens=60, temperature=0.8, seed=seed, speculate="draft-model", width=3, controller="fixed"
            )
            record = lab.submit(prompt_of(seed, 60), params).result()
            right += sum(r.accepted for r in record.rounds)
            all += sum(drafted(record))
        assert 0 < right < all
        return right / all

    coupled = accepted()
    controls = modelled._controls
    monkeypatch.setattr(modelled, "_controls", lambda ask: controls(replace(ask, params=None)))
    assert coupled > 3 * accepted()


def greedy(ops: Ops, shape: tiny.Shape, tokens: list[int], width: int) -> list[tuple[int, float]]:
    """What a model says next and how sure it is, decoded plainly by an engine of its own."""
    params = SamplingParams(max_tokens=width, ignore_eos=True, logprobs=0)
    record = tiny.engine(shape, ops).submit(tokens, params).result()
    return [(r.emitted[0], float(np.exp(r.logprobs[0].value))) for r in record.rounds]


@pytest.mark.parametrize("late", [False, True])
def test_after_rejections_it_drafts_as_one_that_has_read_everything_anew(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], late: bool
) -> None:
    ops = behind(numba_ops(2)) if late else numba_ops(2)
    rng = random.Random(5)
    kept = lone(ops, step_tokens=256)
    known = {id: prompt_of(id, 20 + 30 * id) for id in (1, 2)}
    for id, tokens in known.items():
        kept.begin(id, tokens, "")
    for turn in range(12):
        asks = [DraftAsk(id, tokens, rng.randint(1, 7)) for id, tokens in known.items() if turn % 3 or id == 1]
        for ask, draft in zip(asks, kept.propose(asks), strict=True):
            tokens = known[ask.request_id]
            want = greedy(numba_ops(2), OTHER, tokens, ask.width)
            assert draft.tokens == tuple(token for token, _ in want)
            np.testing.assert_allclose(draft.confidence, [p for _, p in want], rtol=1e-6)
            fresh = lone(ops, step_tokens=256)
            fresh.begin(9, tokens, "")
            assert fresh.propose([DraftAsk(9, tokens, ask.width)]) == [draft]
            accepted = rng.randint(0, ask.width)
            emitted = [*draft.tokens[:accepted], rng.randrange(256)]
            tokens += emitted
            kept.commit(ask.request_id, emitted)
        kept.check()
    for id in known:
        kept.end(id)
    kept.check()
    assert kept.pool.used == 0


def test_only_what_is_new_is_computed(numba_ops: Callable[[int], Ops]) -> None:
    """The cursor goes back to the last accepted draft, no further; a window that was right leaves two tokens to compute."""
    kept, tokens, plans = lone(numba_ops(2)), prompt_of(3, 50), []
    launch = kept.runner.launch
    kept.runner.launch = lambda plan, requests: (plans.append(plan), launch(plan, requests))[1]  # type: ignore[method-assign]
    kept.begin(1, tokens, "")
    for accepted, missing in ((0, 50), (3, 1), (4, 1), (1, 2), (0, 1)):
        plans.clear()
        (draft,) = kept.propose([DraftAsk(1, tokens, 4)])
        assert [plan.rows for plan in plans] == [missing, 1, 1, 1]
        wrong = (draft.tokens[accepted] + 1) % 256 if accepted < 4 else 7
        tokens += [*draft.tokens[:accepted], wrong]
    plans.clear()
    tokens += [1, 2, 3]  # said without it
    kept.propose([DraftAsk(1, tokens, 2)])
    assert [plan.rows for plan in plans] == [4, 1]
    plans.clear()
    kept.propose([DraftAsk(1, tokens, 2)])  # a step that was given up is proposed for again
    assert [plan.rows for plan in plans] == [1, 1]


def test_a_long_prompt_is_caught_up_with_in_parts_while_others_draft(numba_ops: Callable[[int], Ops]) -> None:
    kept = lone(numba_ops(2), step_tokens=64)
    long, short = prompt_of(1, 200), prompt_of(2, 10)
    kept.begin(1, long, "")
    kept.begin(2, short, "")
    asks = [DraftAsk(1, long, 3), DraftAsk(2, short, 4)]
    notes = []
    for _ in range(3):
        behind, draft = kept.propose(asks)
        assert behind.tokens == () and len(draft.tokens) == 4
        notes.append(behind.note)
    assert notes == [f"the draft model has read {count} of 200 tokens" for count in (54, 117, 180)]
    behind, _ = kept.propose(asks)
    assert behind.tokens == tuple(token for token, _ in greedy(numba_ops(2), OTHER, long, 3))


def test_a_round_tells_why_the_draft_model_had_none(numba_ops: Callable[[int], Ops]) -> None:
    params = SamplingParams(max_tokens=20, speculate="draft-model", width=4, controller="fixed", ignore_eos=True)
    lab = engine(numba_ops(2), step_tokens=32, max_batch=2)
    record = lab.submit(prompt_of(1, 80), params).result()
    notes = [r.note for r in record.rounds if not r.drafted]
    assert [note for note in notes if "draft model" in note] == [
        f"the draft model has read {count} of {known} tokens" for count, known in ((32, 81), (64, 82))
    ]


def test_widths_of_one_batch_differ(numba_ops: Callable[[int], Ops]) -> None:
    kept = lone(numba_ops(2))
    asks = [DraftAsk(id, prompt_of(id, 12), width) for id, width in ((1, 2), (2, 7), (3, 1), (4, 7))]
    for ask in asks:
        kept.begin(ask.request_id, ask.tokens, "")
    for ask, draft in zip(asks, kept.propose(asks), strict=True):
        want = greedy(numba_ops(2), OTHER, list(ask.tokens), ask.width)
        assert draft.tokens == tuple(token for token, _ in want)
        assert draft.confidence == pytest.approx([p for _, p in want])


def test_a_model_whose_logits_are_not_finite_drafts_nothing_and_says_so(numba_ops: Callable[[int], Ops]) -> None:
    kept = lone(numba_ops(2))
    kept.begin(1, [1, 2], "")
    kept.runner.model.weights.final_norm.fill(np.nan)
    (draft,) = kept.propose([DraftAsk(1, [1, 2], 3)])
    assert (draft.tokens, draft.note) == ((), modelled.SILENT)


# --- its pool --------------------------------------------------------------------------------------------------------------------


def test_who_asks_least_recently_loses_his_blocks_and_reads_again(numba_ops: Callable[[int], Ops]) -> None:
    kept = lone(numba_ops(2), pages=1 + 4, step_tokens=256)  # two requests of two blocks
    prompts = {id: prompt_of(id, 60) for id in (1, 2, 3)}
    want = {id: tuple(token for token, _ in greedy(numba_ops(2), OTHER, prompt, 8)) for id, prompt in prompts.items()}
    for id, prompt in prompts.items():
        kept.begin(id, prompt, "")

    def ask(*ids: int) -> list[int]:
        answers = kept.propose([DraftAsk(id, prompts[id], 8) for id in ids])
        kept.check()
        for id, answer in zip(ids, answers, strict=True):
            assert answer.tokens == want[id] or (answer.tokens, answer.note) == ((), modelled.SHORT)
        return [len(answer.tokens) for answer in answers]

    assert ask(1, 2) == [8, 8]
    assert ask(2) == [8]
    assert ask(3) == [8] and not kept._caches[1].blocks and kept._caches[2].blocks
    assert ask(1) == [8] and not kept._caches[2].blocks
    assert ask(3, 2, 1) == [0, 8, 8], "of those who ask together the youngest goes without"
    kept.end(2)
    assert ask(3, 1) == [8, 8]
    kept.end(1), kept.end(3)
    assert kept.pool.used == 0


def test_a_request_longer_than_the_pool_takes_nothing_from_others(numba_ops: Callable[[int], Ops]) -> None:
    kept = lone(numba_ops(2), pages=1 + 3, step_tokens=256)
    kept.begin(1, [1] * 10, "")
    kept.begin(2, [2] * 190, "")
    assert kept.propose([DraftAsk(1, [1] * 10, 3)])[0].tokens
    assert kept.propose([DraftAsk(2, [2] * 190, 4)])[0].note == modelled.SHORT
    assert kept._caches[1].blocks and not kept._caches[2].blocks


@pytest.mark.parametrize("late", [False, True])
def test_a_launch_that_fails_costs_drafts_and_leaves_the_cursor_right(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], late: bool
) -> None:
    lab = engine(behind(numba_ops(2)) if late else numba_ops(2), draft=TARGET)
    kept, launch, calls = drafter_of(lab), drafter_of(lab).runner.launch, 0

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 7 == 3:
            raise RuntimeError("boom")
        return launch(*args)

    kept.runner.launch = sometimes  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=60, speculate="draft-model", width=4, controller="fixed", ignore_eos=True)
    record = lab.submit(prompt_of(1, 30), params).result()
    assert record.tokens == plain(numba_ops(2), [(prompt_of(1, 30), params)])[0]
    assert any(r.note == "draft-model failed: RuntimeError: boom" for r in record.rounds)
    assert all(r.accepted == len(r.drafted) for r in record.rounds) and sum(drafted(record)) > 10
    kept.check()
    assert kept.pool.used == 0


# --- no token changes ------------------------------------------------------------------------------------------------------------

AXES: dict[str, list[Any]] = {
    "draft": [OTHER, TARGET, tiny.Shape(stored="mixed"), tiny.Shape(kind="gemma3", seed=4)],
    "neighbours": [0, 2, 5],
    "width": [1, 4, 15],
    "controller": ["fixed", "adaptive"],
    "sampling": ["greedy", "temperature", "chain"],
    "preempt": ["never", "forced"],
    "pool": [4096, 384],
    "step_tokens": [24, 256],
    "device": ["waited for", "behind"],
}


def name_of(case: dict[str, Any]) -> str:
    return "-".join(f"{v.kind} {v.stored} {v.seed}" if isinstance(v, tiny.Shape) else str(v) for v in case.values())


@pytest.mark.parametrize("case", all_pairs(AXES), ids=name_of)
def test_requests_that_come_and_go_say_what_they_say_without(
    case: dict[str, Any], numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops]
) -> None:
    rng = random.Random(repr(case))
    ops = numba_ops(2) if case["device"] == "waited for" else behind(numba_ops(2))
    lab = engine(ops, draft=case["draft"], step_tokens=case["step_tokens"], kv_tokens=case["pool"], context=384)
    asked = [
        (
            prompt_of(rng.randrange(4), rng.randrange(1, 130)),
            SamplingParams(
                max_tokens=rng.randrange(5, 60),
                speculate=rng.choice(["draft-model", "draft-model", "ngram"]) if at else "draft-model",
                width=case["width"],
                controller=case["controller"],
                ignore_eos=True,
                **SAMPLING[case["sampling"]],
            ),
        )
        for at in range(case["neighbours"] + 1)
    ]
    want = plain(numba_ops(2), asked)
    tickets = []
    for prompt, params in asked:
        tickets.append(lab.submit(prompt, params))
        for _ in range(rng.randrange(8)):
            lab.step()
    gone = lab.submit(prompt_of(7, 90), SamplingParams(max_tokens=200, speculate="draft-model", ignore_eos=True))
    for step in range(2000):
        if case["preempt"] == "forced" and step % 9 == 5 and lab._scheduler.running and not lab._stepper._flights:
            lab._scheduler.preempt(rng.choice(lab._scheduler.running))
        if step == 11:
            gone.cancel()
        if not lab.step():
            break
        lab.check()
        drafter_of(lab).check()
    assert [ticket.result().tokens for ticket in tickets] == want
    assert drafter_of(lab).pool.used == 0 and not drafter_of(lab)._caches and lab.status().used_blocks == 0


@pytest.mark.parametrize("late", [False, True])
def test_scratch_that_grows_for_the_draft_model_breaks_no_captured_graph(
    behind: Callable[[Ops], Ops], numba_ops: Callable[[int], Ops], late: bool
) -> None:
    """On a table of its own, whose scratch is as small as the target needs when its steps are captured."""
    table = select("cpu", "exact", 2, tiny.cache_dir())
    lab = engine(behind(table) if late else table, draft=tiny.Shape.wide("F32", heads=8))
    asked = [(prompt_of(at, 90), SamplingParams(max_tokens=30, seed=at, temperature=0.8)) for at in range(3)]
    want = plain(numba_ops(2), asked)
    assert [lab.submit(*ask).result().tokens for ask in asked] == want
    held = table.nbytes
    for _ in range(2):
        speculating = [
            (prompt, structs.replace(params, speculate="draft-model", width=6, controller="fixed"))
            for prompt, params in asked
        ]
        tickets = [lab.submit(*ask) for ask in (*speculating, *asked)]
        assert [ticket.result().tokens for ticket in tickets] == [*want, *want]
        assert table.nbytes > held
    table.close()


# --- memory and binding ----------------------------------------------------------------------------------------------------------


def test_the_memory_plan_counts_it(numba_ops: Callable[[int], Ops]) -> None:
    ops = numba_ops(2)
    alone, both = tiny.engine(TARGET, ops), engine(ops)
    kept, without, with_ = drafter_of(both), alone.memory(), both.memory()
    other = tiny.loaded(OTHER, ops)
    assert with_.weights - without.weights == sum(other.facts.quantisation.values()) > 0
    assert with_.pool - without.pool == with_.pages * other.model.page_bytes
    assert with_.pages == without.pages == kept.pool.total and with_.page_bytes * with_.pages == with_.pool
    assert with_.workspace - without.workspace == kept.runner.own_nbytes > kept.runner.workspace.nbytes
    assert "draft model's" in with_.reason and "draft" not in without.reason
    said = {decision.key: decision for decision in both.explain()}
    assert said["draft"].value == "other" and "draft-model" in said["speculation"].value
    assert {d.key: d.value for d in alone.explain()}["draft"] == "none"
    both.close()
    assert both.memory() == with_ or both.memory().total == with_.total
    assert kept.runner.caches == ()


def test_where_memory_is_finite_both_pools_fit_it(numba_ops: Callable[[int], Ops]) -> None:
    class Finite(Lagged):
        def free_bytes(self) -> int:
            return 8 << 20

    lab = engine(Finite(numba_ops(2)), device="cuda", kv_tokens=0, graph_mb=2, max_batch=64)
    plan, kept = lab.memory(), drafter_of(lab)
    pages = [tiny.loaded(shape, numba_ops(2)).model.page_bytes for shape in (TARGET, OTHER)]
    assert plan.page_bytes == sum(pages) and kept.pool.total == plan.pages
    room = (8 << 20) * (1 - RESERVE) - (2 << 20)
    assert 0 <= room - plan.pool < plan.page_bytes, "all that fits, and no more"
    assert lab._runner.graphs._budget + kept.runner.graphs._budget == 2 << 20
    params = SamplingParams(max_tokens=30, speculate="draft-model", width=3, controller="fixed")
    assert lab.submit([1, 2, 3], params).result().tokens == plain(numba_ops(2), [([1, 2, 3], params)])[0]


def test_to_ask_for_it_without_one_is_refused_at_submit(numba_ops: Callable[[int], Ops]) -> None:
    lab = tiny.engine(TARGET, numba_ops(2))
    with pytest.raises(ConfigError, match=r"speculate: .*needs a draft model.*draft="):
        lab.submit([1, 2], SamplingParams(speculate="draft-model"))
    assert not lab.step() and lab.status().requests == 0


def tokenizer(tokens: list[str] | None = None, types: list[int] | None = None) -> Tokenizer:
    tokens = tokens or tiny.byte_tokens()
    kinds = np.array(types or [1] * 256 + [3] * (len(tokens) - 256), np.int32)
    return byte_level(tokens, kinds, bos_id=256, add_bos=False, end_ids=[257])


def test_the_first_difference_of_vocabularies_is_named() -> None:
    check_vocabulary(tokenizer(), tokenizer())
    swapped = tiny.byte_tokens()
    swapped[65], swapped[66] = swapped[66], swapped[65]
    renamed = [*tiny.byte_tokens()[:256], "<s>", "<end>"]
    for other, words in (
        (tokenizer([*tiny.byte_tokens(), "<pad>"]), "draft: its vocabulary has 259 tokens, the target's 258"),
        (tokenizer(swapped), "draft: token 65 is b'B' in its vocabulary and b'A' in the target's"),
        (tokenizer(renamed), "draft: token 257 is b'<end>' in its vocabulary"),
        (tokenizer(types=[1] * 256 + [3, 4]), "draft: token 257 (b'</s>') is text in its vocabulary and special"),
    ):
        with pytest.raises(ConfigError) as refused:
            check_vocabulary(other, tokenizer())
        assert str(refused.value).startswith(words) and "family" in refused.value.remedy


def test_a_draft_model_that_reaches_less_far_is_refused() -> None:
    check_reach("tiny", 258, 512, 258, 512)
    with pytest.raises(ConfigError, match=r"draft: tiny reaches 512 positions, but .* 1,024. Set context=512"):
        check_reach("tiny", 258, 512, 258, 1024)
    with pytest.raises(ConfigError, match="draft: tiny draws among 300 ids, the target among 258"):
        check_reach("tiny", 300, 512, 258, 512)


# --- from files ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """Fresh folders with compiled kernels in them."""
    return Paths(Paths.default().cache, tmp_path / "run", tmp_path / "state")


def test_files_end_to_end(tmp_path: Path, paths: Paths) -> None:
    big, small, text = (tmp_path / f"{name}.gguf" for name in ("big", "small", "text"))
    tokens = [*tiny.byte_tokens()[:255], "!!"]
    tiny_gguf.write(big, tiny.Shape(kind="llama file", seed=2), tokens=tokens)
    tiny_gguf.write(small, tiny.Shape(kind="llama file", layers=1, seed=3), tokens=tokens)
    tiny_gguf.write(text, tiny.Shape(kind="llama file", layers=1, seed=3), tokens=["zero", *tokens[1:]])
    config = EngineConfig(model=str(big), draft=str(small), device="cpu", kv_tokens=1024)
    asked = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.7, "seed": 1}
    lab = Engine(config, paths=paths, threaded=False)
    try:
        off = lab.generate(prompt_of(2, 70), SamplingParams(**asked))
        on = lab.generate(
            prompt_of(2, 70), SamplingParams(**asked, speculate="draft-model", width=4, controller="fixed")
        )
        assert on.tokens == off.tokens and sum(drafted(on)) > 40
        (said,) = (decision for decision in lab.explain() if decision.key == "draft")
        assert (said.value, said.owner) == ("small", "model") and "has the target's vocabulary" in said.reason
    finally:
        lab.close()
    for draft, words in (
        (str(text), "draft: token 0 is b'zero' in its vocabulary and"),
        (str(tmp_path / "missing.gguf"), "draft: .*neither a known model nor a file"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(EngineConfig(model=str(big), draft=draft, device="cpu"), paths=paths, threaded=False)


def test_its_file_is_found_as_the_models_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative file means the client's folder; a link and the file behind it are one engine; a name stays a name."""
    from power_lab.engine.host.client import _located
    from power_lab.engine.host.lease import key_of, resolved

    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.gguf").write_bytes(b"")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "small.gguf")
    config = EngineConfig(model="smollm2", draft="small.gguf")
    assert (_located(config).model, _located(config).draft) == ("smollm2", str(tmp_path / "small.gguf"))
    linked = _located(EngineConfig(model="smollm2", draft="link.gguf"))
    assert key_of(resolved(linked)) == key_of(resolved(_located(config))) != key_of(resolved(EngineConfig()))
    assert _located(EngineConfig()).draft == resolved(EngineConfig()).draft == "auto"

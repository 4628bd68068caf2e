"""A draft vocabulary that the user limits: a drafter says what one for these tokens alone would, and no output changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.intake import encode
from power_lab.engine.loader import load
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.neural.ranking import ranking
from power_lab.engine.speculation.metrics import Metrics
from power_lab.engine.trace import RunRecord
from power_lab.errors import ConfigError
from power_lab.kernels.ops import Ops
from tests import drafters, tiny
from tests import native as checkpoints
from tests.engine.speculation.plain import NEAR
from tests.engine.test_exactness import prompt_of
from tests.native import FORMS

TARGET = tiny.Shape()
MARKOV = drafters.BLOCK | {"markov_rank": 8}
FILTERED = drafters.BLOCK | drafters.FILTERS
WIDE = drafters.EAGLE | {"width": 64}

CASES: dict[str, tuple[str, list[str], Mapping[str, Any], Callable[..., drafters.Tensors]]] = {
    "mtp": ("mtp", ["mtp"], drafters.MTP, drafters.mtp),
    "eagle": ("eagle", ["eagle"], drafters.EAGLE, drafters.eagle),
    "eagle, the target's head": ("eagle", ["eagle"], WIDE, drafters.eagle),
    "dflash": ("dflash", ["dflash"], drafters.BLOCK, drafters.dflash),
    "dspark": ("dflash", ["dspark", "dflash"], MARKOV, drafters.dflash),
    "dflash2": ("dflash2", ["dflash2"], FILTERED, drafters.dflash),
}
"""name -> kind, what it serves, config, maker of tensors."""


def run(loaded: Any, name: str, **options: Any) -> RunRecord:
    given = {"max_tokens": 14, "width": 5, "controller": "fixed", "ignore_eos": True, "seed": 3, **options}
    return drafters.engine(loaded).submit(prompt_of(1, 50), SamplingParams(speculate=name, **given)).result()


def cut(tensors: drafters.Tensors, wanted: np.ndarray, said: int) -> drafters.Tensors:
    """A drafter that was made for these of its `said` tokens (0: all): what has a row for each of them has fewer."""
    able = tensors["draft_ids"] if said else np.arange(258)
    kept = [at for at, token in enumerate(able) if token in wanted]
    less = {
        name: value[kept] if name in ("head.weight", "markov_w2.weight") else value for name, value in tensors.items()
    }
    return less | {"draft_ids": able[kept].astype(np.int32)}


def same(loaded: Any, made: Any, name: str, vocabulary: set[int], **options: Any) -> None:
    """That both draft the same, only what is in the vocabulary, and say what the target says."""
    record, want = run(loaded, name, **options), run(made, name, **options)
    drafted = [one.drafted for one in record.rounds]
    assert drafted == [one.drafted for one in want.rounds] and any(drafted)
    assert {token for tokens in drafted for token in tokens} <= vocabulary
    alone = {key: value for key, value in options.items() if key in ("temperature", "seed")}
    assert record.tokens == want.tokens == run(loaded, "off", **alone).tokens


@settings(max_examples=20)
@given(
    name=st.sampled_from(sorted(CASES)),
    said=st.sampled_from([0, 150]),
    count=st.integers(64, 100),
    order=st.none() | st.permutations(range(258)),
    temperature=st.sampled_from([0.0, 0.9]),
)
def test_a_drafter_says_what_one_for_these_tokens_would(
    numba_ops: Callable[[int], Ops], name: str, said: int, count: int, order: list[int] | None, temperature: float
) -> None:
    kind, serves, config, make = CASES[name]
    tensors, plain = make(TARGET, config, said=said), tiny.loaded(TARGET, numba_ops(2))
    able = set(tensors["draft_ids"].tolist()) if said else set(range(258))
    wanted = [token for token in (sorted(able) if order is None else order) if token in able][:count]
    limit = {"vocabulary": count, "ranking": None if order is None else np.array(order, np.int32)}
    loaded = drafters.equipped(plain, TARGET, kind, serves, config, tensors, **limit)
    made = drafters.equipped(plain, TARGET, kind, serves, config, cut(tensors, np.array(wanted), said))
    assert loaded.trained is not None and made.trained is not None and loaded.trained.nbytes == made.trained.nbytes
    same(loaded, made, serves[0], set(wanted), temperature=temperature)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["mimo", "gguf qwen2"])
def test_a_checkpoints_own_layers_are_limited_too(
    name: str, own: bool, numba_ops: Callable[[int], Ops], tmp_path: Path
) -> None:
    form, ops = FORMS[name], numba_ops(2)
    if own and form.layout == "mimo":
        form = FORMS["folder"]
    shape = tiny.Shape(kind=form.kind)
    made = dict(checkpoints.tensors(shape))
    if own:
        head = np.random.default_rng(3).standard_normal((258, shape.width)).astype("f4")
        made[f"blk.{shape.layers}.nextn.shared_head_head.weight"] = head
    path = checkpoints.write(tmp_path, form, shape, made)
    published = checkpoints.Published(form, shape, made)
    odd = np.arange(257, 0, -2, dtype=np.int32)
    for count, order, said in ((258, None, range(258)), (90, None, range(90)), (80, odd, odd[:80]), (0, odd, odd)):
        loaded = checkpoints.loaded(path, shape, ops, count, order)
        record, said = run(loaded, "mtp"), set(said)
        drafted = {token for one in record.rounds for token in one.drafted}
        assert drafted and drafted <= said and record.tokens == run(loaded, "off").tokens
        known, allowed = [*record.prompt_tokens, *record.tokens], torch.tensor(sorted(said))
        for one in [one for one in record.rounds if one.drafted][:4]:
            logits = published.draft(known[: one.start], 1, SamplingParams(seed=0)).logits[0]
            assert logits[allowed].max() - logits[one.drafted[0]] < NEAR


def test_metrics_tell_what_it_could_have_said(numba_ops: Callable[[int], Ops]) -> None:
    kind, serves, config, make = CASES["mtp"]
    plain = tiny.loaded(TARGET, numba_ops(2))
    loaded = drafters.equipped(plain, TARGET, kind, serves, config, make(TARGET, config), vocabulary=100)
    record = run(loaded, "mtp")
    metrics = Metrics.of([record])
    weighed = [token for one in record.rounds if one.reachable >= 0 for token in one.emitted]
    assert metrics.weighed == len(weighed) >= 10
    assert metrics.coverage == sum(token < 100 for token in weighed) / len(weighed)


# --- where it cannot be -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "most"), [(0, 258), (90, 90)])
def test_more_than_a_drafter_can_say_is_refused(numba_ops: Callable[[int], Ops], said: int, most: int) -> None:
    kind, serves, config, make = CASES["mtp"]
    plain, tensors = tiny.loaded(TARGET, numba_ops(2)), make(TARGET, config, said=said)
    drafters.equipped(plain, TARGET, kind, serves, config, tensors, vocabulary=most)
    with pytest.raises(ConfigError, match=f"can say {most} tokens, not {most + 1}") as refused:
        drafters.equipped(plain, TARGET, kind, serves, config, tensors, vocabulary=most + 1)
    assert refused.value.key == "draft_vocabulary"


def test_a_ranking_that_names_too_little_is_refused(numba_ops: Callable[[int], Ops]) -> None:
    kind, serves, config, make = CASES["mtp"]
    plain, tensors = tiny.loaded(TARGET, numba_ops(2)), make(TARGET, config)
    few = np.arange(63, dtype=np.int32)
    with pytest.raises(ConfigError, match="names 63 tokens") as refused:
        drafters.equipped(plain, TARGET, kind, serves, config, tensors, ranking=few)
    assert refused.value.key == "draft_ranking"
    with pytest.raises(ConfigError, match="63 tokens of the ranking, not 64"):
        drafters.equipped(plain, TARGET, kind, serves, config, tensors, vocabulary=64, ranking=few)


@pytest.mark.parametrize("text", ["1 2 -3", "1 2 300", "1 2 3.5", "1 2 1234567890123", "\u00b2"])
def test_a_ranking_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "ids.txt").write_text(text, encoding="utf-8")
    for name in (path, tmp_path / "nowhere.txt"):
        with pytest.raises(ConfigError) as refused:
            ranking(str(name), 258)
        assert refused.value.key == "draft_ranking"


def test_a_ranking_is_read_as_it_is_written(tmp_path: Path) -> None:
    (path := tmp_path / "ids.txt").write_text("7\n3 9\n3\t250\n")
    found = ranking(str(path), 258)
    assert found is not None and found.tolist() == [7, 3, 9, 250] and found.dtype == np.int32
    assert ranking("", 258) is None


@pytest.mark.parametrize("count", [-1, 1, 63, 1 << 25])
def test_an_absurd_number_is_refused(count: int) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(draft_vocabulary=count)
    assert refused.value.key == "draft_vocabulary"


@pytest.mark.parametrize("draft", ["", "model", "auto"])
def test_nothing_that_it_could_limit_is_told(draft: str, tmp_path: Path) -> None:
    shape = tiny.Shape(kind="qwen2 file")
    path = checkpoints.write(tmp_path, FORMS["gguf qwen2"], shape, tiny.tensors(shape), 0)
    named = str(path) if draft == "model" else draft
    config = EngineConfig(model=str(path), draft=named, draft_vocabulary=100, device="cpu", context=64, kv_tokens=64)
    told = {"": "none is asked for", "model": "a draft model says all", "auto": "none comes with this model"}[draft]
    with pytest.raises(ConfigError, match=f"no trained drafter is loaded: {told}") as refused:
        load(config, Paths.default(), lambda *_: None)
    assert refused.value.key == "draft_vocabulary"


def test_smollm2s_drafter_is_limited_by_its_settings(smollm2_path: Path, tmp_path: Path) -> None:
    (listed := tmp_path / "ids.txt").write_text(" ".join(map(str, range(30_000))))
    settings = {"draft_vocabulary": 2000, "draft_ranking": str(listed)}
    config = EngineConfig(device="cpu", threads=2, kv_tokens=1024, max_batch=1, **settings)  # type: ignore[arg-type]
    loaded = load(config, Paths.default(), lambda *_: None)
    engine = Engine(config, loaded=loaded, threaded=False)
    try:
        prompt = encode(loaded.tokenizer, "List five facts about rivers, one a line.")
        given = {"max_tokens": 24, "seed": 0, "controller": "fixed", "width": 5}
        record = engine.submit(prompt, SamplingParams(speculate="mtp", **given)).result()  # type: ignore[arg-type]
        subset = engine._companion.drafter("mtp").subset  # type: ignore[union-attr]
        assert len(subset) == 2000 and sum(one.accepted for one in record.rounds) >= 3
        assert all(token in subset for one in record.rounds for token in one.drafted)
        plain = engine.submit(prompt, SamplingParams(max_tokens=24, seed=0)).result()
        assert record.tokens == plain.tokens
        row = next(row for row in engine.explain() if row.key == "draft_vocabulary")
        assert (row.value, row.reason) == ("2000", "as asked")
    finally:
        engine.close()

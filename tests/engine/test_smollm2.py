"""A small slice of `bench/exactness.py` on real weights: speculation, batches, follow-up turns, contexts past 512 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.prompts import prompts
from power_lab.engine import intake
from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams

COUNT = 48
PICKED = (0, 61, 85, 91, 95)  # a question, a quote, code, a foreign text, and one that is longer than 512 tokens


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine(EngineConfig(model=str(smollm2_path), max_batch=8), threaded=False)
    yield engine
    engine.close()


def params(index: int, drafter: str) -> SamplingParams:
    sampling = {"temperature": 0.8, "seed": index} if index % 2 else {}
    return SamplingParams(max_tokens=COUNT, ignore_eos=True, speculate=drafter, width=(3, 8, 12)[index % 3], **sampling)  # type: ignore[arg-type]


def test_real_outputs_do_not_depend_on_speculation_batch_or_cache(engine: Engine) -> None:
    texts = [intake.encode(engine._loaded.tokenizer, prompts()[i][1]) for i in PICKED]
    assert max(map(len, texts)) > 512
    alone = []
    for index, text in enumerate(texts):
        engine.drop_prefixes()
        alone.append(engine.submit(text, params(index, "off")).result().tokens)
    accepted = 0
    for drafter in ("off", "lookup", "ngram"):
        engine.drop_prefixes()
        records = [t.result() for t in [engine.submit(text, params(i, drafter)) for i, text in enumerate(texts)]]
        assert [r.tokens for r in records] == alone, f"{drafter} in a batch"
        accepted += sum(r.accepted for record in records for r in record.rounds)
    assert accepted > 0
    turns = [
        engine.continuation(text, answer, "And in other words?") for text, answer in zip(texts, alone, strict=True)
    ]
    warm = [engine.submit(turn, params(i, "ngram")).result() for i, turn in enumerate(turns)]
    for index, turn in enumerate(turns):
        engine.drop_prefixes()
        cold = engine.submit(turn, params(index, "off")).result()
        assert warm[index].cached >= (len(texts[index]) + COUNT - 1) // 64 * 64 and cold.cached == 0
        assert warm[index].tokens == cold.tokens, f"turn {index}"
    engine.check()

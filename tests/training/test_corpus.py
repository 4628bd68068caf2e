"""The array file of collected text, its batches and counts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from power_lab.errors import ConfigError
from power_lab.kernels.table import select
from power_lab.training.collect import TEMPERATURE, collect
from power_lab.training.corpus import Corpus, frequent
from tests import tiny
from tests.training.conftest import SHAPE


def test_it_comes_back_from_its_file(corpus: Corpus, tmp_path: Path) -> None:
    corpus.save(tmp_path / "a.npz")
    again = Corpus.load(tmp_path / "a.npz")
    for name in ("tokens", "ends", "prompts", "seeds", "temperatures"):
        assert np.array_equal(getattr(again, name), getattr(corpus, name))
    assert again.facts == corpus.facts
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 no archive", b"\x80\x04pickle"])
def test_what_is_no_corpus_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"corpus: .*a\.npz"):
        Corpus.load(path)


def test_batches_hold_every_text_once_an_epoch_and_repeat_with_the_seed(corpus: Corpus) -> None:
    chosen = corpus.usable(96)
    count = -(-len(chosen) // 8)
    epoch = list(islice(corpus.batches(chosen, 8, 96, 5), count))
    again = list(islice(corpus.batches(chosen, 8, 96, 5), count))
    seeds = np.concatenate([texts.seeds for texts in epoch])
    assert set(seeds) == set(corpus.seeds[chosen])
    assert len(set(corpus.seeds[chosen])) == len(chosen)
    assert {len(texts.lengths) for texts in epoch} == {8}
    assert len(next(corpus.batches(chosen, 500, 96, 5)).lengths) == len(chosen)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(epoch, again, strict=True))
    for texts in epoch:
        number = int(np.flatnonzero(corpus.seeds == texts.seeds[0])[0])
        start, length = corpus.starts[number], texts.lengths[0]
        assert np.array_equal(texts.tokens[0, :length], corpus.tokens[start : start + length])
        assert not texts.tokens[0, length:].any()


def test_held_out_texts_are_apart_and_of_both_kinds(corpus: Corpus) -> None:
    train, held = corpus.split(16, 96, 0)
    assert len(held) == 16
    assert not set(train) & set(held)
    assert (corpus.temperatures[held] > 0).sum() == 8


def test_counts_are_of_answers_alone(corpus: Corpus) -> None:
    chosen = np.array([0, 3, 90])
    want = np.zeros(258, np.int64)
    for number in chosen:
        for token in corpus.tokens[corpus.starts[number] + corpus.prompts[number] : corpus.ends[number]]:
            want[token] += 1
    assert np.array_equal(corpus.counts(chosen, 258), want)
    ids = frequent(want, 20)
    assert np.array_equal(ids, np.unique(ids))
    assert want[ids].sum() == np.sort(want)[-20:].sum()


def test_a_collection_is_continued_and_ends_as_if_made_at_once(corpus: Corpus, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, rng.integers(3, 20)).tolist() for _ in range(128)]
    out = tmp_path / "corpus.npz"
    keep = 40
    Corpus(
        corpus.tokens[: corpus.ends[keep - 1]], corpus.ends[:keep], corpus.prompts[:keep], corpus.seeds[:keep],
        corpus.temperatures[:keep], corpus.facts,
    ).save(out)  # fmt: skip
    engine = tiny.engine(SHAPE, select("cpu", "exact", 2, tiny.cache_dir()), max_batch=16, kv_tokens=8192)
    try:
        made = collect(engine, prompts, out, seed=3, tokens=48)
        assert np.array_equal(made.tokens, corpus.tokens)
        assert made.temperatures[1] == np.float32(TEMPERATURE)
        with pytest.raises(ConfigError, match=r"out: .* made with seed 3, not 4"):
            collect(engine, prompts, out, seed=4, tokens=48)
    finally:
        engine.close()

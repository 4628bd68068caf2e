"""DFlash, DSpark and DFlash2 draft what transformers' DFlash class and their descriptions say, with none of our code on that side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from power_lab.kernels.ops import Ops
from tests import drafters, tiny
from tests.engine.speculation.described import Described
from tests.engine.speculation.plain import check
from tests.engine.speculation.test_neural_dflash import CASES, Case, as_sure
from tests.engine.test_exactness import prompt_of

MORE: dict[str, dict[str, Any]] = {
    "narrow window, few tokens": {"window": 9, "qk_norm": True, "said": 90, "rope_theta": 500.0},
    "window, filtered": {"window": 20, **drafters.FILTERS},
    "window, markov": {"window": 33, "markov_rank": 6, "layers": 3},
    "filtered, three taps": {**drafters.FILTERS, "conv_taps": 3, "conv_group": 8, "causal": False},
}


@pytest.fixture(params=[*CASES, *MORE])
def case(request: pytest.FixtureRequest, numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch) -> Case:
    """A tiny model with a drafter, and beside it that drafter as others have it."""
    monkeypatch.setattr("tests.engine.speculation.test_neural_dflash.CASES", CASES | MORE)
    return made(request.param, numba_ops(2))


def made(name: str, ops: Ops, target: tiny.Shape | None = None) -> Case:
    case = Case(name, ops, target or tiny.Shape())
    plain = case.plain
    case.plain = Described(plain.shape, plain.config, tensors_of(case), case.name)  # type: ignore[assignment]
    return case


def tensors_of(case: Case) -> drafters.Tensors:
    said = len(case.plain.shared.ids)
    vocab = tiny.spec(case.plain.shape).vocab
    return drafters.dflash(case.plain.shape, case.config, said=0 if said == vocab else said)


def test_an_engine_drafts_what_others_do(case: Case) -> None:
    """Across a page's border and beyond the windows, in chunks of a prompt too."""
    lab = drafters.engine(case.loaded, step_tokens=24)
    for seed, length in ((1, 52), (2, 5)):
        record = lab.submit(prompt_of(seed, length), params := case.params()).result()
        assert check(record, case.plain, params) >= 15
        assert len({token for round_ in record.rounds for token in round_.drafted}) > 5, "it says one thing only"


def test_it_is_as_sure(case: Case) -> None:
    as_sure(case, 40)


@pytest.mark.parametrize("kind", ["gemma2", "olmo2"])
@pytest.mark.parametrize("name", ["causal", "filtered"])
def test_targets_that_scale_embeddings_and_cap_logits(numba_ops: Callable[[int], Ops], kind: str, name: str) -> None:
    case = made(name, numba_ops(2), tiny.Shape(kind=kind))
    record = drafters.engine(case.loaded).submit(prompt_of(3, 40), params := case.params()).result()
    assert check(record, case.plain, params) >= 12


def test_the_masks_of_a_bidirectional_block_are_transformers_own(numba_ops: Callable[[int], Ops]) -> None:
    """Of the blocks that transformers masks by itself, what is compared with is its answer untouched."""
    described = made("bidirectional", numba_ops(2)).plain
    assert isinstance(described, Described)
    tokens, asked, trunk = prompt_of(1, 30), [], described.trunk
    told = trunk.forward

    def forward(noise: torch.Tensor, features: torch.Tensor, **options: Any) -> Any:
        asked.append((noise, features))
        return told(noise, features, **options)

    trunk.forward = forward  # type: ignore[method-assign]
    rows = described._rows(tokens)
    with torch.no_grad():
        alone = told(*asked[0]).last_hidden_state[0].numpy()
    assert np.abs(rows - alone).max() < 1e-5

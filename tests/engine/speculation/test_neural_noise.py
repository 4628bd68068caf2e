"""The walk's own sampler draws what the reference's does from the same candidates."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.neural.noise import choose
from power_lab.kernels import reference

VOCAB = 90
candidates = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=16, unique=True)


@given(
    candidates,
    st.data(),
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.integers(0, 20),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    st.integers(0, 2**63 - 1),
    st.integers(0, 1 << 20),
)
def test_a_choice_is_the_samplers(
    ids: list[int],
    data: st.DataObject,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> None:
    scores = data.draw(st.lists(st.integers(-12, 12), min_size=len(ids), max_size=len(ids)))
    z = torch.full((VOCAB,), -torch.inf)
    z[ids] = torch.tensor(scores, dtype=torch.float32)
    want = reference.sample(z, temperature, top_k, top_p, min_p, seed, position)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    at = choose(np.asarray(scores, np.float32), np.asarray(ids), params, position)
    assert ids[at] == want

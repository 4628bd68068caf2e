"""Whether a rehearsal finds all variants that an engine launches; run by test_rehearsal in processes of its own, which do not interpret.

`rehearsed.py steps KIND STORED GRAPHS`: the variants that steps of any count of rows take beyond those of the rehearsal: must be none.
`rehearsed.py engine KIND STORED asked|run`: the names of the variants that are compiled for an engine, and of those that one launches.
`rehearsed.py keys KIND STORED DEVICE`: the names of all variants in Triton's cache, of arrays on `meta` or with memory, on `cpu`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import msgspec
import torch

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.rehearsal import DRAWS, _step, bounds, rehearse
from power_lab.engine.request import SamplingParams
from power_lab.engine.runner import Runner, Sizes
from power_lab.kernels.triton import chain, planes, variants
from power_lab.kernels.triton.variants import DryOps, Variants
from tests import tiny

SIZES = Sizes(700, 100, 70, tiny.CONTEXT)


def model(kind: str, stored: str) -> Decoder:
    planes.SMALL = 0  # so that tiny matrices stay as they are stored
    shape = tiny.Shape.wide(stored) if stored != "F32" else tiny.Shape(kind=kind, head_dim=16)
    return tiny.loaded(shape, DryOps()).model


def beyond(kind: str, stored: str, graphs: bool) -> list[Any]:
    """(rows, sampled) of steps that take other variants than the rehearsal's."""
    found, decoder = [], model(kind, stored)
    with Variants(90, None) as seen:
        rehearse(decoder, SIZES, graphs)
        assert len(seen) > 20
        runner = Runner(decoder, SIZES, clock=time.monotonic, graph_bytes=0, graphs=graphs)
        runner.make_pool(2)
        for rows in range(1, SIZES.rows + 1):
            for sampled in {0, 1, min(rows, 7), min(rows, SIZES.sampled)}:
                params = DRAWS[rows % 3]
                if sampled and rows % 5 == 0:
                    params = msgspec.structs.replace(params, logit_bias={0: 1.0}, logprobs=rows % 21)
                before = len(seen)
                runner.launch(*_step(rows, sampled, params, SIZES.context))
                if len(seen) > before:
                    found.append((rows, sampled))
    return found


def keys(kind: str, stored: str, device: str) -> list[str]:
    variants.META = torch.device(device)
    chain.options = lambda _: {"PDL": True, "launch_pdl": True}  # type: ignore[assignment]
    with Variants(90, None) as seen:
        rehearse(model(kind, stored), SIZES, True)
    return sorted(variant.key for variant in seen)


def engine(kind: str, stored: str, run: bool) -> list[str]:
    config = EngineConfig(step_tokens=128, max_batch=4, kv_tokens=2048)
    with Variants(90, None) as seen:
        if run:
            run_requests(config, kind, stored)
        else:
            rehearse(model(kind, stored), bounds(config, tiny.CONTEXT))
    return sorted(variant.key for variant in seen)


def run_requests(config: EngineConfig, kind: str, stored: str) -> None:
    """Alone and together: greedy, random, limited, penalised, with log-probabilities, with drafts."""
    loaded = tiny.loaded(tiny.Shape(kind=kind, head_dim=16), DryOps())
    loaded = replace(loaded, model=model(kind, stored))
    running = Engine(config, loaded=loaded, threaded=False)
    options: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}}, *({"logprobs": top} for top in (0, 1, 7)), {"speculate": "ngram", "width": 5, "controller": "fixed"},
    ]  # fmt: skip
    requests = [SamplingParams(max_tokens=12, ignore_eos=True, seed=1, **option) for option in options]
    for params in requests:
        for count in (1, 33, 300):
            running.generate([i % 250 for i in range(count)], params)
    tickets = [running.submit([i % 250 for i in range(10 + at)], params) for at, params in enumerate(requests)]
    assert all(len(ticket.result().tokens) == 12 for ticket in tickets)
    running.close()


if __name__ == "__main__":
    what, kind, stored, how = sys.argv[1:]
    if what == "steps":
        print(json.dumps(beyond(kind, stored, how == "graphs")))
    else:
        print(json.dumps(keys(kind, stored, how) if what == "keys" else engine(kind, stored, how == "run")))

"""Whether a rehearsal finds all variants that an engine launches; run by test_rehearsal in processes of its own, which do not interpret.

A line on stdin asks for one answer: a JSON list of four words.

`steps KIND STORED GRAPHS`: the variants that steps of any count of rows take beyond those of the rehearsal: must be none.
`engine KIND STORED asked|run`: the names of the variants that are compiled for an engine, and of those that one launches.
`drafts DRAFTER STORED GRAPHS`: the numbers of requests, and most drafts of each, whose drafts take others: must be none.
`drafting DRAFTER STORED asked|run`: as `engine`, with a drafter that rides along.
`keys KIND STORED DEVICE`: the names of all variants in Triton's cache, of arrays on `meta` or with memory, on `cpu`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import msgspec
import torch

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.rehearsal import DRAWS, _step, bounds, rehearse
from power_lab.engine.request import SamplingParams
from power_lab.engine.runner import Runner, Sizes
from power_lab.engine.speculation.drafters import DraftAsk
from power_lab.engine.speculation.drafters.neural import Room
from power_lab.kernels.triton import chain, planes, variants
from power_lab.kernels.triton.variants import DryOps, Variants
from tests import drafters, tiny

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


def drafts_beyond(drafter: str, graphs: bool) -> list[Any]:
    """(requests, most drafts of one) of launches that take other variants than the rehearsal's."""
    found, loaded, random = [], equipped(drafter), Random(0)
    with Variants(90, None) as seen:
        rehearse(loaded.model, SIZES, graphs, loaded.trained)
        assert loaded.trained is not None
        room = Room(
            rows=1024, batch=SIZES.spans, context=SIZES.context, clock=time.monotonic, graph_bytes=0, graphs=graphs
        )
        companion = loaded.trained.companion(room)
        runner = Runner(loaded.model, SIZES, clock=time.monotonic, graph_bytes=0, graphs=graphs, companion=companion)
        runner.make_pool(2)
        for name, count, most in product(companion.serves, range(1, 41), (1, 2, 5, 7, 12)):
            drafting = companion.drafter(name)
            widths = [random.randint(1, most) for _ in range(count)]
            before = len(seen)
            for id in range(count):
                drafting.begin(id, (0, 0), "")
            drafting.propose(
                [DraftAsk(id, (0, 0), width, DRAWS[count % 3], (1,), 1) for id, width in enumerate(widths)]
            )
            for id in range(count):
                drafting.end(id)
            if len(seen) > before:
                found.append((name, count, most))
    return found


def equipped(drafter: str) -> Loaded:
    return drafters.KINDS[drafter](tiny.Shape(), DryOps())


def keys(kind: str, stored: str, device: str) -> list[str]:
    variants.META = torch.device(device)
    chain.options = lambda _: {"PDL": True, "launch_pdl": True}  # type: ignore[assignment]
    with Variants(90, None) as seen:
        rehearse(model(kind, stored), SIZES, True)
    return sorted(variant.key for variant in seen)


def engine(kind: str, stored: str, run: bool, drafter: str = "") -> list[str]:
    config = EngineConfig(step_tokens=128, max_batch=4, kv_tokens=2048)
    if drafter:
        loaded = equipped(drafter)
    else:
        loaded = replace(tiny.loaded(tiny.Shape(kind=kind, head_dim=16), DryOps()), model=model(kind, stored))
    with Variants(90, None) as seen:
        if run:
            run_requests(config, loaded, drafter or "ngram")
        else:
            rehearse(loaded.model, bounds(config, tiny.CONTEXT), trained=loaded.trained)
    return sorted(variant.key for variant in seen)


def run_requests(config: EngineConfig, loaded: Loaded, drafter: Any) -> None:
    """Alone and together: greedy, random, limited, penalised, with log-probabilities, with drafts."""
    running = Engine(config, loaded=loaded, threaded=False)
    options: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}}, *({"logprobs": top} for top in (0, 1, 7)), *(
            {"speculate": drafter, "width": 5, "controller": "fixed", **how}
            for how in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"logit_bias": {3: 1.0}})
        ),
    ]  # fmt: skip
    requests = [SamplingParams(max_tokens=12, ignore_eos=True, seed=1, **option) for option in options]
    for params in requests:
        for count in (1, 33, 300):
            running.generate([i % 250 for i in range(count)], params)
    tickets = [running.submit([i % 250 for i in range(10 + at)], params) for at, params in enumerate(requests)]
    assert all(len(ticket.result().tokens) == 12 for ticket in tickets)
    running.close()


def answer(what: str, kind: str, stored: str, how: str) -> list[Any]:
    if what == "steps":
        return beyond(kind, stored, how == "graphs")
    if what == "drafts":
        return drafts_beyond(kind, how == "graphs")
    if what == "drafting":
        return engine("", stored, how == "run", kind)
    return keys(kind, stored, how) if what == "keys" else engine(kind, stored, how == "run")


def serve() -> None:
    """Answer each line of stdin, {"found": [...]} or {"fault": text}, in a process of its own: a fork, since importing takes longest."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                told = {"found": answer(*json.loads(line))}
            except Exception:  # noqa: BLE001 - told to whoever asked
                told = {"fault": traceback.format_exc()}
            print(json.dumps(told), flush=True)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            print(json.dumps({"fault": f"wait status {status}"}), flush=True)


if __name__ == "__main__":
    serve()

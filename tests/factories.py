"""Synthetic records that look like those of real runs, for tests and for looking at views without an engine."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from hypothesis import strategies as st

from power_lab.engine.trace import BlockState, EngineFacts, Logprob, Round, RunRecord, Step

TEXT = (
    "A speculative decoder drafts several tokens, and the target model checks them all in one pass. "
    "Where a draft and the target disagree, the target's own token is kept and the rest of the draft is dropped.\n\n"
    "```python\nfor position, token in enumerate(draft):\n    if token != target[position]:\n        break\n```\n\n"
    "So the output is the same as without a draft; only the number of passes changes. "
)


def engine_facts(**changes: Any) -> EngineFacts:
    facts = EngineFacts(
        model="smollm2",
        file="SmolLM2-135M-Instruct-Q8_0.gguf",
        sha256="5a" * 32,
        license="apache-2.0",
        architecture="llama",
        parameters=134_515_008,
        context=8192,
        vocab=49152,
        quantisation={"Q8_0": 142_868_480, "F32": 140_544},
        config={"model": "smollm2", "mode": "exact", "kv_tokens": 16384, "step_tokens": 512, "prefix_cache": True},
        mode="exact",
        device="cpu",
        threads=2,
        digest="c0ffee" * 8,
        revision="1b2c3d4e",
        versions={"numba": "0.68.1", "numpy": "2.4.6", "power-lab": "0.1.0", "python": "3.11.7"},
    )
    return msgspec.structs.replace(facts, **changes)


def words(text: str) -> list[str]:
    """Cut text into pieces as a byte-pair tokenizer would: words with their leading space, signs, single line ends."""
    pieces: list[str] = []
    for char in text:
        joins = pieces and (
            (char.isalnum() and pieces[-1][-1].isalnum() and len(pieces[-1]) < 9)
            or (char.isalnum() and pieces[-1] == " ")
            or (char == " " and set(pieces[-1]) == {" "} and len(pieces[-1]) < 4)
        )
        if joins:
            pieces[-1] += char
        else:
            pieces.append(char)
    return pieces


def run_record(
    tokens: int = 100,
    *,
    seed: int = 0,
    drafter: str = "lookup",
    width: int = 6,
    acceptance: float = 0.7,
    quiet: float = 0.15,
    prompt: int = 80,
    logprobs: bool = False,
    text: str = TEXT,
    finish: str = "length",
    **changes: Any,
) -> RunRecord:
    """A record of `tokens` output tokens. `acceptance` is the chance of one draft token, `quiet` that a round drafts nothing."""
    random = Random(seed)
    pieces = words(text * (1 + tokens // 60))
    while len(pieces) < tokens:
        pieces += pieces
    pieces = pieces[:tokens]
    ids = {piece: 300 + index for index, piece in enumerate(dict.fromkeys(pieces))}
    output = [ids[piece] for piece in pieces]
    rounds: list[Round] = []
    steps: list[Step] = []
    done, at = 0, 0.041
    while done < tokens:
        drafting = drafter != "off" and rounds and random.random() >= quiet
        size = random.randint(1, width) if drafting else 0
        room = tokens - done
        accepted = 0
        while accepted < min(size, room) and random.random() < acceptance:
            accepted += 1
        emitted = output[done : done + accepted + 1]
        accepted = min(accepted, len(emitted))
        wrong = [random.choice(output) for _ in range(size - accepted)]
        if wrong and len(emitted) > accepted and wrong[0] == emitted[accepted]:
            wrong[0] = 17 + random.randrange(200)  # a token of the prompt that was never emitted
        forward = random.uniform(0.017, 0.022)
        at += forward + 0.001
        step = 40 + 2 * len(rounds)
        rounds.append(
            Round(
                step=step,
                start=prompt + done,
                drafted=(*emitted[:accepted], *wrong),
                accepted=accepted,
                emitted=tuple(emitted),
                rows=size + 1 if rounds else prompt,
                requests=1,
                draft_s=random.uniform(0.00005, 0.0003) if drafting else 0.0,
                forward_s=forward,
                sample_s=random.uniform(0.0002, 0.0005),
                commit_s=random.uniform(0.00002, 0.00008),
                at=at,
                logprobs=tuple(_logprob(random, token) for token in emitted) if logprobs else (),
                note="no earlier match" if drafter != "off" and rounds and not drafting else "",
            )
        )
        steps.append(
            Step(
                step=step,
                prefill_rows=0 if len(rounds) > 1 else prompt,
                decode_rows=1,
                verify_rows=size,
                own_rows=size + 1,
                running=1,
                waiting=0,
                preempted=0,
                free_blocks=250,
                cached_blocks=2,
                used_blocks=3,
                wall_s=forward + 0.0008,
                at=at,
            )
        )
        done += len(emitted)
    record = RunRecord(
        id=7,
        prompt_tokens=tuple(range(17, 17 + prompt)),
        tokens=tuple(output),
        text="".join(pieces),
        pieces=tuple(pieces),
        finish=finish,
        finish_detail="",
        params={
            "max_tokens": tokens,
            "temperature": 0.8,
            "seed": 1234,
            "speculate": drafter,
            "width": width,
            "stop": (),
        },
        namespace="",
        cached=64 if prompt > 64 else 0,
        preemptions=0,
        queue_s=0.0004,
        prefill_s=0.041,
        decode_s=max(at - rounds[0].at, 0.0) if rounds else 0.0,
        rounds=tuple(rounds),
        steps=tuple(steps),
        engine=engine_facts(),
        draft_pieces={token: f"<draft {token}>" for entry in rounds for token in entry.rejected},
    )
    return msgspec.structs.replace(record, **changes)


def _logprob(random: Random, token: int) -> Logprob:
    value = -random.expovariate(1.5)
    return Logprob(value, (token, token + 1), (value, value - 1.5))


def block_states(total: int = 256) -> tuple[BlockState, ...]:
    """A pool with a shared system prompt, two live requests, two cached chains and the dummy block."""
    states = {0: ("dummy", 0, "", (), 0, -1, 0)}
    states |= {i: ("shared", 2, f"{i:02x}" * 32, (11, 12), 64, i - 1 if i > 1 else -1, i - 1) for i in range(1, 5)}
    states |= {i: ("used", 1, f"{i:02x}" * 32, (11,), 64, i - 1, i - 1) for i in range(5, 9)}
    states[9] = ("used", 1, "", (11,), 23, -1, 0)
    states |= {i: ("used", 1, f"{i:02x}" * 32, (12,), 64, 4 if i == 10 else i - 1, i - 6) for i in range(10, 12)}
    states[12] = ("used", 1, "", (12,), 7, -1, 0)
    states |= {i: ("cached", 0, f"{i:02x}" * 32, (), 64, 4 if i == 20 else i - 1, i - 16) for i in range(20, 26)}
    states |= {i: ("cached", 0, f"{i:02x}" * 32, (), 64, i - 1 if i > 40 else -1, i - 40) for i in range(40, 43)}
    empty = ("free", 0, "", (), 0, -1, 0)
    return tuple(
        BlockState(id=i, state=s, refs=refs, hash=digest, owners=owners, tokens=filled, parent=parent, depth=depth)
        for i in range(total)
        for s, refs, digest, owners, filled, parent, depth in [states.get(i, empty)]
    )


@st.composite
def run_records(draw: st.DrawFn) -> RunRecord:
    """Any record that an engine could make: every mix of rounds, early ends, hostile text, missing log-probabilities."""
    ids = st.integers(0, 2**31 - 1)
    times = st.floats(0, 1e6, allow_nan=False)
    position = draw(st.integers(1, 1000))
    prompt = tuple(draw(st.lists(ids, min_size=position, max_size=position)) if position < 20 else range(position))
    with_logprobs = draw(st.booleans())
    rounds: list[Round] = []
    step = draw(st.integers(0, 1 << 40))
    for index in range(last := draw(st.integers(0, 8))):
        drafted = draw(st.lists(ids, max_size=6))
        accepted = draw(st.integers(0, len(drafted)))
        # Only the last round may end without the target's own token, and then it emits at least one accepted one.
        early = index == last - 1 and accepted > 0 and draw(st.booleans())
        emitted = (*drafted[:accepted], *(() if early else (draw(ids),)))
        logprobs = (
            tuple(Logprob(draw(st.floats(max_value=0, allow_nan=False)), (), ()) for _ in emitted)
            if with_logprobs
            else ()
        )
        rounds.append(
            Round(
                step=(step := step + draw(st.integers(1, 3))),
                start=position,
                drafted=tuple(drafted),
                accepted=accepted,
                emitted=emitted,
                rows=draw(st.integers(1, 512)),
                requests=draw(st.integers(1, 16)),
                draft_s=draw(times),
                forward_s=draw(times),
                sample_s=draw(times),
                commit_s=draw(times),
                at=draw(times),
                logprobs=logprobs,
                note="" if drafted else draw(st.sampled_from(["", "no earlier match"])),
            )
        )
        position += len(emitted)
    tokens = tuple(token for entry in rounds for token in entry.emitted)
    pieces = draw(st.lists(st.text(max_size=8), min_size=len(tokens), max_size=len(tokens)))
    counts = st.integers(0, 1 << 20)
    names = ("prefill_rows", "decode_rows", "verify_rows", "own_rows", "running", "waiting", "preempted")
    names += ("free_blocks", "cached_blocks", "used_blocks")
    steps = tuple(
        Step(step=entry.step, wall_s=entry.forward_s, at=entry.at, **{name: draw(counts) for name in names})
        for entry in rounds
    )
    return RunRecord(
        id=draw(counts),
        prompt_tokens=prompt,
        tokens=tokens,
        text="".join(pieces),
        pieces=tuple(pieces),
        finish=draw(st.sampled_from(["stop", "length", "cancelled", "deadline", "error"])),
        finish_detail=draw(st.text(max_size=8)),
        params={
            "temperature": draw(st.floats(0, 100)),
            "seed": draw(st.none() | st.integers(0, 2**63 - 1)),
            "logit_bias": draw(st.dictionaries(ids, st.floats(-1000, 1000), max_size=2)),
            "stop": tuple(draw(st.lists(st.text(min_size=1, max_size=4), max_size=2))),
            "speculate": draw(st.sampled_from(["off", "lookup", "ngram"])),
            "width": draw(st.integers(1, 64)),
        },
        namespace="",
        cached=draw(st.integers(0, len(prompt))),
        preemptions=draw(st.integers(0, 3)),
        queue_s=draw(times),
        prefill_s=draw(times),
        decode_s=draw(times),
        rounds=tuple(rounds),
        steps=steps,
        engine=engine_facts(),
    )

from __future__ import annotations

import json
from copy import deepcopy

import msgspec
import pytest
from hypothesis import given, settings

from power_lab.engine.trace import DraftFacts
from power_lab.errors import EvidenceError
from power_lab.evidence.canonical import canonical, digest
from power_lab.evidence.page import MIME
from power_lab.evidence.receipt import Receipt, trace_digest
from tests.factories import engine_facts, run_record, run_records


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    else:
        yield path


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return value[:-1] + ("0" if value[-1] != "0" else "1") if isinstance(value, str) and value else "0"


def at(data, path):
    for key in path:
        data = data[key]
    return data


def test_same_run_gives_same_bytes():
    first, second = Receipt.of(run_record(seed=3)), Receipt.of(run_record(seed=3))
    assert first.json == second.json
    assert first.sha256 == second.sha256
    assert first == second
    assert len(first.json) < 4000


def test_the_claim_does_not_depend_on_timing_or_caching():
    record = run_record()
    again = msgspec.structs.replace(
        record, decode_s=9.0, prefill_s=1.0, cached=0, preemptions=2, id=99, namespace="other"
    )
    first, second = Receipt.of(record), Receipt.of(again)
    assert first.claim_sha256 == second.claim_sha256
    assert first.sha256 != second.sha256


def test_speculation_leaves_the_output_digest_alone():
    on, off = Receipt.of(run_record(drafter="lookup")), Receipt.of(run_record(drafter="off"))
    assert on.output_sha256 == off.output_sha256
    assert on.claim_sha256 != off.claim_sha256
    assert on.observed["trace_sha256"] != off.observed["trace_sha256"]


def test_another_output_prompt_model_or_seed_is_another_claim():
    record = run_record()
    others = [
        msgspec.structs.replace(record, tokens=(*record.tokens[:-1], 1)),
        msgspec.structs.replace(record, prompt_tokens=record.prompt_tokens[:-1]),
        msgspec.structs.replace(record, params={**record.params, "seed": 5}),
        msgspec.structs.replace(record, engine=engine_facts(digest="d00d")),
        msgspec.structs.replace(record, engine=engine_facts(sha256="00" * 32)),
    ]
    claims = {Receipt.of(item).claim_sha256 for item in [record, *others]}
    assert len(claims) == 6


def test_prompt_and_output_are_not_in_the_receipt():
    record = run_record(prompt_tokens=(123456, 654321), text="a secret answer", pieces=("secret",) * 100, rounds=())
    text = Receipt.of(record).json
    assert "secret" not in text
    assert "123456" not in text


def test_where_the_model_lies_is_private_and_not_claimed():
    config = engine_facts().config
    here, there = (
        Receipt.of(
            run_record(
                engine=engine_facts(model=f"{home}/m.gguf", file="m.gguf", config={**config, "model": f"{home}/m.gguf"})
            )
        )
        for home in ("/home/ada/secret", "/srv")
    )
    assert "secret" not in here.json
    assert here.claim_sha256 == there.claim_sha256


def test_what_an_engine_drafts_with_is_claimed_by_its_digest_wherever_it_lies():
    def receipt(home: str, **changes: str) -> Receipt:
        draft = DraftFacts(**{"kind": "model", "name": f"{home}/d.gguf", "sha256": "ab" * 32, **changes})
        config = {**engine_facts().config, "draft": f"{home}/d.gguf"}
        return Receipt.of(run_record(engine=engine_facts(draft=draft, config=config)))

    here = receipt("/home/ada/secret")
    assert "secret" not in here.json and Receipt.verify(here.json) == here
    assert here.claim["engine"]["draft"] == {"kind": "model", "name": "d.gguf", "sha256": "ab" * 32}
    assert here.claim_sha256 == receipt("/srv").claim_sha256
    others = [receipt("/srv", sha256="cd" * 32), receipt("/srv", kind="mtp"), Receipt.of(run_record())]
    assert len({one.claim_sha256 for one in (here, *others)}) == 4
    assert others[-1].claim["engine"]["draft"] == {}


def test_receipts_of_engines_that_named_no_drafter_are_still_verified():
    data = deepcopy(Receipt.of(run_record()).data)
    del data["claim"]["engine"]["draft"]
    data["digests"]["claim.engine"] = digest("receipt/1/claim.engine", canonical(data["claim"]["engine"]))
    data["digests"]["claim"] = digest("receipt/1/claim", canonical(data["claim"]))
    assert Receipt.verify(canonical(data)).claim == data["claim"]


def test_a_receipt_verifies_itself():
    receipt = Receipt.of(run_record())
    assert Receipt.verify(receipt.json) == receipt
    assert Receipt.verify(receipt.json.encode()).sha256 == receipt.sha256


def test_every_changed_leaf_is_named():
    data = Receipt.of(run_record()).data
    for path in leaves(data):
        broken = deepcopy(data)
        at(broken, path[:-1])[path[-1]] = changed(at(data, path))
        with pytest.raises(EvidenceError) as caught:
            Receipt.verify(canonical(broken))
        named = ".".join(path)
        # A digest that does not fit names the section whose digest it is.
        part = path[1] if path[0] == "digests" else named
        assert part.startswith(caught.value.field) or caught.value.field in (named, f"digests.{part}"), (
            named,
            caught.value.field,
        )


def test_every_removed_or_added_field_is_named():
    data = Receipt.of(run_record()).data
    for path in leaves(data):
        broken = deepcopy(data)
        del at(broken, path[:-1])[path[-1]]
        with pytest.raises(EvidenceError) as caught:
            Receipt.verify(canonical(broken))
        assert ".".join(path) in caught.value.field or ".".join(path).startswith(caught.value.field)
    for place in ((), ("claim",), ("claim", "model"), ("observed",), ("digests",)):
        broken = deepcopy(data)
        at(broken, place)["extra"] = 1
        with pytest.raises(EvidenceError, match="extra: unknown field"):
            Receipt.verify(canonical(broken))


@pytest.mark.parametrize("kind", [None, [], "text", 1, True, {"schema": 1}])
def test_things_that_are_no_receipts_are_refused(kind):
    with pytest.raises(EvidenceError):
        Receipt.verify(canonical(kind))


def test_other_types_in_known_fields_are_refused():
    data = Receipt.of(run_record()).data
    for path in leaves(data):
        for value in (None, True, [], {}, -1):
            broken = deepcopy(data)
            if at(data, path) == value:
                continue
            at(broken, path[:-1])[path[-1]] = value
            with pytest.raises(EvidenceError):
                Receipt.verify(canonical(broken))


def test_only_the_canonical_text_verifies():
    receipt = Receipt.of(run_record())
    for text in (
        json.dumps(receipt.data, indent=1),
        receipt.json + "\n",
        receipt.json.replace('"rounds":', '"rounds": '),
    ):
        with pytest.raises(EvidenceError, match="canonical"):
            Receipt.verify(text)
    assert Receipt(json.loads(json.dumps(receipt.data, indent=1))) == receipt  # values read from a notebook's output


def test_truncated_huge_and_foreign_text_is_refused():
    text = Receipt.of(run_record()).json
    for broken in (text[:-1], text[:200], "", "x", " " * (1 << 21), "\ud800"):
        with pytest.raises(EvidenceError) as caught:
            Receipt.verify(broken)
        assert caught.value.field == "json"


def test_another_schema_says_so():
    data = deepcopy(Receipt.of(run_record()).data)
    data["schema"] = "power-lab.receipt/9"
    with pytest.raises(EvidenceError, match=r"receipt/9.*with the version"):
        Receipt.verify(canonical(data))


def test_tokens_are_compared_with_the_claim():
    record = run_record()
    receipt = Receipt.of(record)
    receipt.check_tokens(prompt=record.prompt_tokens, output=record.tokens)
    with pytest.raises(EvidenceError) as caught:
        receipt.check_tokens(output=record.tokens[:-1])
    assert caught.value.field == "claim.output"
    with pytest.raises(EvidenceError) as caught:
        receipt.check_tokens(prompt=record.tokens)
    assert caught.value.field == "claim.prompt"


def test_a_page_shows_what_it_says_and_nothing_runs_there():
    record = run_record()
    engine = msgspec.structs.replace(record.engine, model="<script>alert(1)</script>", file="/home/me/<img src=x>.gguf")
    receipt = Receipt.of(msgspec.structs.replace(record, engine=engine))
    bundle = receipt._repr_mimebundle_()
    html = bundle["text/html"]
    assert bundle[MIME] is receipt.data
    assert html.startswith("<div data-power-lab-receipt>"), "the JupyterLab extension looks for it"
    for said in (receipt.claim_sha256, receipt.sha256, receipt.output_sha256, receipt.claim["model"]["sha256"]):
        assert said in html
    assert "&lt;img src=x&gt;.gguf" in html
    assert "<script" not in html
    assert "<img" not in html
    assert "/home/me" not in html


def test_a_seed_of_63_bits_is_exact():
    seed = (1 << 63) - 1
    receipt = Receipt.of(run_record(params={"seed": seed}))
    assert Receipt.verify(receipt.json).claim["sampling"]["seed"] == str(seed)


def test_the_trace_digest_sees_every_bit():
    record = run_record()
    nudged = msgspec.structs.replace(record.rounds[3], at=record.rounds[3].at + 1e-12)
    rounds = (*record.rounds[:3], nudged, *record.rounds[4:])
    assert trace_digest(record) != trace_digest(msgspec.structs.replace(record, rounds=rounds))
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record))
    assert trace_digest(record) == trace_digest(crossed)


@settings(max_examples=60, deadline=None)
@given(run_records())
def test_any_record_has_a_receipt_that_verifies(record):
    receipt = Receipt.of(record)
    assert Receipt.verify(receipt.json) == receipt
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record))
    assert Receipt.of(crossed).json == receipt.json

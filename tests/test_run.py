from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import weakref

import msgspec
import pytest

from power_lab import display
from power_lab.run import EVIDENCE_MIME, NO_MATH, Run, for_terminal
from tests.factories import engine_facts, run_record


def test_a_run_gives_what_the_record_holds():
    record = run_record(100)
    run = Run(record)
    assert run.text == record.text
    assert run.tokens == list(record.tokens)
    assert run.finish == "length"
    assert run.acceptance == sum(r.accepted for r in record.rounds) / sum(len(r.drafted) for r in record.rounds)
    assert run.tokens_per_pass == 100 / len(record.rounds)
    assert run.tokens_per_s == (100 - len(record.rounds[0].emitted)) / record.decode_s
    assert run.trace is run.trace
    assert run.receipt.output_sha256 == run.receipt.claim["output"]["sha256"]
    assert run.summary()["tokens"] == 100
    assert set(map(type, run.summary().values())) <= {str, int, float, type(None)}


def test_what_was_not_there_is_none():
    plain = Run(run_record(10, drafter="off"))
    assert plain.acceptance is None
    assert plain.tokens_per_pass == 1
    one = Run(run_record(1, drafter="off"))
    assert one.tokens_per_s is None
    nothing = Run(run_record(0, rounds=(), steps=(), finish="cancelled"))
    assert nothing.tokens_per_pass is None
    assert nothing.tokens_per_s is None
    assert "no text" in nothing.to_html()
    assert "cancelled" in repr(nothing)


def test_the_html_is_small_and_plain():
    html = Run(run_record(100)).to_html()
    assert len(html) < 6000
    for banned in ("<script", "<style", "<link", "src=", "href=", "url("):
        assert banned not in html
    for fact in (
        "100 tokens",
        "tok/s",
        "64 of 80 prompt tokens cached",
        "drafts accepted",
        "token limit",
        ">exact<",
        "seed 1234",
    ):
        assert fact in html


@pytest.mark.parametrize(
    "evil", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</div></div>&lt;", "$\\bad$<b>"]
)
def test_output_cannot_reach_the_page(evil):
    record = run_record(5, text=evil, finish="error", finish_detail=evil)
    record = msgspec.structs.replace(record, text=evil, engine=engine_facts(mode=evil))
    html = Run(record).to_html()
    for tag in ("<script", "<img", "<b>"):
        assert tag not in html
    assert html.count("<div") == html.count("</div>") == 3


def test_output_is_typeset_neither_at_the_end_nor_while_it_comes():
    for html in (Run(run_record(5)).to_html(), display._bundle("$5 and $6", "2 tokens")["text/html"]):
        assert f'class="{NO_MATH}"' in html


def test_the_bundle_has_text_html_and_evidence():
    run = Run(run_record(20))
    bundle = run._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", EVIDENCE_MIME}
    assert bundle[EVIDENCE_MIME] == run.receipt.data
    big = Run(msgspec.structs.replace(run.record, params={"stop": ("x" * 256,) * 16 + ("y" * 5000,)}))
    assert EVIDENCE_MIME not in big._repr_mimebundle_()


def test_a_run_survives_pickling_and_holds_nothing_alive():
    run = Run(run_record(20))
    bare = pickle.dumps(run)
    _ = run.trace, run.receipt
    run._shown_in = 5  # the cell of this kernel that shows it
    assert pickle.dumps(run) == bare
    assert pickle.loads(bare) == run
    assert run != Run(run_record(21))
    weak = weakref.ref(run)
    _ = run.trace, run.receipt, run.to_html()
    del run
    gc.collect()
    assert weak() is None


def test_fast_mode_does_not_promise():
    html = Run(run_record(5, engine=engine_facts(mode="fast"))).to_html()
    assert ">fast<" in html
    assert "may depend" in html


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, power_lab.run, power_lab.widgets.inspect;"
        "print([m for m in ('xarray','numpy','anywidget','ipywidgets','torch','pandas') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_model_output_cannot_drive_a_terminal():
    run = Run(run_record(4, text="a\x1b]0;owned\x07\x9b2Jb\n\tc"))
    shown = repr(run)
    assert not set(shown) & {chr(code) for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
    assert "\n\t" in for_terminal("b\n\tc")

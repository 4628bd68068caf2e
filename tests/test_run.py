from __future__ import annotations

import gc
import math
import pickle
import statistics
import subprocess
import sys
import weakref

import msgspec
import pytest

from power_lab import display
from power_lab.errors import ConfigError, ReplayRefused
from power_lab.run import EVIDENCE_MIME, NO_MATH, Run, for_terminal
from power_lab.what_if import sweep
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


def test_what_if_says_what_other_settings_would_have_done():
    run = Run(run_record(60, seed=3))
    plain = run.what_if(speculate="off")
    assert (plain.target_passes, plain.drafted, plain.wasted, plain.acceptance) == (60, 0, 0, None)
    assert (plain.tokens, plain.tokens_per_pass, plain.widths, plain.accepted_lengths) == (60, 1.0, {0: 60}, {})
    assert plain.draft_source == "no drafts"
    ones = [r.forward_s + r.sample_s + r.commit_s for r in run.record.rounds if r.rows == 1]
    assert plain.seconds == pytest.approx(59 * statistics.median(ones))
    assert plain.tokens_per_s == pytest.approx(1 / statistics.median(ones))
    wide = run.what_if(speculate="ngram", width=3)
    assert (wide.settings["speculate"], wide.settings["width"]) == ("ngram", 3)
    assert wide.drafted == wide.accepted + wide.wasted > 0
    assert sum(width * rounds for width, rounds in wide.widths.items()) == wide.drafted
    assert sum(length * rounds for length, rounds in wide.accepted_lengths.items()) == wide.accepted
    assert wide.draft_source == "measured in this replay"
    assert wide.tokens == 60 == sum(len(entry.emitted) for entry in wide.rounds)
    assert wide.dataset.drafted.sum() == wide.drafted
    assert run.what_if().settings["speculate"] == "lookup"
    fixed = {"speculate": "ngram", "controller": "fixed"}
    gated, free = (run.what_if(**fixed, width=3, gate=gate) for gate in (0.9, None))
    assert (gated.settings["gate"], free.settings["gate"]) == (0.9, 0.0)
    assert gated.drafted < free.drafted and gated.tokens == 60
    assert run.what_if_widths([3], **fixed, gate=0.9).drafted.item() == gated.drafted
    with pytest.raises(ConfigError, match=r"gate: 7.0 is outside"):
        run.what_if(gate=7)


def test_what_was_never_measured_has_a_reason_and_no_number():
    run = Run(run_record(60, seed=3, drafter="off"))
    wide = run.what_if(speculate="ngram", width=3)
    assert math.isnan(wide.seconds)
    assert math.isnan(wide.tokens_per_s)
    assert "No step of" in wide.reason
    assert wide.reason in repr(wide)
    assert wide.reason in wide._repr_html_()
    others = [Run(run_record(60, seed=seed, width=6)) for seed in range(4)]
    known = run.what_if(speculate="ngram", width=3, costs_from=others)
    assert known.reason == ""
    assert known.tokens_per_s > 0
    assert known.rounds == wide.rounds or known.draft_source == "measured in this replay"
    assert run.what_if(costs_from=[]).reason.startswith("No step of 1 rows")


def test_a_sweep_is_a_dataset_of_the_same_figures():
    run = Run(run_record(60, seed=3))
    widths = run.what_if_widths([1, 3], speculate="ngram", costs_from=[run])
    one = run.what_if(speculate="ngram", width=3)
    at = widths.sel(width=3)
    assert (at.rounds, at.drafted, at.accepted, at.wasted) == (len(one.rounds), one.drafted, one.accepted, one.wasted)
    assert at.tokens_per_pass == one.tokens_per_pass
    assert at.accepted_length.sum() == sum(one.accepted_lengths.values())
    both = sweep([run, Run(run_record(40))], speculate=["off", "ngram"], widths=[2])
    assert dict(both.sizes) == {"run": 2, "drafter": 2, "width": 1, "length": 3}
    assert both.drafted.units == "token"
    with pytest.raises(ConfigError, match="one of them is empty"):
        sweep([], widths=[1])


def test_a_replay_says_what_keeps_a_real_run_from_being_it():
    shared = [msgspec.structs.replace(entry, requests=2) for entry in run_record(20).rounds]
    record = run_record(20, rounds=tuple(shared), engine=engine_facts(mode="fast"))
    told = Run(record).what_if(speculate="off").caveats
    assert len(told) == 2
    assert "fast mode" in told[0]
    assert "shared its steps" in told[1]
    assert Run(run_record(20)).what_if(speculate="off").caveats == ()


def test_wrong_settings_and_records_are_refused_by_name():
    run = Run(run_record(20))
    with pytest.raises(ConfigError, match="width: 65"):
        run.what_if(width=65)
    with pytest.raises(ConfigError, match="speculate"):
        run.what_if(speculate="magic")
    with pytest.raises(ReplayRefused, match="params"):
        Run(run_record(20, params={"max_tokens": "many"})).what_if()
    with pytest.raises(ReplayRefused, match="cancelled"):
        Run(run_record(20, finish="cancelled")).what_if()

from __future__ import annotations

import gc
import re
import weakref

import msgspec
import pytest
from hypothesis import given, settings
from ipywidgets.widgets.widget import _instances

from power_lab.errors import ConfigError, EngineClosed, EvidenceError
from power_lab.run import Run
from power_lab.widgets.acceptance import Acceptance
from power_lab.widgets.blocks import Blocks
from power_lab.widgets.inspect import _OPEN, Inspect
from power_lab.widgets.palette import BLOCKS, TOKENS, legend
from power_lab.widgets.rounds_table import reasons, rounds_table
from power_lab.widgets.text import visible
from power_lab.widgets.view import View
from tests.factories import block_states, run_record, run_records


class Lab:
    def __init__(self, states=None):
        self.states = block_states() if states is None else states

    def blocks(self):
        if self.states == "gone":
            raise EngineClosed("The engine was closed.", "Load it again.")
        return self.states


@pytest.fixture
def inspect():
    views = Inspect(Lab())
    yield views
    views.close()


def contrast(first, second):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        low = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * low[0] + 0.7152 * low[1] + 0.0722 * low[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def rounds_of(html):
    """The body of the table of rounds, "" where there is none."""
    found = re.search(r'class="pl-rounds">.*?<tbody>(.*?)</tbody>', html, re.S)
    return found[1] if found else ""


@pytest.mark.parametrize("mark", [*TOKENS.values(), *BLOCKS.values()], ids=lambda mark: mark.name)
def test_colours_are_readable_on_both_themes(mark):
    assert contrast(mark.light, "#ffffff") >= 4.5
    assert contrast(mark.dark, "#111111") >= 4.5


@pytest.mark.parametrize("marks", [TOKENS, BLOCKS], ids=["tokens", "blocks"])
def test_no_two_kinds_differ_by_colour_alone(marks):
    looks = [(mark.glyph, mark.line, mark.tag) for mark in marks.values()]
    assert len(set(looks)) == len(looks)


def test_the_legend_names_what_occurs():
    text = legend(TOKENS, {"accepted": 1200, "bonus": 0})
    assert "accepted" in text
    assert "1,200" in text
    assert "bonus" not in text


def test_whitespace_shows_and_direction_characters_are_spelled_out():
    assert visible(" the\n\t") == "·the↵⇥"
    assert visible("") == "∅"
    assert visible("<b>&") == "&lt;b&gt;&amp;"
    assert visible("a\u202eb\x1b") == "a⟨202E⟩b⟨001B⟩"
    assert len(visible("-" * 500)) < 60


def test_acceptance_shows_each_token_by_kind(inspect):
    run = Run(run_record(100))
    html = inspect.acceptance(run).to_html()
    table = rounds_of(html)
    kinds = run.trace.kind.values.tolist()
    for kind in ("accepted", "correction", "bonus", "plain"):
        assert table.count(f"pl-t pl-{kind}") == kinds.count(kind)
    assert table.count("pl-t pl-rejected") == run.drafted - run.accepted
    assert f"{100 * run.acceptance:.0f}%" in html
    assert f"{run.tokens_per_pass:.2f}" in html
    assert "no earlier match" in html
    assert "&lt;draft" in html  # a draft that was never emitted has its text too
    assert f"Record of run {run.record.id}, which has finished ({run.finish}): it does not change any more." in html


def test_views_are_self_contained(inspect):
    for view in (inspect.acceptance(Run(run_record(60))), inspect.blocks()):
        html = re.sub(r'src="data:image/svg\+xml,[^"<>]*"', "", view.to_html())  # pictures are within the page
        for banned in ("<script", "<link", "src=", "href=", "url(", "@import", "http", "onclick"):
            assert banned not in html, banned
        assert re.findall(r"<(\w+)[^>]*>", html.split("</style>")[1])
        assert view.view_id not in html  # the same data gives the same bytes


def test_output_cannot_reach_the_page(inspect):
    evil = "<script>alert(1)</script>"
    record = run_record(30, text=evil + " x")
    record = msgspec.structs.replace(record, params={**record.params, "speculate": evil})
    rounds = tuple(msgspec.structs.replace(entry, note=evil) if entry.note else entry for entry in record.rounds)
    html = inspect.acceptance(Run(msgspec.structs.replace(record, rounds=rounds))).to_html()
    assert "<script" not in html
    off = Run(run_record(3, drafter="off", params={"speculate": evil}))
    assert "<script" not in inspect.acceptance(off).to_html()


def test_the_saved_output_is_html_that_finds_its_widget(inspect):
    view = inspect.acceptance(Run(run_record(20)))
    bundle = view._repr_mimebundle_(include=None, exclude=None)
    assert set(bundle) == {"text/plain", "text/html"}  # a widget mime type would win and then be "model not found"
    assert f'data-power-lab-view="{view.view_id}"' in bundle["text/html"]
    assert bundle["text/plain"].startswith("Acceptance ")
    view.close()
    assert "data-power-lab-view" not in view._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    ("drafter", "words"), [("off", "speculate=&quot;lookup&quot;"), ("lookup", "proposed nothing")]
)
def test_a_run_without_drafts_says_what_to_do(inspect, drafter, words):
    run = Run(run_record(5, drafter="off"))
    run = Run(msgspec.structs.replace(run.record, params={"speculate": drafter}))
    html = inspect.acceptance(run).to_html()
    assert words in html or words.replace("&quot;", '"') in html
    assert 'class="pl-rounds"' not in html
    assert "What other settings would have done" in html


def test_long_runs_are_bounded(inspect):
    run = Run(run_record(1600))
    html = inspect.acceptance(run, rows=50).to_html()
    assert rounds_of(html).count("<tr>") == 50
    assert "more rounds not drawn" in html
    assert len(inspect.acceptance(run).to_html()) < 250_000


def test_a_contradictory_record_is_refused(inspect):
    with pytest.raises(EvidenceError):
        inspect.acceptance(Run(run_record(10, pieces=())))


@settings(max_examples=30, deadline=None)
@given(run_records())
def test_any_record_can_be_shown(record):
    view = Acceptance(Run(record))
    assert rounds_of(view.to_html()).count("<tr>") <= len(record.rounds)
    assert view.summary()
    view.close()


def test_blocks_show_states_owners_and_chains(inspect):
    view = inspect.blocks()
    html = view.to_html()
    grid = html[html.index("pl-grid pl-scroll") : html.index("Block tables")]
    for name, amount in {"dummy": 1, "shared": 4, "used": 8, "cached": 9, "free": 234}.items():
        assert grid.count(f"pl-c pl-{name}") == amount
    assert "block 2: shared · requests 11, 12 · 64 tokens · hash 02020202 · 1 before it in the chain" in html
    assert ">19191919<" in html  # the last block of the longer cached chain
    assert view.summary() == "256 blocks: 8 in use, 4 shared, 9 cached, 234 free, 1 dummy"


def test_blocks_as_data(inspect):
    data = inspect.blocks().dataset
    assert data.sizes["block"] == 256
    assert data.state.values.tolist().count("shared") == 4
    assert data.owners.sel(block=2).values.tolist() == [11, 12]
    assert all(variable.attrs["units"] for variable in data.variables.values())


@pytest.mark.parametrize("total", [0, 1, 1024, 100_000])
def test_pools_of_any_size_are_bounded(total):
    view = Blocks(lambda: block_states(total))
    html = view.to_html()
    assert html.count("pl-c ") <= 1025
    assert len(html) < 150_000
    assert (f"{total - 43:,} free" in html) == (total > 1024)
    view.close()


def test_a_chain_that_names_itself_ends():
    state = block_states()[20]
    looped = (msgspec.structs.replace(state, id=0, parent=1), msgspec.structs.replace(state, id=1, parent=0))
    other = msgspec.structs.replace(state, id=2, parent=0)
    view = Blocks(lambda: (*looped, other))
    assert "Cached prefixes" in view.to_html()
    view.close()


def test_a_refresh_answers_with_the_pool_as_it_is(monkeypatch):
    lab = Lab()
    view = Blocks(lab.blocks)
    sent = []
    monkeypatch.setattr(view, "send", sent.append)
    lab.states = block_states(64)
    view._answer(view, {"kind": "refresh"}, [])
    assert sent[-1]["kind"] == "body"
    assert "63 blocks" in sent[-1]["html"]
    lab.states = "gone"
    view._answer(view, {"kind": "refresh"}, [])
    assert sent[-1] == {"kind": "gone", "message": "The engine was closed. Load it again."}
    assert len(view.states) == 64  # the last snapshot stays
    for junk in (None, 1, {}, {"kind": "else"}):
        view._answer(view, junk, [])
    assert len(sent) == 2
    view.close()


def test_old_views_close_and_nothing_stays_alive():
    before = set(_instances)
    inspect = Inspect(Lab())
    weak = [weakref.ref(inspect.blocks()) for _ in range(12)]
    gc.collect()
    assert sum(ref() is not None for ref in weak) == 4
    run = Run(run_record(10))
    for _ in range(40):
        inspect.acceptance(run)
    assert len(set(_instances) - before) == 2 * (16 + 4)  # each has a layout
    inspect.close()
    gc.collect()
    assert all(ref() is None for ref in weak)
    assert set(_instances) == before


def test_a_view_asks_the_engine_that_it_was_made_for():
    class Reloading:  # a lab: each look at `engine` may load one
        loaded = 0

        @property
        def engine(self):
            self.loaded += 1
            return Lab()

    lab = Reloading()
    inspect = Inspect(lab)
    view = inspect.blocks()
    view.refresh()
    view.refresh()
    assert lab.loaded == 1
    inspect.close()


def test_the_script_is_text_and_small():
    assert isinstance(View._esm, str)
    assert len(View._esm.encode()) < 20_000


def test_who_asks_what_there_is_is_told():
    told = repr(Inspect(Lab()))
    for name in _OPEN:
        assert f"lab.inspect.{name.lower()}(" in told.lower()
    assert "lab.inspect.close" not in told
    assert max(map(len, told.splitlines())) < 170


def test_why_a_width_changed_is_said_without_repeating_the_width():
    record = run_record(60)
    whys = ("8: fixed", "1: fixed", "8: fixed", "3: two drafts survive")
    widths = (8, 1, 8, 3)
    rounds = [
        msgspec.structs.replace(one, width=width, why=why)
        for one, width, why in zip(record.rounds, widths, whys, strict=False)
    ]
    html = reasons(msgspec.structs.replace(record, rounds=tuple(rounds)))
    assert "narrower: all that the drafter had (1 time)" in html
    assert "wider: all that the drafter had (1 time)" in html
    assert "narrower: two drafts survive (1 time)" in html


def test_rounds_of_a_hybrid_say_which_part_drafted_them():
    record = run_record(60, drafter="hybrid")
    names = ("copy", "mtp")
    rounds = tuple(
        msgspec.structs.replace(one, drafter=names[at % 2] if one.drafted else "")
        for at, one in enumerate(record.rounds)
    )
    record = msgspec.structs.replace(record, rounds=rounds)
    html, told = rounds_table(record, 150), reasons(record)
    for name in names:
        own = [one for one in rounds if one.drafter == name]
        assert html.count(f"by {name} accepted") == html.count(f"<small>{name}</small>") == len(own) > 1
        assert f"{name} ({len(own)} rounds)" in told
    assert Run(record).trace.drafted_by.values.tolist() == [one.drafter for one in rounds]
    plain = run_record(60, drafter="mtp")
    plain = msgspec.structs.replace(
        plain, rounds=tuple(msgspec.structs.replace(one, drafter="mtp" if one.drafted else "") for one in plain.rounds)
    )
    assert "by mtp accepted" in rounds_table(plain, 150)
    assert "<small>mtp</small>" not in rounds_table(plain, 150) and "Drafted by" not in reasons(plain)


def test_without_a_run_the_latest_one_is_looked_at():
    lab = Lab()
    inspect = Inspect(lab)
    for look in (inspect.acceptance, inspect.lens):
        with pytest.raises(ConfigError, match="none yet"):
            look()
    lab.last = Run(run_record(30))
    assert inspect.acceptance().run is lab.last
    inspect.close()

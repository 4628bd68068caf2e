"""The prefix inspector: the tree as stretches, evictions, and lookups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.errors import CapacityError
from power_lab.widgets.inspect import Inspect
from power_lab.widgets.lookup import lookup_html
from power_lab.widgets.prefix_tree import next_evictions, stretches
from power_lab.widgets.prefixes import Prefixes
from tests.widgets.answers import asked
from tests.widgets.reports import forked, lookup_report, node, prefix_tree


class Engine:
    def __init__(self, tree):
        self.tree = tree
        self.asked = []

    def prefixes(self):
        return self.tree

    def lookup(self, prompt, *, chat=None, cache_key="", cancelled=None):
        self.asked.append((prompt, chat, cache_key))
        if prompt == "long":
            raise CapacityError("The prompt is longer than the context.", "Shorten it.")
        return lookup_report()


@pytest.fixture
def engine():
    return Engine(forked())


@pytest.fixture
def inspect(engine):
    views = Inspect(engine)
    yield views
    views.close()


def test_stretches_follow_forks():
    lines = stretches(forked())
    assert [[one.block for one in line.nodes] for line in lines] == [[1, 2], [3, 4], [5], [6]]
    assert [line.lead for line in lines] == ["", "├ ", "└ ", ""]
    assert lines[1].alike == lines[2].alike == len("the same beginning, and then th")
    assert lines[0].tokens_saved == 384
    assert lines[0].eviction == -1
    assert lines[1].eviction == 1


@st.composite
def trees(draw):
    count = draw(st.integers(0, 20))
    parents = [draw(st.integers(-1, count)) for _ in range(count)]  # unknown ones and loops too
    refs = [draw(st.integers(0, 2)) for _ in range(count)]
    return prefix_tree(*(node(at, parents[at], depth=at, refs=refs[at]) for at in range(count)))


@settings(max_examples=60, deadline=None)
@given(trees())
def test_no_node_is_told_twice(tree):
    told = [one.block for line in stretches(tree) for one in line.nodes]
    assert len(told) == len(set(told))
    reachable = {
        one.hash
        for one in tree.nodes
        if one.parent not in {other.hash for other in tree.nodes} or one.parent == one.hash
    }
    grown = True
    while grown:
        more = {one.hash for one in tree.nodes if one.parent in reachable} - reachable
        reachable |= more
        grown = bool(more)
    assert len(told) == len(reachable)


def test_evictions_come_in_order():
    assert [one.block for one in next_evictions(forked().nodes, 3)] == [5, 3, 4]


@pytest.mark.parametrize(("free", "marked", "told"), [(0, 3, "next"), (7, 1, "1."), (8, 0, "1."), (500, 0, "1.")])
def test_what_goes_next_is_marked_only_where_free_blocks_do_not_go_first(engine, inspect, free, marked, told):
    engine.tree = prefix_tree(*forked().nodes[3:], free_blocks=free)
    html = inspect.prefixes().to_html()
    table = html[: html.index("Next evictions")]
    assert table.count(": evicted next") == marked
    assert ("evicted next</" in html or "evicted next <" in html) == bool(marked), "the legend"
    assert f"<td>{told}</td>" in table
    assert (f"evicted as number 1, after {free} free block" in html) == bool(free)


def test_blocks_are_as_long_as_the_engine_says(engine, inspect):
    engine.tree = prefix_tree(node(1, depth=2, tokens=tuple(range(16))), block_tokens=16)
    html = inspect.prefixes().to_html()
    assert "tokens 32 to 47" in html
    assert "blocks of 16 tokens" in html
    engine.tree = prefix_tree(block_tokens=16)
    assert "one for each 16 of its tokens" in inspect.prefixes().to_html()


def test_the_box_says_what_was_looked_up(inspect):
    view = inspect.prefixes("a prompt", chat=False, cache_key="x")
    assert view.box == {"prompt": "a prompt", "note": "", "cache_key": "x", "raw": True}
    view.lookup([1, 2, 3])
    assert view.box == {"prompt": "", "note": "3 token ids", "cache_key": "", "raw": False}, "ids are no text to edit"
    view.lookup([{"role": "user", "content": "Hello"}])
    assert view.box["note"] == "a conversation of 1 message"
    view.lookup("x" * (2 << 20))
    assert view.box["note"] == "a text too long for this box"


def test_the_tree_is_shown_and_safe(inspect):
    view = inspect.prefixes()
    html = view.to_html()
    assert "<script" not in html
    assert html.count("<tr>") == 1 + 4
    assert "64%" in html
    assert "after 7 free blocks are used up" in html
    assert "held by 1 request" in html
    assert view.summary() == "6 cached blocks in 5.9 KiB: 64% of 1,000 prompt tokens served, 1.50 s saved"


def test_another_kind_of_node_is_told_by_its_name(engine, inspect):
    engine.tree = prefix_tree(node(1, kind="checkpoint"), free_blocks=0)
    assert "checkpoint 1: evicted next" in inspect.prefixes().to_html()


def test_an_empty_cache_says_what_to_do(engine, inspect):
    engine.tree = prefix_tree()
    assert "No prefix is cached yet" in inspect.prefixes().to_html()
    assert inspect.prefixes().export("json")


def test_big_trees_are_bounded(engine, inspect):
    engine.tree = prefix_tree(
        *(node(at, at - 1 if at % 100 else -1, depth=at % 100) for at in range(16_384)), left_out=9
    )
    html = inspect.prefixes().to_html()
    assert "stretches and 9 blocks far from the roots not listed" in html
    assert len(html) < 900_000


def test_a_lookup_shows_where_and_why_it_stops(inspect):
    html = inspect.prefixes("a prompt", cache_key="x").to_html()
    assert "128 of 200 tokens would be served (64%), which saves 250.0 ms." in html
    assert "The next block differs at token 140." in html
    strip = html[html.index("pl-strip") :]
    assert strip.index("stops here") < strip.index("token 128: computed")
    assert strip.index("token 127: served") < strip.index("stops here")
    assert "pl-computed pl-differs" in strip


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 6), st.integers(0, 400))
def test_any_answer_can_be_shown(count, blocks, differs):
    served = min(blocks, count // 64) * 64
    html = lookup_html(
        lookup_report(count, served, differs_at=differs if served <= differs < min(count, served + 64) else None), 64
    )
    assert html.count("pl-t ") <= 12 + 80 + 64
    assert ("stops here" in html) == (served < count)


def test_pages_look_prompts_up(engine, inspect, monkeypatch):
    view = inspect.prefixes()
    sent = []
    monkeypatch.setattr(view, "send", sent.append)
    asked(view, {"kind": "lookup", "prompt": "Hello", "cache_key": "k", "chat": False})
    assert engine.asked == [("Hello", False, "k")]
    assert "would be served" in sent[-1]["html"]
    asked(view, {"kind": "lookup", "prompt": "long"})
    assert sent[-1] == {"kind": "looked", "html": "", "message": "The prompt is longer than the context. Shorten it."}
    for junk in (
        {"prompt": 1},
        {"prompt": "x" * (2 << 20)},
        {"prompt": "x", "cache_key": []},
        {"prompt": "x", "chat": "y"},
    ):
        asked(view, {"kind": "lookup", **junk})
        assert sent[-1]["html"] == ""
    assert len(engine.asked) == 2


def test_prefixes_as_data_and_as_files(inspect):
    view = inspect.prefixes()
    data = view.dataset
    assert data.sizes == {"node": 6, "token": 64}
    assert data.tokens_saved.values.sum() == 384
    assert all(variable.attrs["units"] for variable in data.variables.values())
    for kind in view.formats:
        assert view.export(kind)


def test_the_script_is_text_and_small():
    assert len(Prefixes._esm.encode()) < 20_000

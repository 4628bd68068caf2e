"""The KV pool's arithmetic: never more bytes than are free, what fits is granted, what does not is refused with numbers that help."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from power_lab.engine.memory import Room, Wish, plan_pool
from power_lab.engine.prefix import BLOCK_TOKENS
from power_lab.errors import CapacityError, ConfigError

GIB, MIB = 2**30, 2**20
H200 = Room(free=120 * GIB, workspace=GIB, graphs=512 * MIB, reserve=2 * GIB, page_bytes=9 * MIB)
OPEN = Wish(kv_tokens=0, context=0, model_context=40960, max_batch=64)

rooms = st.builds(
    Room,
    free=st.integers(0, 1 << 30),
    workspace=st.integers(0, 1 << 24),
    graphs=st.integers(0, 1 << 24),
    reserve=st.integers(0, 1 << 24) | st.floats(0, 0.999),
    page_bytes=st.integers(1, 1 << 26),
)
wishes = st.builds(
    Wish,
    kv_tokens=st.just(0) | st.integers(1, 300).map(lambda pages: pages * BLOCK_TOKENS),
    context=st.just(0) | st.integers(1, 20_000),
    model_context=st.integers(1, 20_000),
    max_batch=st.integers(1, 64),
)


def taken(room: Room, pages: int) -> float:
    reserve = room.reserve * room.free if room.reserve < 1 else room.reserve
    return pages * room.page_bytes + room.workspace + room.graphs + reserve


def needed_pages(wish: Wish) -> int:
    """The fewest that a wish can do with: what it asks for, or one page of tokens; and the dummy."""
    return max(wish.kv_tokens // BLOCK_TOKENS, -(-wish.context // BLOCK_TOKENS), 1) + 1


@given(rooms, wishes)
def test_what_fits_is_granted_and_nothing_else(room: Room, wish: Wish) -> None:
    assume(wish.context <= min(wish.model_context, wish.kv_tokens or wish.context))
    if taken(room, needed_pages(wish)) > room.free:
        with pytest.raises(CapacityError):
            plan_pool(room, wish)
        return
    if taken(room, needed_pages(wish)) > room.free - 2:
        return  # a share of the free bytes is rounded up
    plan = plan_pool(room, wish)
    assert taken(room, plan.pages) <= room.free
    assert (plan.nbytes, plan.kv_tokens) == (plan.pages * room.page_bytes, (plan.pages - 1) * BLOCK_TOKENS)
    assert 0 <= plan.spare <= room.free - taken(room, plan.pages) + 1
    assert plan.kv_tokens == (wish.kv_tokens or plan.kv_tokens) and plan.context == (wish.context or plan.context)
    assert 1 <= plan.context <= min(plan.kv_tokens, wish.model_context)
    if not wish.kv_tokens:
        assert plan.kv_tokens == wish.useful or plan.spare < room.page_bytes, "as much as is useful, or all"
        assert plan.kv_tokens <= wish.useful
    if not wish.context:
        assert plan.context in (wish.model_context, plan.kv_tokens)


@given(rooms, wishes)
def test_following_the_remedy_helps(room: Room, wish: Wish) -> None:
    try:
        plan_pool(room, wish)
    except (CapacityError, ConfigError) as error:
        number = re.search(r"(?:kv_tokens=|context=|at most |kv_tokens to )(\d+)", error.remedy)
        if number is None:
            assert "not one page" in str(error) and "graph_mb" in error.remedy
            return
        key = "kv_tokens" if "kv_tokens" in error.remedy else "context"
        assert str(error).startswith(("kv_tokens: ", "context: "))
        better = replace(wish, **{key: int(number[1])})
        assert better != wish
        try:
            plan_pool(room, better)
        except (CapacityError, ConfigError) as another:
            assert str(another) != str(error), "one obstacle less"


def test_the_errors_hold_all_the_numbers() -> None:
    numbers = (
        "120.00 GiB free after the weights, less 1.00 GiB workspace, 512.00 MiB graphs and 2.00 GiB reserve,"
        " leave 116.50 GiB; 64 tokens take 9.00 MiB"
    )
    with pytest.raises(CapacityError, match=re.escape(numbers)) as caught:
        plan_pool(H200, replace(OPEN, kv_tokens=64 * 20_000))
    assert str(caught.value).startswith("kv_tokens: a KV pool of 1,280,000 tokens and the dummy page needs 175.79 GiB:")
    assert caught.value.remedy == "Use kv_tokens=848256 or less; 0 takes what fits."
    assert plan_pool(H200, replace(OPEN, kv_tokens=848256)).spare < H200.page_bytes
    with pytest.raises(CapacityError, match=re.escape(numbers)) as caught:
        plan_pool(H200, replace(OPEN, context=900_000, model_context=1 << 20))
    assert str(caught.value).startswith("context: a request of 900,000 tokens")
    assert "context=848256" in caught.value.remedy
    with pytest.raises(CapacityError, match=r"not one page fits on the device: 1\.00 GiB free"):
        plan_pool(replace(H200, free=GIB), OPEN)


def test_reasons_are_plain_words() -> None:
    small = plan_pool(H200, replace(OPEN, max_batch=2))
    assert small.kv_tokens == 2 * 40960 and small.context == 40960
    assert small.kv_reason == "2 requests of 40,960 tokens, the most that can run at once"
    assert small.context_reason == "the model's own limit"
    full = plan_pool(H200, OPEN)
    assert full.kv_tokens == H200.tokens == 848256
    assert full.kv_reason.startswith("all that fits, of the 2,621,440 that a full batch could use: 120.00 GiB free")
    tight = plan_pool(replace(H200, free=4 * GIB), OPEN)
    assert tight.context == tight.kv_tokens == 3520
    assert tight.context_reason == "the KV pool (kv_tokens); the model itself reaches 40960"
    asked = plan_pool(H200, replace(OPEN, kv_tokens=1024, context=1000))
    assert (asked.pages, asked.context, asked.kv_reason, asked.context_reason) == (17, 1000, "as asked", "as asked")


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"context": 50_000}, "context: 50000 exceeds the model's 40960 positions. Use at most 40960."),
        ({"kv_tokens": 100}, "kv_tokens: 100 is not a multiple of 64. Use 128."),
        (
            {"kv_tokens": 128, "context": 129},
            "context: 129 tokens do not fit the KV pool of 128. Raise kv_tokens to 192.",
        ),
    ],
)
def test_wishes_that_exclude_each_other_are_refused_before_any_room_is_looked_at(
    wish: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan_pool(replace(H200, free=0), replace(OPEN, **wish))


def test_the_reserve_may_be_a_share() -> None:
    share = replace(H200, reserve=0.05)
    assert 6 * GIB <= share.reserved <= 6 * GIB + 1
    assert plan_pool(share, OPEN).kv_tokens < plan_pool(replace(H200, reserve=0), OPEN).kv_tokens


@pytest.mark.parametrize("wrong", [{"free": -1}, {"page_bytes": 0}, {"reserve": -0.1}])
def test_impossible_rooms_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="such room"):
        replace(H200, **wrong)

"""The contract with ipykernel's private names, and the parts of routing that need no kernel."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.errors import RequestCancelled
from power_lab.jupyter._leases import LEASE_CAP, LEASE_S, Leases
from power_lab.jupyter._routing import BaseComm, Kernel, SubshellManager, Subshells, missing
from power_lab.jupyter.cancel import Tokens

TARGET = "power_lab.engine"


def test_this_ipykernel_has_every_name_that_routing_uses():
    assert missing() == [], f"ipykernel {version('ipykernel')} has moved on: widgets would wait for running cells"


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Kernel, "shell_channel_thread_main"), (SubshellManager, "_create_subshell"), (BaseComm, "_reply_subshell_for")],
)
def test_a_name_that_is_gone_is_named(monkeypatch, owner: type, name: str):
    monkeypatch.delattr(owner, name)
    assert missing() == [f"{owner.__name__}.{name}"]


def test_leases_end_in_silence_and_live_by_messages():
    now = 0.0
    leases = Leases(lambda: now)
    leases.begin("a", TARGET)
    leases.begin("b", "jupyter.widget.control")
    now = LEASE_S[TARGET]
    assert leases.expired() == []
    now += 0.1
    assert leases.expired() == ["a"]
    assert not leases.touch("a")
    assert leases.touch("b")
    now += LEASE_S["jupyter.widget.control"]
    assert leases.expired() == []
    leases.end("b")
    assert len(leases) == 0


def test_leases_are_bounded():
    now = 0.0
    leases = Leases(lambda: now)
    for number in range(LEASE_CAP + 3):
        now += 1e-3
        leases.begin(str(number), TARGET)
    leases.touch("0")
    assert leases.expired() == ["1", "2", "3"]
    assert len(leases) == LEASE_CAP


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80), st.integers(1, 4))
def test_a_subshell_ends_with_its_last_holder(events: list[tuple[bool, int]], cap: int):
    """Against plain counting: never more than the cap, and none ends while a page has it."""
    subshells, there, holders, made = Subshells(cap), [], [], 0
    for opens, which in events:
        if opens:
            lent = subshells.lend(there, "service")
            assert (lent is None) == (len(there) < cap)
            if lent is None:
                lent, made = f"s{made}", made + 1
                there.append(lent)
            holders.append(lent)
        elif holders:
            left = holders.pop(which % len(holders))
            last = subshells.give_back(left)
            assert last == (left not in holders)
            if last:
                there.remove(left)
    assert len(there) <= cap
    assert set(there) == set(holders)


def test_tokens_cancel_by_name_and_all():
    tokens = Tokens()
    with tokens.work("slider") as old, tokens.work() as other:
        assert not old.cancelled
        with tokens.work("slider") as new:
            assert (old.cancelled, new.cancelled, other.cancelled, len(tokens)) == (True, False, False, 3)
            with pytest.raises(RequestCancelled):
                old.check()
            new.check()
            assert tokens.cancel_all() == 3
            assert new.wait(0)
    assert len(tokens) == 0

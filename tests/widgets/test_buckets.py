"""Better buckets: the verdict weighs steps that no bucket holds, and all sets on the page are placed by the same costs."""

from __future__ import annotations

import re

import pytest

from power_lab.engine.bucket_report import planned
from power_lab.engine.shapes import Coverage
from power_lab.engine.speculation.width.costs import DROPPED, MeasuredCosts
from power_lab.widgets.buckets import section, verdict
from tests.widgets.reports import shapes_report


def measured(**milliseconds: float) -> MeasuredCosts:
    """Costs of steps by rows, given as r8=1.5."""
    costs = MeasuredCosts()
    for name, cost in milliseconds.items():
        for _ in range(DROPPED + 1):
            costs.add_step(name, int(name[1:]), cost / 1000)
    return costs


@pytest.mark.parametrize(
    ("demand", "declared", "said"),
    [
        ({1: 400, 2: 41, 150: 3}, tuple(range(1, 65)), "The declared buckets fit 441 of 444 steps."),
        ({9: 2}, (4, 8), "The declared buckets hold none of the steps."),
    ],
)
def test_buckets_that_do_not_hold_every_step_are_not_said_to_fit(demand, declared, said):
    plan = planned(demand, Coverage(declared))
    told = verdict(plan, sum(demand.values()))
    assert f"<b>{said}</b>" in told
    assert "already fit" not in told
    missed = sum(steps for rows, steps in demand.items() if rows > declared[-1])
    assert f"{missed} steps had more rows than the largest declared bucket, {declared[-1]}:" in told
    assert "would hold all, with 0 padding rows instead of 0" in told
    assert f"do not hold {missed} of the steps" in plan.text


def test_better_buckets_tell_of_steps_that_the_declared_ones_miss():
    told = verdict(planned({3: 100, 20: 1}, Coverage((4, 16))), 101)
    assert "<b>2 buckets placed where the traffic is would save 100 padding rows and hold every step.</b>" in told
    assert "1 step had more rows than the largest declared bucket, 16:" in told


def test_measured_costs_decide_where_there_are_any():
    """3 rows take as long as 4: nothing is saved by what fewer padded rows would suggest."""
    demand, declared = {3: 100, 7: 1}, Coverage((4, 8))
    assert "would save" in verdict(planned(demand, declared), 101)
    same = verdict(planned(demand, declared, measured(r3=2, r4=2, r7=4, r8=4)), 101)
    assert "<b>The declared buckets already fit this traffic.</b>" in same
    slower = verdict(planned(demand, declared, measured(r3=1, r4=2, r7=4, r8=4)), 101)
    assert "<b>2 buckets placed where the traffic is would save 100.0 ms (49% of the steps' time" in slower


@pytest.mark.parametrize("costs", [None, measured(r1=1, r2=1, r3=1, r4=5, r5=5, r6=9)])
def test_the_better_set_is_the_tables_row_of_its_size(costs):
    """By padded rows it is one set, by time another: each page has one of them, and says by what its sets are placed."""
    demand = {1: 90, 2: 50, 3: 10, 4: 60, 5: 7, 6: 8}
    plan = planned(demand, Coverage((2, 6)), costs)
    assert plan.buckets == ((2, 6) if costs is None else (3, 6))
    html = section(shapes_report(demand=demand, planned=plan), plan)
    (row,) = re.findall(r"<tr><td>2 \(better\)</td>.*?</tr>", html)
    listed = ", ".join(map(str, plan.buckets))
    assert row.endswith(f'pl-wrap">{listed}</td></tr>')
    assert f'Better</th><td class="pl-left pl-wrap">{listed}</td>' in html
    assert ("fewest rows are padded" if costs is None else "least time") in html
    assert ("Time of the steps" in html) == (costs is not None)
    (now,) = re.findall(r"<tr><td>2 \(declared\)</td>.*?</tr>", html)
    assert f"<td>{plan.declared_padding_rows}</td>" in now and now.endswith("2, 6</td></tr>")

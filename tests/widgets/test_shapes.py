"""The inspector of graph shapes says what became of shapes, and whether other buckets would serve better."""

from __future__ import annotations

import pytest

from power_lab.engine.config import EngineConfig
from power_lab.engine.shapes import Coverage
from power_lab.run import Run
from power_lab.widgets.inspect import Inspect
from power_lab.widgets.shapes import Shapes, report_of
from tests.factories import run_record
from tests.widgets.reports import shape, shapes_report

EVIL = "<script>alert(1)</script>"


def shown(report):
    view = Shapes(lambda: report)
    html = view.to_html()
    view.close()
    return html


def test_shapes_with_their_waste_and_their_reasons():
    odd = shape(8, eager=4, why={EVIL: 4}, apart={"tall": 7}, held=False)
    html = shown(shapes_report(shape(4), odd))
    assert "<script" not in html
    assert "4 × [1]" in html
    assert "[1] &lt;script&gt;" in html
    assert "Sampling ran after the graph in 7 steps: tall." in html
    assert html.count("<img") == 2  # hit rate and demand


def test_better_buckets_say_what_they_save():
    report = shapes_report(shape(4))
    html = shown(report)
    saved = report.planned.declared_padding_rows - report.planned.padding_rows
    assert saved == 50 * 1 + 100 * 3 + 2 * 1
    assert f"would save {saved} padding rows." in html
    fits = shown(shapes_report(shape(1), demand={1: 9}))
    assert "already fit this traffic. 1 bucket would do." in fits


@pytest.mark.parametrize("why", ["", "Graphs are off: graph_mb is 0."])
def test_without_steps_it_says_why_and_what_to_do(why):
    html = shown(shapes_report(demand={}, enabled=not why, why=why, hit_rate=None, history=()))
    assert "No steps yet" in html
    assert why in html
    assert "lab.generate" in html


def test_eager_engines_show_what_shapes_the_traffic_would_have():
    report = shapes_report(
        shape(5, captures=0, replays=0, eager=3, why={"off": 3}, held=False), why="Graphs are off.", enabled=False
    )
    html = shown(report)
    assert "Graphs are off." in html
    assert "Better buckets" in html


def test_any_number_of_shapes_is_bounded():
    report = shapes_report(*(shape(rows) for rows in range(1, 3000)), demand=dict.fromkeys(range(1, 3000), 1))
    html = shown(report)
    assert "rarer shapes not listed" in html
    assert len(html) < 200_000


def test_shapes_as_data_and_as_files():
    view = Shapes(lambda: shapes_report(shape(4), shape(8, eager=4, why={"b": 3, "a": 1})))
    data = view.dataset
    assert data.sizes["shape"] == 2
    assert data.eager_by_reason.sel(reason="b").values.tolist() == [0, 3]
    assert all(variable.attrs["units"] for variable in data.variables.values())
    assert data.attrs["schema"] == "power-lab.shapes/1"
    for kind in view.formats:
        assert view.export(kind)
    view.close()


def test_recorded_runs_have_a_demand_of_their_own():
    record = run_record(80)
    report = report_of([record, record], Coverage((1, 16)))
    assert sum(report.demand.values()) == len({step.step for step in record.steps})
    assert report.planned is not None

    class Engine:
        def shapes(self):
            return shapes_report(demand={}, history=())

    inspect = Inspect(Engine())
    seen = inspect.shapes(Run(record))
    assert "Better buckets" in seen.to_html()
    assert not seen.refreshable
    inspect.close()


def test_better_buckets_can_be_copied_as_the_setting_that_takes_them():
    report = shapes_report(shape(4))
    call = f"lab.configure(buckets={report.planned.buckets!r})"
    assert call in shown(report)
    assert EngineConfig.of({"buckets": list(report.planned.buckets)}).buckets == report.planned.buckets
    assert "lab.configure" not in shown(shapes_report(shape(1), demand={1: 9}))

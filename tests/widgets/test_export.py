"""Exports are the whole of what a view shows, in forms that other programs read."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import xarray

from power_lab.errors import ConfigError
from power_lab.run import Run
from power_lab.widgets.acceptance import Acceptance
from power_lab.widgets.export import FORMATS, to_csv, to_json, to_netcdf
from tests.factories import run_record

HOSTILE = ["=1+1", "@SUM(A1)", "-2", 'with "quotes", commas\nand lines', "plain", ""]
DATA = xarray.Dataset(
    {
        "text": ("row", np.array(HOSTILE, dtype=object), {"units": "1"}),
        "took": ("row", np.array([0.5, np.nan, 1, 2, 3, -4]), {"units": "s"}),
        "table": (("row", "place"), np.arange(12).reshape(6, 2), {"units": "1"}),
    },
    {"row": np.arange(6)},
    {"schema": "test/1"},
)


def test_a_table_has_units_and_no_formulas() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(DATA, "row").decode(), newline="")))
    assert rows[0] == ["row", "text", "took [s]"]
    assert [row[1] for row in rows[1:]] == ["'=1+1", "'@SUM(A1)", "'-2", HOSTILE[3], "plain", ""]
    assert rows[6][2] == "-4.0"  # numbers stay numbers


def test_json_is_strict_and_whole() -> None:
    data = json.loads(to_json(DATA), parse_constant=lambda name: pytest.fail(name))
    assert data["data_vars"]["took"]["data"] == [0.5, None, 1, 2, 3, -4]
    assert data["data_vars"]["took"]["attrs"] == {"units": "s"}
    assert data["data_vars"]["table"]["dims"] == ["row", "place"]
    assert data["attrs"] == {"schema": "test/1"}


def test_netcdf_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "data.nc"
    file.write_bytes(to_netcdf(DATA))
    with xarray.open_dataset(file, engine="h5netcdf") as back:
        assert back.text.values.tolist() == HOSTILE
        assert back.took.attrs["units"] == "s"
        np.testing.assert_array_equal(back.table, DATA.table)


@pytest.mark.parametrize("drafter", ["lookup", "off"])
def test_a_trace_can_be_saved_in_every_form(drafter: str, tmp_path: Path) -> None:
    record = run_record(80, logprobs=True, drafter=drafter)
    view = Acceptance(Run(record))
    for kind in view.formats:
        content = view.export(kind, tmp_path / kind)
        assert (tmp_path / kind).read_bytes() == content
    assert len(view.export("csv").splitlines()) == 1 + len(record.rounds)
    ElementTree.fromstring(view.export("svg"))
    assert set(view.files) == set(view.formats) <= set(FORMATS)
    with pytest.raises(ConfigError, match="csv, netcdf, json, svg"):
        view.export("trace")
    view.close()


def test_the_page_gets_a_file_or_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    view = Acceptance(Run(run_record(20)))
    sent: list[tuple[dict[str, object], list[bytes]]] = []
    monkeypatch.setattr(view, "send", lambda message, buffers=(): sent.append((message, list(buffers))))
    view._answer(view, {"kind": "export", "format": "svg"}, [])
    assert sent[0][0] == {"kind": "file", "name": "power-lab-acceptance.svg", "mime": "image/svg+xml"}
    assert sent[0][1] == [view.export("svg")]
    for bad in ("../../x", None, 3, "trace"):
        view._answer(view, {"kind": "export", "format": bad}, [])
        assert sent[-1][0]["kind"] == "failed"
    view.close()

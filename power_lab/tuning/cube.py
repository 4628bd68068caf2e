"""A sweep as an xarray dataset: a dimension for each swept setting, a variable for each figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from power_lab.tuning.exactness import Agreement
from power_lab.tuning.point import FIGURES, NAN, Point
from power_lab.tuning.settings import Plan

if TYPE_CHECKING:
    import xarray

SCHEMA = "power-lab.sweep/1"
UNITS = {"kv_tokens": "token", "context": "token", "step_tokens": "token", "max_tokens": "token", "width": "token"}
UNITS |= {"graph_mb": "MiB", "batch": "request", "max_batch": "request", "queue_limit": "request", "threads": "thread"}


def cube(
    plan: Plan, points: Mapping[int, Point], agree: Agreement, repeats: int, facts: Mapping[str, Any]
) -> xarray.Dataset:
    """Figures and their reasons by setting. Cells whose settings differ in nothing that matters hold the same point.

    `tokens_per_s_of_pass` has a last dimension `repeat`; passes that were not made are NaN. Attributes hold what all points share.
    """
    import xarray

    dims = tuple(plan.axes)
    size = int(np.prod(plan.shape, dtype=np.int64)) if dims else 1
    at = np.full(size, -1, np.int64)
    numbers = {name: np.full(size, NAN) for name in FIGURES}
    each = np.full((size, repeats), NAN)
    digests, reasons = np.full(size, "", object), np.full(size, "", object)
    differs = np.zeros(size, np.bool_)
    for number, trial in enumerate(plan.trials):
        point = points.get(number) or Point(number, trial)
        for cell in trial.cells:
            at[cell] = number
            for name, value in point.figures.items():
                numbers[name][cell] = value
            speeds = [one.tokens_per_s for one in point.passes]
            each[cell, : len(speeds)] = speeds[:repeats]
            digests[cell], reasons[cell] = point.digest, point.reason
            differs[cell] = bool(agree.of(number))
    data: dict[str, Any] = {
        name: (dims, values.reshape(plan.shape), {"units": FIGURES[name][0], "long_name": FIGURES[name][1]})
        for name, values in numbers.items()
    }
    words = {
        "point": (at, "number of the measurement, in the order in which they were made"),
        "digest": (digests, "SHA-256 of the token ids of all outputs"),
        "differs": (differs, "whether an output is not that of the points that must have the same"),
        "reason": (reasons, "why there is no measurement, or not all of it"),
    }
    data |= {
        name: (dims, values.reshape(plan.shape), {"units": "1", "long_name": title})
        for name, (values, title) in words.items()
    }
    data["tokens_per_s_of_pass"] = (
        (*dims, "repeat"),
        each.reshape(*plan.shape, repeats),
        {"units": "token/s", "long_name": "output tokens over the time of one pass"},
    )
    coords = {
        name: (name, coordinate(values), {"units": UNITS.get(name, "1"), "long_name": f"setting {name}"})
        for name, values in plan.axes.items()
    }
    coords["repeat"] = ("repeat", np.arange(repeats), {"units": "1", "long_name": "counted pass"})
    attributes = {
        "schema": SCHEMA,
        "title": "Sweep over settings",
        **facts,
        "fixed": json.dumps(plan.fixed, default=str),
    }
    return xarray.Dataset(data, coords, attributes)


def table(plan: Plan, points: Sequence[Point], agree: Agreement) -> xarray.Dataset:
    """The same as a list: dimension `point`, settings as variables; for spreadsheets."""
    import xarray

    def column(values: Sequence[Any], unit: str, title: str) -> Any:
        return "point", coordinate(values), {"units": unit, "long_name": title}

    data: dict[str, Any] = {}
    for name in plan.axes:
        values = [point.settings.get(name, "") for point in points]
        data[name] = column(values, UNITS.get(name, "1"), f"setting {name}")
    for name, (unit, title) in FIGURES.items():
        data[name] = column([point.figures[name] for point in points], unit, title)
    data["digest"] = column([point.digest for point in points], "1", "SHA-256 of the token ids of all outputs")
    data["differs"] = column([bool(agree.of(point.number)) for point in points], "1", "not the outputs it must have")
    data["reason"] = column([point.reason for point in points], "1", "why there is no measurement, or not all of it")
    at = np.array([point.number for point in points], np.int64)
    coords = {"point": ("point", at, {"units": "1", "long_name": "in the order of measuring"})}
    return xarray.Dataset(data, coords, {"schema": SCHEMA})


def coordinate(values: Sequence[Any]) -> np.ndarray:
    """Values as an array that files can hold: numbers and truth values as they are, anything else as text."""
    if values and all(isinstance(value, bool) for value in values):
        return np.array(values, np.bool_)
    if values and all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return np.array(values, np.int64)
    if values and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return np.array(values, np.float64)
    return np.array([str(value) for value in values], object)

"""Datasets and pictures as files."""

from __future__ import annotations

import csv
import io
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file. label: on its button; suffix: of the name; mime: type; meaning: what is in it."""

    label: str
    suffix: str
    mime: str
    meaning: str


FORMATS = {
    "csv": Format("CSV", ".csv", "text/csv", "A table for spreadsheets, one row for each"),
    "netcdf": Format(
        "NetCDF", ".nc", "application/x-netcdf", "The whole dataset with its units, for xarray and others"
    ),
    "json": Format("JSON", ".json", "application/json", "The whole dataset with its units, as text"),
    "svg": Format("SVG", ".svg", "image/svg+xml", "The picture"),
    "trace": Format(
        "Chrome trace", ".trace.json", "application/json", "For Perfetto (ui.perfetto.dev) and chrome://tracing"
    ),
}


def to_csv(data: xarray.Dataset, dimension: str) -> bytes:
    """The variables along one dimension as a table with units in its head.

    Text that a spreadsheet would take for a formula gets an apostrophe in front: it may come from a model.
    """
    columns = [name for name, variable in data.variables.items() if variable.dims == (dimension,)]
    columns.sort(key=lambda name: name != dimension)
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    units = [data[name].attrs.get("units", "1") for name in columns]
    writer.writerow(str(name) if unit == "1" else f"{name} [{unit}]" for name, unit in zip(columns, units, strict=True))
    writer.writerows(zip(*([_cell(value) for value in data[name].values.tolist()] for name in columns), strict=True))
    return out.getvalue().encode()


def to_json(data: xarray.Dataset) -> bytes:
    """Dimensions, coordinates, variables and attributes as xarray names them; what is not a number is null."""
    return json.dumps(_plain(data.to_dict()), ensure_ascii=False, allow_nan=False).encode()


def to_netcdf(data: xarray.Dataset) -> bytes:
    """NetCDF-4."""
    with tempfile.TemporaryDirectory(prefix="power-lab-") as folder:
        file = Path(folder) / "data.nc"
        data.to_netcdf(file, engine="h5netcdf")
        return file.read_bytes()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") and value else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value

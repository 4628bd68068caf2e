from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
import xarray
from hypothesis import given, settings

from power_lab.errors import EvidenceError
from power_lab.evidence.dataset import KINDS, SCHEMA, trace_dataset
from tests.factories import run_record, run_records


@settings(max_examples=80, deadline=None)
@given(run_records())
def test_counts_are_conserved(record):
    data = trace_dataset(record)
    assert data.sizes["position"] == len(record.tokens) == int(data.emitted.sum())
    assert (data.accepted <= data.drafted).all()
    assert int((data.rejected_token >= 0).sum()) == int((data.drafted - data.accepted).sum())
    assert int((data.draft_token >= 0).sum()) == int(data.drafted.sum())
    assert data.position.values.tolist() == list(
        range(len(record.prompt_tokens), len(record.prompt_tokens) + len(record.tokens))
    )
    last = data.sizes["round"] - 1
    for index, entry in enumerate(record.rounds):
        kinds = data.kind.values[data.round_of.values == index].tolist()
        assert data.token.values[data.round_of.values == index].tolist() == list(entry.emitted)
        if not entry.drafted:
            assert kinds == ["plain"] * len(entry.emitted)
            continue
        end = "correction" if entry.accepted < len(entry.drafted) else "bonus"
        assert kinds in (
            [["accepted"] * entry.accepted + [end]] + ([["accepted"] * entry.accepted] if index == last else [])
        )
    assert set(data.kind.values.tolist()) <= set(KINDS)


@settings(max_examples=80, deadline=None)
@given(run_records())
def test_every_variable_is_described(record):
    data = trace_dataset(record)
    assert data.attrs["schema"] == SCHEMA
    assert set(data.sizes) == {"position", "round", "slot", "length", "step"}
    for name, variable in data.variables.items():
        assert variable.attrs["units"], name
        assert variable.attrs["long_name"], name


def _through_netcdf(data: xarray.Dataset) -> xarray.Dataset:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.nc"
        data.to_netcdf(path, engine="h5netcdf")
        return xarray.load_dataset(path, engine="h5netcdf")


@settings(max_examples=6, deadline=None)
@given(run_records())
def test_netcdf_keeps_everything(record):
    data = trace_dataset(record)
    xarray.testing.assert_identical(_through_netcdf(data), data)


def test_netcdf_keeps_hostile_text_and_big_seeds():
    record = run_record(4, drafter="off", params={"seed": (1 << 63) - 1})
    record = msgspec.structs.replace(record, pieces=("\0", "", "é😀\n", "\u202e"))
    data = _through_netcdf(trace_dataset(record))
    assert data.piece.values.tolist() == ["␀", "", "é😀\n", "\u202e"]
    assert data.attrs["seed"] == str((1 << 63) - 1)


def test_a_run_without_tokens_is_an_empty_dataset():
    record = run_record(0, drafter="off", rounds=(), steps=(), finish="cancelled")
    data = trace_dataset(record)
    assert dict(data.sizes) == {"round": 0, "slot": 0, "length": 1, "position": 0, "step": 0}
    xarray.testing.assert_identical(_through_netcdf(data), data)


def test_log_probabilities_are_missing_or_there():
    assert np.isnan(trace_dataset(run_record()).logprob).all()
    assert (trace_dataset(run_record(logprobs=True)).logprob <= 0).all()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda record: {"tokens": record.tokens[:-1]}, "tokens"),
        (lambda record: {"pieces": record.pieces[:-1]}, "pieces"),
        (lambda record: {"prompt_tokens": ()}, "rounds[0].start"),
        (
            lambda record: {"rounds": (msgspec.structs.replace(record.rounds[0], accepted=1), *record.rounds[1:])},
            "rounds[0].accepted",
        ),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change, field):
    record = run_record()
    with pytest.raises(EvidenceError) as caught:
        trace_dataset(msgspec.structs.replace(record, **change(record)))
    assert caught.value.field == field

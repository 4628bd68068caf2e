"""Measuring: each engine once, failures with their reasons, interrupts that keep what is whole, and the check of outputs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import xarray

from power_lab.engine.config import EngineConfig
from power_lab.errors import ConfigError, EngineClosed, HostUnavailable
from power_lab.tuning.sweep import sweep
from tests.tuning.fakes import FakeLab

GRID = {"width": [1, 3, 7], "speculate": ["off", "ngram"], "kv_tokens": [8192, 4096]}


def measured(lab, prompts=("one", "two"), **settings):
    options = {"repeats": 2, "max_tokens": 20, "progress": False, "base": lab.config}
    return sweep(lab, prompts, **{**options, **settings})


def close(found):
    """Views register themselves with ipywidgets until they are closed."""
    while found._views:
        found._views.pop().close()


def test_the_cube():
    found = measured(FakeLab(graphs=True), **GRID)
    data = found.dataset
    assert dict(data.sizes) == {"width": 3, "speculate": 2, "kv_tokens": 2, "repeat": 2}
    assert data.tokens_per_s.dims == ("width", "speculate", "kv_tokens")
    assert all(variable.attrs["units"] and variable.attrs["long_name"] for variable in data.variables.values())
    assert np.isfinite(data.tokens_per_s).all()
    assert (data.pool_bytes.sel(kv_tokens=4096) == 4096 * 1000).all()
    assert (data.planned_bytes == data.weights_bytes + data.pool_bytes + data.graphs_bytes + data.workspace_bytes).all()
    assert (data.planned_bytes.sel(kv_tokens=8192) == data.planned_bytes.sel(kv_tokens=8192).max()).all(), (
        "one engine, one plan"
    )
    assert (data.graph_hits == 2 / 3).all()
    assert (data.captured_bytes == 77).all()
    assert (data.tokens == 40).all()
    ngram = data.sel(speculate="ngram")
    run = found.point(width=3, speculate="ngram", kv_tokens=8192).runs[0]
    assert ngram.sel(width=3, kv_tokens=8192).acceptance == pytest.approx(run.accepted / run.drafted)
    assert np.allclose(ngram.wasted, ngram.drafted * (1 - ngram.acceptance))
    assert data.sel(speculate="off").acceptance.isnull().all()
    assert set(data.digest.values.ravel()) == {found.exactness.families[0].digest}
    assert data.attrs["same_outputs"] == 1
    assert data.tokens_per_s_of_pass.median("repeat").equals(data.tokens_per_s)


def test_each_engine_is_loaded_once_and_passes_alternate():
    lab = FakeLab()
    found = measured(lab, **GRID)
    assert [config.kv_tokens for config in lab.loads] == [8192, 4096]
    assert [len(group) for group in found.plan.groups] == [4, 4]
    assert lab.given_back == 1
    first = [
        params.width for config, prompt, params, _ in lab.submitted if prompt == "one" and config.kv_tokens == 8192
    ]
    assert first == [15, 1, 3, 7] * 3  # a pass that does not count, then two; plain decoding has no width of its own
    assert len(lab.submitted) == 8 * 3 * 2


def test_settings_without_effect_share_a_measurement():
    found = measured(FakeLab(), **GRID)
    off = found.dataset.sel(speculate="off", kv_tokens=8192)
    assert len(set(off.point.values)) == 1
    assert found.point(speculate="off", kv_tokens=8192) == found.point(0)


def test_cold_passes_have_namespaces_of_their_own_and_warm_ones_share_the_points():
    lab = FakeLab()
    measured(lab, cache=["cold", "warm"], warmup=0)
    keys = [key for *_, key in lab.submitted]
    cold, warm = keys_by_prompts(keys)
    assert len(cold) == 2
    assert len(warm) == 1, "one pass fills it, two count"
    assert sum(keys.count(key) for key in warm) == 3 * 2


def keys_by_prompts(keys):
    """Namespaces that served one pass of two prompts, and those that served more."""
    once = {key for key in keys if keys.count(key) == 2}
    return once, set(keys) - once


def test_seeds_are_those_of_generate_many():
    from power_lab.many import derived_seed

    lab = FakeLab()
    measured(lab, temperature=[0.8], seed=11)
    assert {(prompt, params.seed) for _, prompt, params, _ in lab.submitted} == {
        ("one", derived_seed(11, 0)),
        ("two", derived_seed(11, 1)),
    }


def test_a_drafter_that_is_refused_is_a_point_with_its_reason():
    found = measured(FakeLab(), speculate=["off", "eagle", "ngram"])
    data = found.dataset
    assert "needs a drafter" in str(data.reason.sel(speculate="eagle").item())
    assert data.tokens_per_s.isnull().values.tolist() == [False, True, False]
    assert not found.stopped
    with pytest.raises(ConfigError, match="needs a drafter"):
        _ = found.point(speculate="eagle").runs


def test_an_engine_that_does_not_fit_costs_its_own_points_alone():
    lab = FakeLab(broken=lambda config: config.kv_tokens == 4096)
    found = measured(lab, kv_tokens=[8192, 4096, 1024], width=[1, 3], speculate="ngram")
    reasons = found.dataset.reason
    assert (reasons.sel(kv_tokens=4096) == "needs 9 blocks, 8 are there. Use less.").all()
    assert (reasons.sel(kv_tokens=[8192, 1024]) == "").all()
    assert found.dataset.tokens_per_s.sel(kv_tokens=4096).isnull().all()
    assert {point.trial.config.kv_tokens for point in found.front()} <= {8192, 1024}
    assert found.front()[0].trial.config.kv_tokens == 1024


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, HostUnavailable("gone", "Wait."), EngineClosed("released", "Load.")]
)
def test_what_was_whole_is_kept_and_the_rest_can_follow(error):
    lab = FakeLab()

    def strike(number):
        if number == 15:  # in the second pass of the fourth point, the first that counts being its predecessors'
            raise error

    lab.before_result = strike
    found = measured(lab, **GRID)
    assert found.stopped
    assert lab.given_back == 1
    passes = [len(point.passes) for point in found.points]
    assert passes == [1, 1, 1, 0, 0, 0, 0, 0]
    assert all(len(one.records) == 2 for point in found.points for one in point.passes)
    data = found.dataset
    assert "stopped after 1 of 2 passes" in data.reason.values
    assert "stopped before it" in data.reason.values
    assert data.tokens_per_s.isnull().any()
    assert bool(found.exactness)
    lab.before_result = lambda number: None
    loads = len(lab.loads)
    assert found.resume(progress=False) is found
    assert len(lab.loads) == loads + 2
    assert not found.stopped
    assert [len(point.passes) for point in found.points] == [2] * 8
    assert np.isfinite(found.dataset.tokens_per_s).all()
    begun = len(lab.submitted)
    found.resume(progress=False)
    assert len(lab.submitted) == begun, "nothing is left to measure"


def test_other_errors_come_through():
    lab = FakeLab()

    def bug(number):
        raise ZeroDivisionError

    lab.before_result = bug
    with pytest.raises(ZeroDivisionError):
        measured(lab, width=[1])
    assert lab.given_back == 1


def test_a_difference_names_points_and_tokens():
    lab = FakeLab(other_output=lambda config, params: params.width == 3 and params.speculate == "ngram")
    found = measured(lab, **GRID)
    assert not found.exactness
    points = {one.point for one in found.exactness.broken}
    assert points == {point.number for point in found.points if point.settings.get("width") == 3}
    assert {(one.prompt, one.token) for one in found.exactness.broken} == {(0, 5)}
    assert found.dataset.differs.sel(width=3, speculate="ngram").all()
    assert not found.dataset.differs.sel(speculate="off").any()
    assert found.dataset.attrs["same_outputs"] == 0
    html = found.show().to_html()
    assert "pl-broken" in html
    assert "Outputs differ in 2 points" in html
    assert "point 2, pass 0, prompt 0, from output token 5 on: width 3 · ngram · kv_tokens 8,192" in html
    assert "OUTPUTS DIFFER" in repr(found)
    close(found)


def test_passes_of_one_point_that_differ_are_a_difference_too():
    calls = []

    def other(config, params):
        calls.append(1)
        return len(calls) == 6  # the last run

    found = measured(FakeLab(other_output=other), width=[1], speculate="ngram")
    assert [(one.point, one.repeat, one.prompt) for one in found.exactness.broken] == [(0, 1, 1)]


def test_a_draw_is_decided_for_plain_decoding():
    lab = FakeLab(other_output=lambda config, params: params.speculate == "off")
    found = measured(lab, speculate=["ngram", "off"])
    assert {one.point for one in found.exactness.broken} == {found.point(speculate="ngram").number}


def test_fast_mode_and_other_temperatures_promise_nothing():
    lab = FakeLab(other_output=lambda config, params: config.mode == "fast" and params.speculate == "ngram")
    found = measured(lab, mode=["exact", "fast"], speculate=["off", "ngram"])
    assert bool(found.exactness)
    assert [family.exact for family in found.exactness.families] == [True, False]
    assert len(found.exactness.families[1].differences) == 2
    lab = FakeLab(other_output=lambda config, params: params.temperature > 0)
    found = measured(lab, temperature=[0.0, 0.8])
    assert len(found.exactness.families) == 2
    assert bool(found.exactness)


def test_choosing_points():
    found = measured(FakeLab(), **GRID)
    assert found.point(3).number == 3
    assert found.point(width=3, speculate="ngram", kv_tokens=4096).trial.config.kv_tokens == 4096
    for bad, key in (({"width": 2}, "width"), ({"batch": 1}, "batch"), ({"width": 3}, "point")):
        with pytest.raises(ConfigError) as caught:
            found.point(**bad)
        assert caught.value.key == key
    with pytest.raises(ConfigError, match=r"0\.\.7"):
        found.point(8)
    assert found.best("planned_bytes").trial.config.kv_tokens == 4096
    speeds = [point.figures["tokens_per_s"] for point in found.ranked()]
    assert speeds == sorted(speeds, reverse=True)
    with pytest.raises(ConfigError, match="no such figure"):
        found.best("speed")
    with pytest.raises(ConfigError, match="no point has it"):
        found.best("graph_hits")


def test_files_hold_the_whole_cube(tmp_path):
    found = measured(FakeLab(), seed=3, width=[1, 3], prefix_cache=[True, False], speculate=["ngram", "eagle"])
    found.export("netcdf", tmp_path / "s.nc")
    with xarray.open_dataset(tmp_path / "s.nc", engine="h5netcdf") as read:
        read.load()
    xarray.testing.assert_equal(read, found.dataset)
    assert read.attrs["schema"] == "power-lab.sweep/1"
    data = json.loads(found.export("json"))
    assert data["coords"]["speculate"]["data"] == ["ngram", "eagle"]
    lines = found.export("csv").decode().splitlines()
    assert len(lines) == 1 + len(found.points)
    assert lines[0].startswith("point,width [token],prefix_cache")


@pytest.mark.parametrize(
    ("prompts", "options", "key"),
    [
        ([], {}, "prompts"),
        (3, {}, "prompt"),
        (["a"], {"repeats": 0}, "repeats"),
        (["a"], {"warmup": -1}, "warmup"),
        (["a"], {"repeats": True}, "repeats"),
        (["a"], {"batch": [1, 2]}, "batch"),
    ],
)
def test_wrong_arguments_are_named(prompts, options, key):
    lab = FakeLab()
    with pytest.raises(ConfigError) as caught:
        measured(lab, prompts, **options)
    assert caught.value.key == key
    assert not lab.loads


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], [{"role": "user", "content": "hi"}]])
def test_one_prompt_may_stand_alone(prompt):
    lab = FakeLab()
    measured(lab, prompt, width=[1])
    assert {json.dumps(asked) for _, asked, *_ in lab.submitted} == {json.dumps(prompt)}


def test_progress_counts_every_pass_to_the_end(monkeypatch):
    said = []

    class Bar:
        def show(self, stage, note, done, total):
            said.append((note, done, total))

        def close(self, outcome):
            said.append(outcome)

    monkeypatch.setattr("power_lab.tuning.sweep.make_bar", lambda unit: Bar())
    measured(FakeLab(broken=lambda config: config.kv_tokens == 4096), **GRID, progress=True)
    assert said[0] == ("loading", 0, 24)
    assert said[-2][1:] == (24, 24)
    assert said[-1].startswith("Measured in ")
    assert ("width 3 · ngram · kv_tokens 8,192") in {note for note, *_ in said[:-1]}


def test_figures_without_meaning_are_nan():
    point = measured(FakeLab(), speculate=["off"]).point(0)
    assert math.isnan(point.figures["acceptance"])
    assert math.isnan(point.figures["graph_hits"])
    assert point.figures["tokens_per_pass"] == 1.0


def test_an_own_engine_is_used_as_it_is():
    lab = FakeLab()
    measured(lab, width=[1, 3], speculate="ngram")
    assert lab.loads == [EngineConfig(kv_tokens=8192, draft="")]

"""Which points a sweep has, by which engine each is measured, and in which order."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.config import EngineConfig
from power_lab.errors import ConfigError
from power_lab.tuning.settings import plan

BASE = EngineConfig(kv_tokens=8192)


def test_what_has_several_values_is_a_dimension_and_the_rest_is_fixed():
    made = plan({"width": [1, 3], "max_tokens": 8, "stop": ("a", "b"), "speculate": ("lookup",)}, BASE)
    assert made.axes == {"width": (1, 3), "speculate": ("lookup",)}
    assert made.fixed == {"max_tokens": 8, "stop": ("a", "b")}
    assert made.shape == (2, 1)


def test_buckets_are_one_set_or_several() -> None:
    assert plan({"buckets": (1, 4)}, BASE).fixed == {"buckets": (1, 4)}
    made = plan({"buckets": [(1, 4), (2, 8)]}, BASE)
    assert made.axes == {"buckets": ((1, 4), (2, 8))}
    assert [trial.config.buckets for trial in made.trials] == [(1, 4), (2, 8)]
    assert len({trial.family for trial in made.trials}) == 1, "outputs are the same"


def test_arrays_become_plain_numbers():
    made = plan({"width": np.arange(1, 4)}, BASE)
    assert made.axes["width"] == (1, 2, 3)
    assert all(type(value) is int for value in made.axes["width"])


@given(
    widths=st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True),
    drafters=st.lists(
        st.sampled_from(["off", "lookup", "ngram", "mtp", "dflash"]), min_size=1, max_size=4, unique=True
    ),
    pools=st.lists(st.integers(1, 8).map(lambda n: 1024 * n), min_size=1, max_size=3, unique=True),
    mirrored=st.booleans(),
)
def test_every_cell_has_one_trial_and_every_engine_one_group(widths, drafters, pools, mirrored):
    settings = {"width": widths, "speculate": drafters, "kv_tokens": pools}
    made = plan(dict(reversed(settings.items())) if mirrored else settings, BASE)
    cells = [cell for trial in made.trials for cell in trial.cells]
    assert sorted(cells) == list(range(len(widths) * len(drafters) * len(pools)))
    configs = [{trial.config for trial in group} for group in made.groups]
    assert all(len(found) == 1 for found in configs)
    assert len({config for found in configs for config in found}) == len(made.groups)
    values = [dict(zip(made.axes, chosen, strict=True)) for chosen in product(*made.axes.values())]
    for trial in made.trials:
        for cell in trial.cells:
            wanted = values[cell]
            assert trial.config.kv_tokens == wanted["kv_tokens"]
            assert trial.request["speculate"] == wanted["speculate"]
            assert ("width" in trial.request) == (wanted["speculate"] != "off")
        assert len(trial.cells) == (len(widths) if trial.request["speculate"] == "off" else 1)


def test_a_trained_drafter_is_held_by_its_own_points_alone():
    made = plan({"speculate": ["off", "mtp", "ngram", "dflash"]}, BASE)
    assert [[trial.request["speculate"] for trial in group] for group in made.groups] == [
        ["off", "ngram"],
        ["mtp"],
        ["dflash"],
    ]
    assert [group[0].config.draft for group in made.groups] == ["", "mtp", "dflash"]


def test_a_drafter_that_was_asked_for_is_held_by_all():
    made = plan({"speculate": ["off", "mtp"], "draft": "mtp"}, BASE)
    assert [group[0].config.draft for group in made.groups] == ["mtp"]
    own = plan({"speculate": ["off", "draft-model"]}, EngineConfig(draft="smollm2", kv_tokens=8192))
    assert {trial.config.draft for trial in own.trials} == {"smollm2"}


def test_the_engine_in_use_comes_first():
    made = plan({"kv_tokens": [1024, 8192, 4096]}, EngineConfig(kv_tokens=8192, draft=""))
    assert [group[0].config.kv_tokens for group in made.groups] == [8192, 1024, 4096]


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        ({"widht": [1]}, "widht", "Known settings: .*width"),
        ({"width": [1, 99]}, "width", "outside 1..64"),
        ({"gate": [0.2, 2.0]}, "gate", "outside 0.0..1.0"),
        ({"width": []}, "width", "no value"),
        ({"width": [3, 3]}, "width", "twice"),
        ({"kv_tokens": [1000]}, "kv_tokens", "not a multiple of 64"),
        ({"speculate": ["of"]}, "speculate", "not a drafter|Invalid enum"),
        ({"cache": ["hot"]}, "cache", "cold, warm"),
        ({"batch": 0}, "batch", "1 to 256"),
        ({"batch": True}, "batch", "1 to 256"),
        ({"record": "replay"}, "record", "unknown setting"),
        ({"width": range(1, 65), "seed": range(65)}, "settings", "at most 4,096"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_loaded(settings, key, said):
    with pytest.raises(ConfigError, match=said) as caught:
        plan(settings, BASE)
    assert caught.value.key == key


def test_gates_are_swept_where_there_are_drafts_and_change_no_token():
    made = plan({"gate": [0.0, 0.3], "speculate": ["off", "ngram"]}, BASE)
    assert sorted(len(trial.cells) for trial in made.trials) == [1, 1, 2]
    assert {made.told(trial) for trial in made.trials} == {"off", "gate 0.0 · ngram", "gate 0.3 · ngram"}
    assert len({trial.family for trial in made.trials}) == 1


def test_families_part_by_what_may_change_tokens():
    made = plan(
        {"temperature": [0.0, 0.8], "width": [1, 3], "speculate": ["off", "ngram"], "mode": ["exact", "fast"]}, BASE
    )
    families: dict = {}
    for trial in made.trials:
        families.setdefault(trial.family, []).append(trial)
    assert len(families) == 4
    assert all(len(found) == 3 for found in families.values())  # off, and n-grams with two widths

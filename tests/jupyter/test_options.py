"""Options of the magics, without a kernel."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from power_lab.engine.request import SamplingParams
from power_lab.jupyter.options import generate_options, sampling_of, settings_of
from power_lab.lab import sampling


def test_every_sampling_parameter_but_the_mapping_has_an_option():
    names = set(generate_options().names)
    wanted = {f"--{name.replace('_', '-')}" for name in SamplingParams.__struct_fields__} - {"--logit-bias"}
    assert wanted <= names


def test_given_options_become_parameters_and_others_stay_at_their_defaults():
    line = "--max-tokens 3 --temperature 0.5 --seed 7 --stop a --stop '\\nb' --stop-tokens 5 --ignore-eos --raw"
    options = generate_options().read(line)
    expected = SamplingParams(
        max_tokens=3, temperature=0.5, seed=7, stop=("a", "\nb"), stop_tokens=(5,), ignore_eos=True
    )
    assert sampling(sampling_of(options)) == expected
    assert (options.chat, options.stream, options.to) == (False, None, "run")
    assert sampling_of(generate_options().read("")) == {}


def test_settings_are_read_as_numbers_truths_or_text():
    words = ["kv_tokens=64", "prefix_cache=false", "mode=fast", "model=a=b"]
    assert settings_of(words) == {"kv_tokens": 64, "prefix_cache": False, "mode": "fast", "model": "a=b"}
    assert settings_of(["buckets=1,2,8", "model=a,b"]) == {"buckets": (1, 2, 8), "model": "a,b"}
    with pytest.raises(UsageError, match="Write key=value"):
        settings_of(["64"])

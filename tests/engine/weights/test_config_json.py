"""config.json and GGUF metadata through one typed interface."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from power_lab.engine.weights.config_json import MAX_CONFIG_BYTES, JsonConfig
from power_lab.engine.weights.gguf import GgufFile
from power_lab.engine.weights.values import MAX_LIST, TypedValues
from power_lab.errors import ModelFileError
from tests.engine.weights.ggufs import ARRAY, BOOL, F32, I32, STRING, U32, Gguf, pair

VALUES = {"n": 5, "x": 0.5, "flag": True, "s": "text", "ints": [1, 2, 3], "floats": [0.5, 1.0], "texts": ["a", "b"], "flags": [True, False],
          "none": []}  # fmt: skip


@pytest.fixture(params=["gguf", "json"])
def values(request: pytest.FixtureRequest, tmp_path: Path) -> TypedValues:
    if request.param == "json":
        return JsonConfig.open(written(tmp_path, VALUES))
    kinds = {"n": U32, "x": F32, "flag": BOOL, "s": STRING}
    lists = {"ints": I32, "floats": F32, "texts": STRING, "flags": BOOL, "none": I32}
    pairs = [pair(key, kind, VALUES[key]) for key, kind in kinds.items()]
    pairs += [pair(key, ARRAY, (kind, VALUES[key])) for key, kind in lists.items()]
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(Gguf(pairs)))
    return GgufFile.open(path)


def written(folder: Path, content: Any) -> Path:
    path = folder / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_values_of_their_type(values: TypedValues) -> None:
    assert values.require("n", int, 1, 5) == 5 and values.require("x", float, 0, 1) == 0.5
    assert values.require("flag", bool) is True and values.require("s", str) == "text"
    assert values.get("absent", int, 9) == 9 and values.get("n", int, 9) == 5
    assert values.has("n") and not values.has("absent")


def test_lists_of_their_type_and_length(values: TypedValues) -> None:
    assert values.require_list("ints", int, 3, 1, 3) == [1, 2, 3]
    assert values.require_list("floats", float, 2) == [0.5, 1.0]
    assert values.require_list("texts", str, 2) == ["a", "b"] and values.require_list("flags", bool, 2) == [True, False]
    assert values.require_list("n", int, 3) == [5, 5, 5] and values.require_list("s", str, 2) == ["text", "text"]
    assert values.require_list("ints", int) == [1, 2, 3] and values.require_list("n", int) == [5]
    assert values.require_list("none", int, 0) == [] == values.require_list("none", float)
    assert [type(item) for item in values.require_list("ints", int, 3)] == [int] * 3


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda v: v.require("absent", int), "key 'absent' is missing"),
        (lambda v: v.require("n", str), "key 'n' is int 5, but str is expected"),
        (lambda v: v.require("flag", int), "key 'flag' is bool True, but int is expected"),
        (lambda v: v.require("x", int), "key 'x' is float 0.5, but int is expected"),
        (lambda v: v.require("n", int, 6), "key 'n' is int 5, outside 6..None"),
        (lambda v: v.get("n", int, 0, None, 4), "key 'n' is int 5, outside None..4"),
        (lambda v: v.require_list("absent", int, 3), "key 'absent' is missing"),
        (lambda v: v.require_list("ints", int, 4), "key 'ints' has 3 values, but 4 are expected"),
        (lambda v: v.require_list("ints", int, 3, 1, 2), r"key 'ints\[2\]' is int 3, outside 1..2"),
        (lambda v: v.require_list("ints", str, 3), r"key 'ints\[0\]' is int 1, but str is expected"),
        (lambda v: v.require_list("flags", int, 2), r"key 'flags\[0\]' is bool True, but int is expected"),
        (lambda v: v.require_list("n", str, 2), "key 'n' is int 5, but str is expected"),
        (lambda v: v.require_list("n", int, 2, 6, 9), "key 'n' is int 5, outside 6..9"),
    ],
)
def test_what_does_not_fit_is_named(values: TypedValues, ask: Callable[[TypedValues], Any], said: str) -> None:
    with pytest.raises(ModelFileError, match=said) as caught:
        ask(values)
    assert str(values.path) in str(caught.value)


def test_lists_of_any_length_are_bounded(tmp_path: Path) -> None:
    config = JsonConfig.open(written(tmp_path, {"a": [1] * (MAX_LIST + 1)}))
    with pytest.raises(ModelFileError, match="key 'a' has 65537 values; at most 65536"):
        config.require_list("a", int)


def test_nested_keys_sections_and_null(tmp_path: Path) -> None:
    inner = {"hidden_size": 64, "rope_parameters": {"rope_theta": 10000, "factor": None}, "pad": None}
    config = JsonConfig.open(written(tmp_path, {"model_type": "gemma3", "text_config": inner, "n": 3}))
    assert config.require("text_config.rope_parameters.rope_theta", float) == 10000.0
    assert not config.has("text_config.pad") and config.get("text_config.rope_parameters.factor", float, 1.0) == 1.0
    assert config.get("vision_config.hidden_size", int, 7) == 7 and config.get("text_config.pad.deep", int, 8) == 8
    text = config.section("text_config")
    assert (
        text.require("hidden_size", int) == 64 and text.section("rope_parameters").require("rope_theta", int) == 10000
    )
    for ask, said in [
        (lambda: text.require("width", int), "key 'text_config.width' is missing"),
        (
            lambda: text.section("rope_parameters").require("rope_theta", str),
            "'text_config.rope_parameters.rope_theta' is int",
        ),
        (
            lambda: text.require("hidden_size.x", int),
            "key 'text_config.hidden_size' is int 64, but an object is expected",
        ),
        (lambda: config.section("n"), "key 'n' is int 3, but dict is expected"),
        (lambda: config.section("vision_config"), "key 'vision_config' is missing"),
        (lambda: config.require("text_config.pad", int), "key 'text_config.pad' is missing"),
    ]:
        with pytest.raises(ModelFileError, match=said):
            ask()


def test_numbers_are_exact_about_whole_and_not(tmp_path: Path) -> None:
    config = JsonConfig.open(written(tmp_path, b'{"i": 3, "f": 3.0, "huge": 1' + b"0" * 400 + b', "list": [1, 2.5]}'))
    assert config.require("i", float) == 3.0 and type(config.require("i", float)) is float
    assert config.require_list("list", float, 2) == [1.0, 2.5]
    for ask, said in [
        (lambda: config.require("f", int), "'f' is float 3.0, but int"),
        (lambda: config.require("huge", float), "'huge' is int 1.*, but float"),
        (lambda: config.require("huge", int, 0, 10), "'huge' is int 1.*, outside 0..10"),
    ]:
        with pytest.raises(ModelFileError, match=said) as caught:
            ask()
        assert len(str(caught.value)) < 300


def test_configs_of_transformers(tmp_path: Path) -> None:
    llama = LlamaConfig(hidden_size=64, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-6)
    llama.save_pretrained(tmp_path)
    config = JsonConfig.open(tmp_path / "config.json")
    assert config.require("model_type", str) == "llama" and config.require("hidden_size", int) == 64
    assert config.require("rope_parameters.rope_theta", float) == 5e5 and config.require("rms_norm_eps", float) == 1e-6
    Gemma3TextConfig(num_hidden_layers=7).save_pretrained(tmp_path)
    config = JsonConfig.open(tmp_path / "config.json")
    assert config.require_list("layer_types", str, 7) == ["sliding_attention"] * 5 + [
        "full_attention",
        "sliding_attention",
    ]


def test_unreadable_configs_name_the_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    (tmp_path / "twice").write_bytes(b'{"a": 1, "a": 2}')
    for name, said in [
        ("absent", "No such"),
        ("fifo", "regular"),
        (".", "regular"),
        ("large", "longer than"),
        ("twice", "twice"),
    ]:
        with pytest.raises(ModelFileError, match=f"{tmp_path}.*{said}"):
            JsonConfig.open(tmp_path / name)

"""Settings: unknown keys and wrong values are named, also when a check of the struct itself finds them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from power_lab.engine.config import CPU_KV_TOKENS, OWNERS, EngineConfig, ModelFolders, Paths, strict, user_path
from power_lab.engine.request import SamplingParams
from power_lab.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "settings", "key", "words"),
    [
        (EngineConfig, {"treads": 2}, "treads", "Known settings: model"),
        (EngineConfig, {"threads": "two"}, "threads", "int"),
        (EngineConfig, {"threads": -1}, "threads", "outside"),
        (EngineConfig, {"kv_tokens": 100}, "kv_tokens", "Use 128"),
        (EngineConfig, {"kv_tokens": -64}, "kv_tokens", "outside"),
        (EngineConfig, {"graph_mb": -1}, "graph_mb", "outside"),
        (EngineConfig, {"overlap": 1}, "overlap", "bool"),
        (EngineConfig, {"mode": "quick"}, "mode", "Use one of exact, fast"),
        (EngineConfig, {"mode": "approximate"}, "mode", "approximate"),
        (SamplingParams, {"temperature": -0.1}, "temperature", "outside"),
        (SamplingParams, {"speculate": "medusa"}, "speculate", "medusa"),
        (SamplingParams, {"stop": ("",)}, "stop", "characters"),
        (SamplingParams, {"stop_tokens": (2**62,)}, "stop_tokens", "outside"),
        (SamplingParams, {"logit_bias": {5: 1e9}}, "logit_bias[5]", "outside"),
        (SamplingParams, {"logit_bias": {4: 1.0, 5: -1001}}, "logit_bias[5]", "outside"),
    ],
)
def test_wrong_settings_name_their_key(kind: Any, settings: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        strict(kind, settings)
    assert caught.value.key == key


@pytest.mark.parametrize(("value", "words"), [(math.nan, "outside"), (True, "not a number"), ("1", "not a number")])
def test_biases_that_are_no_numbers_name_their_token(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        SamplingParams(logit_bias={4: 1, 5: value})
    assert caught.value.key == "logit_bias[5]"


def test_every_setting_has_an_owner() -> None:
    assert OWNERS.keys() == set(EngineConfig.__struct_fields__)


def test_an_open_kv_pool_is_a_number_on_the_cpu_and_left_to_the_memory_plan_on_a_gpu() -> None:
    """Equal engines have equal configurations, however they came about."""
    assert (
        EngineConfig(device="cpu").kv_tokens
        == EngineConfig.of({"kv_tokens": 0, "device": "cpu"}).kv_tokens
        == CPU_KV_TOKENS
    )
    assert EngineConfig(device="cpu") == EngineConfig.of({"kv_tokens": CPU_KV_TOKENS, "device": "cpu"})
    assert EngineConfig().kv_tokens == 0, "the device is not chosen yet"
    assert EngineConfig(device="cuda").kv_tokens == 0
    assert EngineConfig(device="cuda", kv_tokens=4096).kv_tokens == 4096
    for config in (EngineConfig(), EngineConfig(device="cuda"), EngineConfig(device="cuda", kv_tokens=4096)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
        assert msgspec.structs.replace(config, threads=2).kv_tokens == config.kv_tokens


def test_what_was_asked_for_moves_to_another_device_and_defaults_do_not() -> None:
    config = EngineConfig.of({**EngineConfig(threads=2, graph_mb=64).asked(), "device": "cuda"})
    assert config == EngineConfig(device="cuda", threads=2, graph_mb=64)
    assert EngineConfig.of({**EngineConfig(device="cuda").asked(), "device": "cpu"}) == EngineConfig(device="cpu")
    kept = EngineConfig(device="cuda", kv_tokens=4096, overlap=False, host_profile=True)
    assert EngineConfig.of(kept.asked()) == kept
    assert EngineConfig.of({**kept.asked(), "device": "cpu"}).kv_tokens == 4096


def test_paths_follow_the_home_or_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POWER_LAB_HOME", str(tmp_path))
    found = Paths.default()
    assert (found.cache, found.runtime, found.state) == (tmp_path / "cache", tmp_path / "run", tmp_path / "state")
    monkeypatch.delenv("POWER_LAB_HOME")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Paths.default().runtime == tmp_path / "power-lab"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert Paths.default().runtime.parent == Path("/tmp")


def test_other_programs_model_folders_are_found_as_they_find_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "LLAMA_CACHE", "POWER_LAB_MODEL_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = ModelFolders.default()
    assert found.hub == tmp_path / "huggingface" / "hub"
    assert found.extra == ()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert ModelFolders.default().hub == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", "~/hub")
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    monkeypatch.setenv("POWER_LAB_MODEL_PATH", f"{tmp_path}:~/models:")
    assert ModelFolders.default() == ModelFolders(
        Path.home() / "hub", tmp_path / "llama", (tmp_path, Path.home() / "models")
    )
    monkeypatch.setenv("POWER_LAB_MODEL_PATH", "~nobody-of-that-name/models")
    with pytest.raises(ConfigError) as caught:
        ModelFolders.default()
    assert caught.value.key == "POWER_LAB_MODEL_PATH"


def test_a_device_without_an_engine_is_refused_however_the_settings_are_made() -> None:
    with pytest.raises(ConfigError, match="'tpu' has no engine") as caught:
        EngineConfig(device="tpu")  # type: ignore[arg-type]
    assert caught.value.key == "device"


def test_a_home_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="home of a user") as caught:
        user_path("~nobody-of-that-name/x.gguf", "model")
    assert caught.value.key == "model"
    assert user_path("~/x", "model") == Path.home() / "x"

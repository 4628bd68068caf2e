"""Every byte is read and compared with every digest that is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from power_lab import models
from power_lab.engine.config import Paths
from power_lab.errors import ConfigError, DownloadError
from tests.models.test_download import CONTENT, KNOWN, TINY
from tests.models.test_store import rewrite
from tests.models.trees import contents, gguf, repository, shards


def test_a_catalogue_model_is_compared_with_the_catalogue(paths: Paths) -> None:
    with pytest.raises(DownloadError, match="not on this machine"):
        models.verify(["tiny"], paths, False, KNOWN)
    assert models.verify([], paths, False, KNOWN) == []
    paths.models.mkdir(parents=True)
    path = paths.models / "tiny.gguf"
    path.write_bytes(CONTENT)
    models.resolve("tiny", paths, False, KNOWN)
    rewrite(path, b"gguf")
    models.resolve("tiny", paths, False, KNOWN)
    for _ in range(2):
        (found,) = models.verify([], paths, False, KNOWN)
        assert (found.name, found.status, found.against) == ("tiny", "damaged", "catalogue, first reading")
        assert TINY.sha256 in found.detail and found.sha256 != TINY.sha256
    with pytest.raises(DownloadError, match="is not the model 'tiny'"):
        models.resolve("tiny", paths, False, KNOWN)
    path.write_bytes(CONTENT)
    (found,) = models.verify(["tiny"], paths, False, KNOWN)
    assert (found.status, found.sha256, found.detail) == ("ok", TINY.sha256, "")


def test_a_file_is_compared_with_its_first_reading(paths: Paths, tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(gguf())
    seen: list[tuple[str, int, int]] = []
    (first,) = models.verify([str(path)], paths, lambda *step: seen.append(step))
    assert (first.status, first.against, first.size) == ("new", "", path.stat().st_size)
    assert seen[-1] == (f"verifying: {path}", first.size, first.size)
    assert models.verify([str(path)], paths)[0].status == "ok"
    sound = path.read_bytes()
    at = sound.index(b"mit")
    rewrite(path, sound[:at] + b"tim")
    for _ in range(2):
        (found,) = models.verify([str(path)], paths)
        assert (found.status, found.against) == ("damaged", "first reading"), "also when asked again"
    assert models.resolve(str(path), paths).sha256 == found.sha256, "what is loaded is named by its bytes"
    rewrite(path, sound[:at] + b"mit")
    assert models.verify([str(path)], paths)[0].status == "ok"
    rewrite(path, sound[:at] + b"tim", later=1)
    assert models.verify([str(path)], paths)[0].status == "new", "somebody wrote another file"


def test_the_hub_names_bytes_by_their_digests(paths: Paths, saved_folder: Path) -> None:
    hub = paths.others.hub
    assert hub is not None
    snapshot = repository(hub, "org/tiny-llama", contents(saved_folder))
    (found,) = models.verify(["org/tiny-llama"], paths)
    assert (found.status, found.against) == ("ok", "Hugging Face cache")
    for name in ("config.json", "model.safetensors"):
        blob = (snapshot / name).resolve()
        sound = blob.read_bytes()
        blob.write_bytes(sound[:-2] + b" }" if name == "config.json" else sound[:-2] + b"zz")
        (found,) = models.verify(["org/tiny-llama"], paths)
        assert found.status == "damaged" and f"{name} has" in found.detail and blob.name in found.detail
        blob.write_bytes(sound)
    assert models.verify(["org/tiny-llama"], paths)[0].status == "ok"


def test_what_is_missing_or_not_sound_is_damage(paths: Paths, tmp_path: Path) -> None:
    paths.models.mkdir(parents=True)
    shards(paths.models, "gap", 3, leave_out=(2,))
    (paths.models / "short.gguf").write_bytes(gguf()[:-64])
    (paths.models / "alien.gguf").write_bytes(gguf("martian"))
    found = {one.name: one for one in models.verify([], paths)}
    assert {name: one.status for name, one in found.items()} == {"alien": "new", "gap": "damaged", "short": "damaged"}
    assert "missing part 2 of 3" in found["gap"].detail and "tensor" in found["short"].detail
    with pytest.raises(ConfigError, match="neither a known model"):
        models.verify(["nonsense"], paths)

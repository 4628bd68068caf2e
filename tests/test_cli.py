"""The commands as a user types them: real processes, real kernels, real exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.models.trees import gguf


@pytest.fixture
def environment(tmp_path):
    caches = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": "", "LLAMA_CACHE": str(tmp_path / "llama")}
    return {**os.environ, **caches, "POWER_LAB_HOME": str(tmp_path / "home")}


@pytest.fixture
def power_lab(environment, tmp_path):
    """Run a command to its end."""

    def run(*arguments, cwd=tmp_path):
        line = [sys.executable, "-m", "power_lab", *map(str, arguments)]
        return subprocess.run(line, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.fixture
def started(environment, tmp_path):
    """Start a command that goes on; it is ended with the test."""
    running = []

    def start(*arguments):
        line = [sys.executable, "-m", "power_lab", *map(str, arguments)]
        process = subprocess.Popen(
            line, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def notebook(path, *sources):
    cells = [new_markdown_cell("# A title"), *map(new_code_cell, sources)]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def outputs(path):
    return [cell.outputs for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_version_and_help(power_lab):
    assert power_lab("--version").stdout.startswith("power-lab 0.")
    text = power_lab("--help").stdout
    for command in ("lab", "run", "models", "doctor", "warm"):
        assert f"\n    {command} " in text


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["lab", "--port", "70000"], ["run"], ["run", "x.ipynb", "--timeout", "-1"], ["models", "add"]],
    ids=" ".join,
)
def test_wrong_use_is_status_2_without_a_traceback(power_lab, arguments):
    done = power_lab(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert "Traceback" not in done.stderr


class TestRun:
    def test_outputs_are_written_back(self, power_lab, tmp_path):
        path = notebook(tmp_path / "a.ipynb", "x = 20", "print('hi')\nx + 1")
        done = power_lab("run", path, "--kernel", "python3")
        assert done.returncode == 0, done.stderr
        assert "2 of 2 cells" in done.stdout
        assert outputs(path)[1][0].text == "hi\n"
        assert outputs(path)[1][1].data["text/plain"] == "21"

    def test_a_private_notebook_stays_private_and_a_link_a_link(self, power_lab, tmp_path):
        path = notebook(tmp_path / "a.ipynb", "print('secret')")
        path.chmod(0o600)
        link = tmp_path / "link.ipynb"
        link.symlink_to(path)
        assert power_lab("run", link, "--kernel", "python3").returncode == 0
        assert link.is_symlink()
        assert outputs(path)[0][0].text == "secret\n"
        assert path.stat().st_mode & 0o777 == 0o600
        assert not list(tmp_path.glob(".*.part"))

    def test_output_goes_elsewhere_and_json_says_so(self, power_lab, tmp_path):
        path = notebook(tmp_path / "a.ipynb", "import os; print(os.getcwd())")
        before = path.read_bytes()
        done = power_lab("run", path, "--kernel", "python3", "--output", tmp_path / "b.ipynb", "--json", cwd="/")
        found = json.loads(done.stdout)
        assert (found["ok"], found["cells"], found["executed"], found["failures"]) == (True, 1, 1, [])
        assert path.read_bytes() == before
        assert outputs(found["output"])[0][0].text.strip() == str(tmp_path), "cells run in the notebook's folder"

    def test_states_of_our_own_views_are_not_kept_and_those_of_others_are(self, power_lab, tmp_path):
        view = "from power_lab.widgets.view import View; View()"
        path = notebook(tmp_path / "a.ipynb", f"{view}.close() or 1", view.replace("View()", "view = View()"), "0")
        assert power_lab("run", path, "--kernel", "python3").returncode == 0
        assert "_esm" not in path.read_text()
        assert "widgets" not in nbformat.read(path, as_version=4).metadata
        other = notebook(
            tmp_path / "b.ipynb",
            f"{view.replace('View()', 'view = View()')}",
            "import ipywidgets; ipywidgets.IntSlider()",
        )
        assert power_lab("run", other, "--kernel", "python3").returncode == 0
        states = nbformat.read(other, as_version=4).metadata.widgets["application/vnd.jupyter.widget-state+json"].state
        assert {model.model_name for model in states.values()} == {"IntSliderModel", "LayoutModel", "SliderStyleModel"}
        assert len(states) == 3

    def test_a_failing_cell_is_named_with_its_traceback(self, power_lab, tmp_path):
        path = notebook(tmp_path / "a.ipynb", "x = 1", "y = 1 / 0", "print('never')")
        done = power_lab("run", path, "--kernel", "python3")
        assert done.returncode == 1
        assert "cell 3 failed: ZeroDivisionError: division by zero" in done.stderr
        assert "----> 1 y = 1 / 0" in done.stderr
        assert "\x1b[" not in done.stderr
        assert outputs(path)[1][0].ename == "ZeroDivisionError"
        assert outputs(path)[2] == []

    def test_errors_can_be_allowed(self, power_lab, tmp_path):
        path = notebook(tmp_path / "a.ipynb", "1 / 0", "print('on')")
        done = power_lab("run", path, "--kernel", "python3", "--allow-errors", "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, found["ok"], found["executed"]) == (0, True, 2)
        assert [(f["cell"], f["error"]) for f in found["failures"]] == [(2, "ZeroDivisionError")]

    def test_a_cell_that_takes_too_long(self, power_lab, tmp_path):
        path = notebook(tmp_path / "a.ipynb", "import time; time.sleep(60)")
        done = power_lab("run", path, "--kernel", "python3", "--timeout", "0.5", "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, found["failures"][0]["error"]) == (1, "Timeout")
        assert found["seconds"] < 30

    def test_a_kernel_that_dies(self, power_lab, tmp_path):
        path = notebook(tmp_path / "a.ipynb", "import os; os._exit(7)")
        done = power_lab("run", path, "--kernel", "python3")
        assert done.returncode == 1
        assert "cell 2 failed: KernelDied" in done.stderr

    @pytest.mark.parametrize(
        ("name", "text", "says"),
        [
            ("absent.ipynb", None, "no such notebook"),
            ("a.txt", "hello", "not a notebook"),
            ("a.ipynb", "{}", "not a notebook"),
            ("b.ipynb", '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{}]}', "not a notebook"),
        ],
    )
    def test_what_is_no_notebook_is_refused(self, power_lab, tmp_path, name, text, says):
        if text is not None:
            (tmp_path / name).write_text(text)
        done = power_lab("run", name, "--json")
        assert done.returncode == 2
        assert says in json.loads(done.stdout)["error"]["message"]
        assert "Traceback" not in done.stderr

    def test_an_unknown_kernel_is_refused(self, power_lab, tmp_path):
        done = power_lab("run", notebook(tmp_path / "a.ipynb", "1"), "--kernel", "nope")
        assert done.returncode == 2
        assert "'nope' is not installed" in done.stderr
        assert "power-lab doctor" in done.stderr

    def test_ctrl_c_interrupts_the_cell_and_keeps_what_was_done(self, started, tmp_path):
        flag = tmp_path / "running"
        path = notebook(
            tmp_path / "a.ipynb",
            "print('kept')",
            f"import time, pathlib\npathlib.Path({str(flag)!r}).touch()\ntime.sleep(60)",
        )
        process = started("run", path, "--kernel", "python3")
        _wait_for(flag.exists)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "stopped by Ctrl-C" in out
        assert outputs(path)[0][0].text == "kept\n"
        assert outputs(path)[1][0].ename == "KeyboardInterrupt"


class TestModels:
    def test_the_list_says_what_is_here(self, power_lab, tmp_path):
        assert "not here yet: power-lab models add smollm2" in power_lab("models").stdout
        listed = json.loads(power_lab("models", "--json").stdout)
        assert [(entry["name"], entry["present"], entry["license"]) for entry in listed["models"]] == [
            ("smollm2", False, "Apache-2.0"),
            ("gemma3-270m", False, "LicenseRef-Gemma"),
        ]
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "own.gguf").write_bytes(gguf())
        done = power_lab("models", "--path", "mine", "--path", "absent")
        assert "own" in done.stdout
        assert f"{tmp_path / 'absent'}: no such folder" in " ".join(done.stdout.split())
        assert all(len(line.replace(str(tmp_path), "")) <= 80 for line in done.stdout.splitlines()), (
            "only a path is longer"
        )

    def test_a_name_that_is_not_utf_8_is_listed_as_json(self, power_lab, tmp_path):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / os.fsdecode(b"\xff.gguf")).write_bytes(gguf())
        done = power_lab("models", "--path", "mine", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["models"][-1]["status"] == "ready"

    @pytest.mark.parametrize("action", [("add",), ("verify",), ("remove", "--yes")], ids=lambda action: action[0])
    def test_an_unknown_name_is_refused(self, power_lab, action):
        done = power_lab("models", *action, "nonsense", "--json")
        assert done.returncode == 2
        error = json.loads(done.stdout)["error"]
        assert error["kind"] == "ConfigError"
        assert "Known models: smollm2" in error["remedy"]

    def test_add_verify_remove(self, power_lab, tmp_path):
        (tmp_path / "own.gguf").write_bytes(gguf())
        added = json.loads(power_lab("models", "add", "own.gguf", "--json").stdout)
        kept = tmp_path / "home" / "cache" / "models" / "own.gguf"
        assert added["path"] == str(kept)
        assert power_lab("models", "verify").stdout == "ok       own: every byte as expected (first reading)\n"
        before = kept.stat()
        kept.write_bytes(kept.read_bytes().replace(b"mit", b"tim"))
        os.utime(kept, ns=(before.st_atime_ns, before.st_mtime_ns))
        done = power_lab("models", "verify", "--json")
        assert (done.returncode, json.loads(done.stdout)[0]["status"]) == (1, "damaged")
        assert power_lab("models", "verify", "own").stdout.startswith("damaged  own: own.gguf has ")
        asked = power_lab("models", "remove", "own")
        assert (asked.returncode, kept.exists()) == (2, True)
        assert "--yes" in asked.stderr
        assert power_lab("models", "remove", "own", "--yes").returncode == 0
        assert not kept.exists()
        assert (tmp_path / "own.gguf").exists()

    def test_terms_of_use_are_shown_and_need_a_yes(self, power_lab, tmp_path):
        done = power_lab("models", "add", "gemma3-270m", "--json")
        error = json.loads(done.stdout)["error"]
        assert (done.returncode, error["kind"]) == (2, "LicenseNotAccepted")
        assert "https://ai.google.dev/gemma/terms" in error["message"]
        assert "--accept-license" in error["remedy"]
        assert not list((tmp_path / "home").rglob("*.gguf"))

    @pytest.mark.parametrize(("answer", "status"), [("n", 2), ("", 2), ("yes", 0)])
    def test_on_a_terminal_they_are_asked_for(self, monkeypatch, capsys, tmp_path, answer, status):
        """In this process, since a yes would download the model."""
        from power_lab import cli, models
        from power_lab.errors import LicenseNotAccepted

        asked = []

        def add(name, paths, progress, *, link, accept_license):
            asked.append(accept_license)
            if not accept_license:
                raise LicenseNotAccepted("These are the terms.", "Accept them.")
            path = tmp_path / models.CATALOGUE[name].file
            return models.ModelEntry(name=name, path=path, present=True, source="", size=1)

        monkeypatch.setattr(models, "add", add)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda question: answer)
        assert cli.main(["models", "add", "gemma3-270m"]) == status
        said = capsys.readouterr()
        assert "These are the terms." in said.out
        assert asked == [False, True][: 1 + (status == 0)]
        assert (str(tmp_path / "gemma-3-270m.terms.html") in said.out) == (status == 0)


class TestLab:
    def test_serves_on_loopback_with_a_token_until_ctrl_c(self, started, tmp_path):
        (tmp_path / "jupyterlab.py").write_text("raise SystemExit('a file of the working folder was run')")
        process = started("lab", tmp_path / "mine", "--no-browser", "--json")
        found = _first_json(process.stdout)
        assert found["url"].startswith("http://127.0.0.1:")
        assert "?token=" in found["url"]
        address, _, query = found["url"].partition("lab/tree/")
        token = query.partition("?")[2]
        specs = json.load(urllib.request.urlopen(f"{address}api/kernelspecs?{token}"))
        assert specs["default"] == "power_lab"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}api/kernelspecs")
        assert refused.value.code == 403
        refused.value.close()
        command_line = _read(f"/proc/{found['pid']}/cmdline")
        token = token.removeprefix("token=")
        assert token not in command_line, "other users can read command lines"
        assert token not in _read(f"/proc/{found['pid']}/environ"), "kernels inherit it, and notebooks print it"
        log = Path(found["log"])
        assert token not in log.read_text()
        assert log.stat().st_mode & 0o077 == 0, "kernels write what they like to it"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        _wait_for(lambda: not Path(f"/proc/{found['pid']}").exists())

    def test_a_state_folder_that_cannot_be_written_is_named(self, power_lab, environment, tmp_path):
        (tmp_path / "home").write_text("a file")
        done = power_lab("lab", tmp_path / "mine", "--no-browser")
        assert done.returncode == 2
        assert "cannot be written" in done.stderr
        assert "POWER_LAB_HOME" in done.stderr

    def test_what_a_killed_server_of_the_same_number_left_is_not_believed(self, tmp_path, monkeypatch):
        from power_lab import jupyterlab
        from power_lab.errors import PowerLabError

        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setattr(jupyterlab, "_START_S", 0.2)
        (tmp_path / "log").touch()
        with subprocess.Popen(["sleep", "30"]) as server:
            left = tmp_path / f"jpserver-{server.pid}.json"
            left.write_text(json.dumps({"url": "http://127.0.0.1:1/", "token": "old", "password": False}))
            with pytest.raises(PowerLabError, match="did not start"):
                jupyterlab._wait_until_up(server, tmp_path / "log")
            server.kill()

    def test_copies_of_the_notebooks_are_the_users(self, tmp_path):
        from power_lab.jupyterlab import tour_at

        root, tour = tour_at(tmp_path)
        assert root == tmp_path
        assert (root / tour).is_file()
        lesson = root / tour.parent / "lessons" / "speculation.ipynb"
        assert lesson.is_file()
        (root / tour).write_text("mine")
        lesson.write_text("mine too")
        tour_at(tmp_path)
        assert (root / tour).read_text() == "mine"
        assert lesson.read_text() == "mine too"

    def test_a_checkout_opens_its_own_notebooks(self):
        from power_lab.jupyterlab import tour_at

        root, tour = tour_at(None)
        assert str(tour) == "notebooks/tour.ipynb"
        assert (root / "pyproject.toml").is_file()

    def test_access_control_turned_off_is_refused(self, power_lab, environment, tmp_path):
        settings = tmp_path / "jupyter"
        settings.mkdir()
        (settings / "jupyter_server_config.py").write_text("c.IdentityProvider.token = ''\n")
        environment["JUPYTER_CONFIG_DIR"] = str(settings)
        done = power_lab("lab", tmp_path / "mine", "--no-browser")
        assert done.returncode == 2
        assert "turn off token and password" in done.stderr


def _first_json(stream):
    text = ""
    for line in stream:
        text += line
        if line.rstrip() == "}":
            break
    return json.loads(text)


def _read(path):
    with open(path, "rb") as file:
        return file.read().decode()


def _wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)

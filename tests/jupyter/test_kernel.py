"""The kernel as a front end sees it: real kernel and host processes."""

from __future__ import annotations

import json
from pathlib import Path

import power_lab
from power_lab.engine.host.client import HostClient
from power_lab.engine.host.protocol import HostStatus
from tests.hosting import Home, eventually, kill
from tests.jupyter.kernels import Kernel

HEAVY = ("torch", "numba", "numpy", "xarray", "bokeh", "ipywidgets", "anywidget", "tqdm")


def host(home: Home) -> HostStatus | None:
    """The host as an onlooker sees it."""
    client = HostClient.find(home.paths, home.settings)
    if client is None:
        return None
    try:
        return client.status()
    finally:
        client.close()


def running(home: Home, runs: int = 1) -> bool:
    status = host(home)
    return status is not None and sum(engine.runs for engine in status.engines) == runs


def test_the_kernel_says_what_it_is_and_lab_is_ready(start, home: Home):
    kernel = start()
    kernel.client.kernel_info()
    info = kernel.client.get_shell_msg(timeout=30)["content"]
    assert (info["implementation"], info["language_info"]["name"]) == ("power_lab", "python")
    assert "`lab` is ready" in info["banner"]
    assert kernel.run("lab").text == "<Lab: no engine yet; the next call loads 'smollm2'>"
    assert kernel.run("%reset -f").status == "ok"
    assert kernel.run("lab").text.startswith("<Lab")
    assert kernel.run("%who").text.strip() == "Interactive namespace is empty."
    assert kernel.run("%lab").text.startswith("No engine host is running")
    assert not home.hosts(), "looking starts nothing"


def test_nothing_heavy_is_loaded_at_the_start(start):
    assert start().run(f"import sys; print([name for name in {HEAVY} if name in sys.modules])").text == "[]\n"


def test_files_beside_the_notebook_are_the_notebooks_and_not_the_kernels(start, tmp_path: Path):
    for name in ("queue", "platformdirs"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the kernel took a file of the notebook for a module')")
    (tmp_path / "mine.py").write_text("word = 'found'")
    assert start().run("import mine; print(mine.word)").text == "found\n"


def test_what_pages_say_does_not_pile_up(start):
    """Jupyter keeps a digest of each message; a page that looks on sends thousands an hour."""
    done = start().run(
        "session = get_ipython().kernel.session\n"
        "for number in range(20_000): session._add_digest(b'%064d' % number)\n"
        "print(len(session.digest_history))"
    )
    assert 1000 < int(done.text) <= 4096


def test_a_cell_may_name_any_drafter_that_comes_with_the_model(kernel: Kernel, home: Home):
    done = kernel.run("%%generate --speculate dflash --max-tokens 2\nhi")
    assert done.status == "ok" and "loaded with the drafter 'dflash', which comes with the model" in done.text
    status = host(home)
    assert status is not None and [engine.config.draft for engine in status.engines] == ["dflash"]


def test_the_kernelspec_is_whole():
    folder = Path(power_lab.__file__).parent / "jupyter" / "kernelspec"
    spec = json.loads((folder / "kernel.json").read_text())
    assert spec["argv"] == ["python", "-m", "power_lab.jupyter", "-f", "{connection_file}"]
    assert (spec["display_name"], spec["language"], spec["interrupt_mode"]) == ("Power Lab", "python", "signal")
    assert {path.name for path in folder.iterdir()} == {
        "kernel.json",
        "logo-svg.svg",
        "logo-32x32.png",
        "logo-64x64.png",
    }


def test_a_cell_is_a_prompt_and_leaves_one_clean_output(kernel: Kernel):
    assert kernel.run("lab.load('fake')").status == "ok"
    done = kernel.run("%%generate --max-tokens 30 --seed 4 --to answer\nslow: tell me")
    assert done.updates > 1
    (output,) = done.outputs
    record = kernel.run("print(answer.text, answer.record.params['seed'], answer is lab.last)").text
    assert record.strip().endswith("4 True")
    assert output["data"]["text/plain"] == kernel.run("print(repr(answer), end='')").text
    assert "text/html" in output["data"]


def test_a_run_is_shown_once_in_its_cell_and_again_where_it_is_asked_for(kernel: Kernel):
    (bar, only) = kernel.run("lab.generate('hi', max_tokens=3)").outputs
    assert bar["data"]["text/plain"].startswith("Loaded in")
    assert only["kind"] == "display_data"
    assert only["data"] == kernel.run("lab.last").outputs[0]["data"]
    assert [o["kind"] for o in kernel.run("run = lab.generate('hi', max_tokens=3)").outputs] == ["display_data"]
    assert [o["kind"] for o in kernel.run("lab.generate('hi', max_tokens=3, stream=False)").outputs] == [
        "execute_result"
    ]
    assert kernel.run("run = lab.generate('hi', max_tokens=3, stream=False)").outputs == []
    assert [o["kind"] for o in kernel.run("%%generate --quiet --max-tokens 2\nhi").outputs] == ["display_data"]


def test_many_runs_leave_one_line(kernel: Kernel):
    kernel.run("lab.load('fake')")
    (line,) = kernel.run("runs = lab.generate_many(['a', 'b', 'c'], max_tokens=2)").outputs
    assert line["data"]["text/plain"].startswith("3 of 3 runs in")


def test_stop_cancels_the_run_and_the_next_cell_works(kernel: Kernel, home: Home):
    for cell in ("%%generate --max-tokens 100000\nslow", "lab.generate_many(['slow'] * 3, max_tokens=100000)"):
        runs = 3 if "many" in cell else 1
        done = kernel.interrupted(cell, lambda runs=runs: running(home, runs))
        assert (done.status, done.error) == ("error", "KeyboardInterrupt")
        assert running(home, 0)
        assert kernel.run("%%generate --max-tokens 2\nhi").status == "ok"
        if runs == 3:
            line = done.outputs[0]["data"]["text/plain"]
            assert line.startswith("0 of 3 runs in")
            assert "lab.last_many" in line
    assert kernel.run("print(lab.last.finish)").text == "length\n"
    assert len(host(home).engines) == 1


def test_a_stopped_run_shows_what_it_had(kernel: Kernel, home: Home):
    kernel.run("lab.load('fake')")
    done = kernel.interrupted("%%generate --max-tokens 100000\nslow", lambda: running(home))
    assert [output["kind"] for output in done.outputs] == ["display_data", "error"]
    assert "cancelled" in done.outputs[0]["data"]["text/plain"]


def test_a_cell_that_awaits_can_be_stopped(kernel: Kernel, tmp_path):
    begun = tmp_path / "begun"
    done = kernel.interrupted(
        f"import asyncio, pathlib; pathlib.Path({str(begun)!r}).touch(); await asyncio.sleep(3600)", begun.exists
    )
    assert done.status == "error"
    assert kernel.run("1 + 1").text == "2"


def test_a_restarted_kernel_finds_the_engine_loaded(kernel: Kernel, home: Home):
    kernel.run("lab.load('fake')")
    before = host(home)
    for now in (False, True):
        kernel.restart(now=now)
        kernel.use_fake()
        assert kernel.run("lab.load('fake')").text.startswith("<Lab: fake"), "no loading line: it was there"
        assert kernel.run("%%generate --max-tokens 2\nhi").status == "ok"
    after = host(home)
    assert after.pid == before.pid
    assert [(engine.engine, len(engine.clients)) for engine in after.engines] == [(before.engines[0].engine, 1)]


def test_a_killed_kernels_run_ends_and_its_engine_stays(kernel: Kernel, start, home: Home):
    kernel.run("lab.load('fake')")
    kernel.client.execute("lab.generate('slow', max_tokens=100000)")
    eventually(lambda: running(home))
    kernel.kill()
    eventually(lambda: running(home, 0))
    assert host(home).engines[0].clients == ()
    other = start()
    other.use_fake()
    assert other.run("lab.generate('hi', max_tokens=2)").status == "ok"


def test_a_killed_host_is_a_clear_error_and_the_next_cell_starts_another(kernel: Kernel, home: Home):
    kernel.run("lab.load('fake')")
    pid = host(home).pid
    # Else the kernel aborts what comes right after the error, as it would the cells below it.
    kernel.client.execute("lab.generate('slow', max_tokens=100000)", stop_on_error=False)
    eventually(lambda: running(home))
    kill(pid)
    reply = kernel.client.get_shell_msg(timeout=30)["content"]
    assert (reply["ename"], f"pid {pid}" in reply["evalue"]) == ("HostUnavailable", True)
    assert kernel.run("lab.generate('hi', max_tokens=2)").status == "ok"
    assert host(home).pid != pid


def test_two_kernels_share_one_engine(kernel: Kernel, start, home: Home):
    other = start()
    other.use_fake()
    for one in (kernel, other):
        assert one.run("%lab load fake").status == "ok"
    (engine,) = host(home).engines
    assert {client.name for client in engine.clients} == {f"nb-{kernel.pid}", f"nb-{other.pid}"}
    refused = kernel.run("lab.configure(kv_tokens=64)")
    assert refused.error == "EngineInUse"
    assert f"nb-{other.pid} (pid {other.pid})" in refused.text
    assert f"nb-{other.pid}" in kernel.run("%lab shutdown").text
    assert other.run("%lab shutdown").text == "The engine host has ended.\n"


def test_lab_commands(kernel: Kernel):
    assert kernel.run("%lab load fake kv_tokens=128 mode=fast prefix_cache=false").status == "ok"
    assert kernel.run("print(lab.facts.config['kv_tokens'], lab.facts.mode)").text == "128 fast\n"
    assert kernel.run(
        "name = 'fake'\n%lab load {name} kv_tokens=192\nprint(lab.facts.config['kv_tokens'])"
    ).text.endswith("192\n")
    assert "fake" in kernel.run("%lab status").text
    assert "the default" in kernel.run("%lab explain").text
    assert "workspace" in kernel.run("%lab memory").text
    assert kernel.run("%lab configure kv_tokens=64\nprint(lab.facts.config['kv_tokens'])").text.endswith("64\n")
    assert kernel.run("%lab unload").status == "ok"
    for wrong, words in {
        "%lab fly": "Use one of: status, load",
        "%lab status now": "'now' has no meaning",
        "%lab load fake kv_tokens": "Write key=value",
        "%lab load 'fake": "No closing quotation",
        "%lab load fake kvtokens=3": "kvtokens: unknown setting",
    }.items():
        assert words in kernel.run(wrong).text, wrong


def test_wrong_options_are_one_clear_line(kernel: Kernel):
    for wrong, words in {
        "%%generate --maxtokens 3\nhi": "--maxtokens is not an option (did you mean --max-tokens?)",
        "%%generate --max-tokens many\nhi": "invalid int value: 'many'",
        "%%generate --to 1x\nhi": "--to '1x' is not a variable name",
        "%%generate --speculate magic\nhi": "invalid choice: 'magic'",
        "%%generate --stop 'x\nhi": "No closing quotation",
        "%%generate\n  \n": "the cell below this line is the prompt",
        "%%generate --temperature -1\nhi": "temperature",
        "%%generate --tools nowhere\nhi": "--tools 'nowhere' is not a variable",
        "%%generate --template-option x\nhi": "Write key=value",
    }.items():
        done = kernel.run(wrong)
        assert done.status == "error"
        assert words in done.text, wrong
    assert "--cache-key" in kernel.run("%%generate --help\nhi").text


def test_tools_and_template_options_of_a_cell(kernel: Kernel):
    kernel.run("mine = [{'name': 'f'}]")
    done = kernel.run(
        "%%generate --tools mine --template-option enable_thinking=false --template-option effort=low\necho"
    )
    assert done.status == "error", "the fake engine answers with what it was given"
    assert "([{'name': 'f'}], {'enable_thinking': False, 'effort': 'low'})" in done.text


def test_options_are_completed(kernel: Kernel):
    for code, expected in {"%%generate --max-t": "--max-tokens", "%lab sh": "shutdown"}.items():
        kernel.client.complete(code, len(code))
        assert expected in kernel.client.get_shell_msg(timeout=30)["content"]["matches"]


def test_any_ipython_kernel_can_take_the_extension(start):
    kernel = start("stock")
    assert kernel.run("%load_ext power_lab.jupyter\nlab").text.startswith("<Lab")
    kernel.use_fake()
    assert kernel.run("%%generate --max-tokens 2\nhi").status == "ok"
    assert kernel.run("print(run.finish)").text == "length\n"
    other = start("stock")
    assert other.run("lab = 5\n%load_ext power_lab.jupyter\nlab").text == "5"


def test_an_error_of_ours_ends_where_the_cell_calls_us_and_is_kept_whole(kernel: Kernel):
    told = kernel.run('def ask():\n    return lab.generate("hi", max_token=3)\nask()')
    trace = "\n".join(told.outputs[-1]["traceback"])
    assert told.error == "ConfigError" and "max_token" in told.outputs[-1]["evalue"]
    assert trace.count("In[") == 2 and "max_token" in trace, "the notebook's own frames are shown"
    assert "power_lab" not in trace
    assert "keywords.py" in "\n".join(kernel.run("%tb").outputs[-1]["traceback"]), "nothing is lost"
    assert kernel.run("1 / 0").error == "ZeroDivisionError"

"""Life of the kernel and of the engine: ready time, restart to next token, memory before and after 20 restarts.

Uses the installed Power Lab kernel through jupyter_client, as JupyterLab does, with a runtime folder of its own. Times are wall clock from
the request to the message that ends it; memory is what the operating system counts as resident for the engine host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.cpu import about  # noqa: E402

GENERATE = "run = lab.generate('What is the capital of France?', max_tokens={count}, ignore_eos=True, stream=False); print(run.tokens)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="power-lab-life-") as folder:
        result = Life(Path(folder)).measure(args.restarts)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for key, value in result.items():
            print(f"{key:28} {value}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"run": about(args), **result}, indent=1) + "\n")


class Life:
    """One kernel, restarted again and again beside one engine host."""

    def __init__(self, folder: Path) -> None:
        import os

        from power_lab.engine.config import Paths

        paths = Paths.default()  # the user's caches stay in use, the sockets do not
        home = folder / "home"
        (home / "cache").mkdir(parents=True)
        (home / "cache" / "models").symlink_to(paths.models)
        (home / "cache" / "numba").symlink_to(paths.kernels)
        self._env = {**os.environ, "POWER_LAB_HOME": str(home)}
        self._manager = KernelManager(kernel_name="power_lab")

    def measure(self, restarts: int) -> dict[str, Any]:
        start = time.perf_counter()
        self._manager.start_kernel(env=self._env)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        ready = time.perf_counter() - start
        try:
            return {"kernel_ready_s": round(ready, 3), **self._with_engine(restarts)}
        finally:
            self._run("lab.shutdown()")
            self._manager.shutdown_kernel(now=True)

    def _with_engine(self, restarts: int) -> dict[str, Any]:
        load = self._timed("lab.load('smollm2')")
        loaded = self._resident()
        first = self._run(GENERATE.format(count=64))
        host = int(self._run("print(lab.engine.client.pid)"))
        before = self._resident()
        times, ready = [], []
        for _ in range(restarts):
            start = time.perf_counter()
            self._manager.restart_kernel(env=self._env)
            self._client.wait_for_ready(timeout=60)
            ready.append(time.perf_counter() - start)
            self._run(GENERATE.format(count=1))
            times.append(time.perf_counter() - start)
            assert int(self._run("print(lab.engine.client.pid)")) == host, "the engine did not survive the restart"
        assert self._run(GENERATE.format(count=64)) == first, "the answer changed"
        after = self._resident()
        return {
            "load_s": round(load, 3),
            "restart_to_ready_s": round(statistics.median(ready), 3),
            "restart_to_token_s": round(statistics.median(times), 3),
            "restart_to_token_max_s": round(max(times), 3),
            "host_resident_loaded_mb": round(loaded / 1e6, 1),
            "host_resident_before_mb": round(before / 1e6, 1),
            "host_resident_after_mb": round(after / 1e6, 1),
            "host_threads": psutil.Process(host).num_threads(),
            "host_open_files": psutil.Process(host).num_fds(),
            "restarts": restarts,
        }

    def _resident(self) -> int:
        return psutil.Process(int(self._run("print(lab.engine.client.pid)"))).memory_info().rss

    def _timed(self, code: str) -> float:
        start = time.perf_counter()
        self._run(code)
        return time.perf_counter() - start

    def _run(self, code: str) -> str:
        printed: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                printed.append(message["content"]["text"])

        reply = self._client.execute_interactive(code, output_hook=hook, timeout=180)
        if reply["content"]["status"] != "ok":
            raise SystemExit(f"{code}: {reply['content'].get('ename')}: {reply['content'].get('evalue')}")
        return "".join(printed).strip()


if __name__ == "__main__":
    main()

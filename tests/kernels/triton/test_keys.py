"""Kernels have one name in Triton's cache, whatever a process has launched before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, random, sys
from power_lab.kernels.triton import attend, attention, conv, embed, linear, logprobs, middle, moves, norm
from power_lab.kernels.triton import paired, product, rope, sample, share, wide
from power_lab.kernels.triton.ops import settle
from triton.runtime.jit import JITCallable

modules = (attend, attention, conv, embed, linear, logprobs, middle, moves, norm, paired, product, rope, sample, share, wide)
functions = {f"{f.__module__}.{f.__name__}": f for m in modules for f in vars(m).values() if isinstance(f, JITCallable)}
if sys.argv[1] == "settled":
    settle()
names = sorted(functions)
random.Random(int(sys.argv[2])).shuffle(names)
print(json.dumps({name: functions[name].cache_key for name in names}, sort_keys=True))
"""


def keys(how: str, order: int) -> dict[str, str]:
    """Names of all functions, asked for in some order in a process of its own, which compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", SCRIPT, how, str(order)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    return json.loads(done.stdout)


def test_names_do_not_depend_on_the_order_of_launches() -> None:
    found = [keys("settled", order) for order in range(3)]
    assert len(found[0]) > 50
    assert found[0] == found[1] == found[2]


def test_triton_alone_has_several_names_for_a_function() -> None:
    """If this fails, Triton has mended it, and `keys` can go."""
    assert len({json.dumps(keys("as they come", order)) for order in range(3)}) > 1

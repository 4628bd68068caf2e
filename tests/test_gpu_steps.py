"""bench/gpu_steps.py without a GPU: what it tries, and that it leaves the engine's launches as they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu_steps
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import attention, host, linear

ROOT = Path(__file__).resolve().parents[1]


LAYERS = {
    "qwen3-0.6b": ((16, 8, 128), [(3072, 1024, True), (4096, 1024, False), (1024, 3072, False), (1024, 2048, False)]),
    "smollm2-bf16": ((9, 3, 64), [(1536, 576, True), (960, 576, False), (576, 1536, False), (576, 576, False)]),
    "gemma3-270m-bf16": ((4, 1, 256), [(2048, 640, True), (1536, 640, False), (640, 2048, False), (640, 1024, False)]),
    "qwen3-8b": ((32, 8, 128), [(6144, 4096, False), (4096, 4096, False)]),
}


def test_products_are_those_of_the_geometry() -> None:
    assert LAYERS.keys() == gpu_steps.MODELS.keys()
    for name, (heads, products) in LAYERS.items():
        assert gpu_steps.heads_of(name) == heads
        assert list(gpu_steps.products_of(name).values()) == products


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("product", [product for _, products in LAYERS.values() for product in products], ids=str)
def test_candidates_differ_from_what_is_launched_and_from_each_other(product: gpu_steps.Product, rows: int) -> None:
    found = gpu_steps.candidates(product, rows)
    own = linear.shape(product[0], product[1], QuantType.BF16, product[2], rows)
    assert found and own not in found and len(set(found)) == len(found)
    assert all(0 <= shape.used < shape.bn and shape.bm == own.bm for shape in found)
    assert {shape.used for shape in found} > {0}, "whole tiles and others"


def test_only_steps_of_the_batch_are_changed_and_only_inside() -> None:
    before = linear.shape, attention.plan, host.MOST
    product = 6144, 4096, False
    other = linear.Shape(64, 64, 16, 4, 3, used=8)
    change = gpu_steps.Change({product: other}, {"bare": False, "stages": 3}, 0)
    with gpu_steps.launched(change, 1):
        assert linear.shape(6144, 4096, QuantType.BF16, False, 1) == other
        assert linear.shape(6144, 4096, QuantType.BF16, False, 2) != other
        plan = attention.plan(1, 32, 8, 128, 4)
        assert (plan.bare, plan.stages) == (False, 3)
        assert attention.plan(2, 32, 8, 128, 4).bare
        assert host.MOST == 0
    assert before == (linear.shape, attention.plan, host.MOST)


def test_everything_is_compiled_before() -> None:
    """A process of its own, since it has a GPU for Triton."""
    program = (
        "from bench import gpu_steps\n"
        "from power_lab.kernels.triton.variants import DryOps, Variants\n"
        "with Variants(90, None) as found: gpu_steps.rehearse(DryOps())\n"
        "print(len(found))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 100

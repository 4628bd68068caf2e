"""Kernels that begin before the one ahead of them has ended: programmatic dependent launch, for GPUs from compute capability 9.0 on.

A kernel of the chain calls `begin` first, so that the next one may be brought up behind it, then touches what no kernel writes, and calls
`wait` before it reads what another kernel wrote and before it writes anything at all. Every program waits, so a kernel that has ended means
that all before it have. Nothing here decides bits.

No kernel of the chain writes weights and tables, nor the index arrays and sampling controls of a step: they arrive by `host.carry`, which
an event follows, so that the step's first kernel, `embed`, waits for it as for any copy; the others begin behind that one. Keys and values
of earlier steps lie still, too, but in their pages the kernel before may be writing, so they are only prefetched.

Launches take `**options(device)`: the kernel's constexpr `PDL` and the launch attribute.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime.driver import driver


@triton.jit
def begin(PDL: tl.constexpr):
    """From here on the next kernel may occupy what this one leaves free."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Until the kernels before have ended and what they wrote can be read."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Bring the cache lines of these addresses into the L2 cache; none is waited for. All must be readable."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@lru_cache(maxsize=64)
def options(device: torch.device) -> dict[str, bool]:
    """Launch arguments that put a kernel of this device into the chain, or leave it out where that cannot be.

    On torch's `meta` device nothing is launched: kernels are named as Triton's target would have them.
    """
    if device.type == "meta":
        able = driver.active.get_current_target().arch >= 90
    else:
        able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}

"""The machine that code is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from numba.core.registry import cpu_target


@dataclass(frozen=True, slots=True)
class Machine:
    """Target triple, processor name and features ("+avx2,-avx512f,...") in LLVM's words."""

    triple: str
    cpu: str
    features: str

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")


def host() -> Machine:
    """This machine, as Numba compiles for it."""
    return Machine(*map(str, cpu_target.target_context.codegen().magic_tuple()))

"""What followed the longest match of a sequence's end in itself, through Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from power_lab.kernels.triton import recall
from tests.kernels.recalling import CASES, Case, check

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


class Interpreted:
    """The two operations, on tensors of the CPU."""

    def __init__(self) -> None:
        self._scratch: dict[Any, recall.Scratch] = {}

    def asarray(self, host: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(host.copy())

    def tohost(self, array: torch.Tensor) -> np.ndarray:
        return array.numpy()

    def note(self, *arguments: Any) -> None:
        recall.note(*arguments)

    def recall(self, told: torch.Tensor, tables: torch.Tensor, *rest: Any) -> None:
        scratch = self._scratch.setdefault(tables.shape, recall.Scratch(*tables.shape, "cpu"))
        recall.recall(told, tables, *rest, scratch)
        assert not scratch.arrived.any()


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_recalled_tokens_are_the_references(case: Case) -> None:
    check(Interpreted(), case)  # type: ignore[arg-type]

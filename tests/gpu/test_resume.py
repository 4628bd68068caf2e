"""Steps that go on from one another on the device: the kernels' values, alone and in a replayed graph between kernels that read early."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.kernels.triton import moves, resume
from tests.kernels import onward

COUNTS = ([1], [8], [1, 16, 3, 1, 7], [64, 2], [4] * 50)


def on_gpu(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_marks_and_moved_rows_are_the_references(counts: list[int], seed: int) -> None:
    case = onward.case(counts, seed)
    on, want = case.on(on_gpu), onward.resumed(case)
    moved = on.moved(lambda part: torch.full_like(part, onward.POISON))
    resume.resume(on.batch, on.onward, on.marks, on.drafts, on.draws, moved, on.last, on.anchors)
    for name, array in want.items():
        assert np.array_equal(getattr(moved, name).cpu().numpy(), array), name
    again = onward.case(counts, seed)
    marks = again.on(on_gpu)
    resume.mark(marks.batch, marks.onward, marks.drawn, marks.marks)
    assert np.array_equal(marks.marks.cpu().numpy(), onward.marked(again))


def test_kernels_behind_see_moved_rows_although_they_read_before_they_wait() -> None:
    """A tap reads its slots early; in a graph it would begin while rows are still being moved."""
    case = onward.case([4] * 50, 1)
    on, want = case.on(on_gpu), onward.resumed(case)["slots"]
    rows = len(want)
    x, table = torch.randn(rows, 64, device="cuda"), torch.full((1 << 16, 64), torch.nan, device="cuda")
    moved = on.moved(torch.zeros_like)

    def step() -> None:
        for _ in range(3):  # so that the chain is warm
            moves.tap(x, None, None, 0.0, table[:rows], 0, None)
        resume.resume(on.batch, on.onward, on.marks, on.drafts, on.draws, moved, None, None)
        moves.tap(x, None, None, 0.0, table, 0, moved.slots)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(50):
        moved.slots.zero_()
        table.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        written = (~table[rows:].isnan().any(1)).nonzero()[:, 0] + rows
        inside = want[want >= rows]
        assert set(written.tolist()) == set(inside.tolist())

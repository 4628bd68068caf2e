"""What states keep to go back without running tokens again, and where it lies: parts of a `rollback.State`. No torch, and no bytes: they
only say which slot is read, written or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BLANK = -1
"""The slot of a state that has read nothing."""


class Snapshots:
    """Which slot holds a recurrent state after which length.

    A request has `slots` of them: the one in force, and one for each length that a verify of `depth` drafts may be cut to. A pass reads the
    slot in force and writes those that `slots_of` names, so going back copies nothing.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.slots = max(depth + 2, 3)  # three lengths are alive where two plain steps are in flight
        self._held: dict[int, dict[int, int]] = {}

    def begin(self, request_id: int, length: int, rows: int, drafts: int) -> None:
        held = {n: slot for n, slot in self._held.get(request_id, {}).items() if n <= length}
        assert length in held or not length, f"request {request_id} is not after {length} tokens"
        end = length + rows
        fresh = range(max(length + 1, end - min(drafts, self.depth)), end + 1)
        while len(held) + len(fresh) > self.slots:
            del held[min(held)]
        free = [slot for slot in range(self.slots) if slot not in held.values()]
        self._held[request_id] = held | dict(zip(fresh, free, strict=False))

    def slots_of(self, request_id: int, start: int, rows: int) -> list[int]:
        """Where the state goes behind each of these rows; `BLANK` where it is not kept."""
        held = self._held[request_id]
        return [held.get(start + row + 1, BLANK) for row in range(rows)]

    def slot(self, request_id: int, length: int) -> int:
        """Where the state after so many tokens is; `BLANK` of none."""
        return self._held.get(request_id, {}).get(length, BLANK)

    def held(self, request_id: int, length: int) -> int:
        return max((n for n in self._held.get(request_id, ()) if n <= length), default=0)

    def restore(self, request_id: int, length: int) -> None:
        held = self._held.get(request_id, {})
        self._held[request_id] = {n: slot for n, slot in held.items() if n <= length}

    def end(self, request_id: int) -> None:
        self._held.pop(request_id, None)


class Ring:
    """A window's ring of rows, position p in slot p % size, and the rows that a verify overwrites.

    These are set aside in `spare` further slots of a request behind the ring's, one for each row of a verify of `depth` drafts. Where more
    rows were written, only the last lengths are held, and 0.

    Args:
        size: rows of the ring. depth: see `State`.
        move: copies rows of a request from slots to as many others, the two sets being disjoint.
    """

    def __init__(self, size: int, depth: int, move: Callable[[int, Sequence[int], Sequence[int]], None]) -> None:
        self.size, self.depth = size, depth
        self.spare = max(depth + 1, 2)  # two plain steps may be in flight
        assert self.spare <= size, f"a ring of {size} rows cannot be verified {depth} drafts at once"
        self._move = move
        self._reach: dict[
            int, tuple[int, int]
        ] = {}  # shortest length that can be gone back to, and rows that may be written

    def begin(self, request_id: int, length: int, rows: int, drafts: int) -> None:
        low, end = self._reach.get(request_id, (0, 0))[0], length + rows
        # A chunk that goes around overwrites rows of its own, which nothing brings back.
        low = max(low, end - self.spare if rows <= self.size else end)
        low = 0 if low <= self.size else low  # the first time around overwrites nothing
        self._reach[request_id] = (low, length)
        self._aside(request_id, max(length, low), end, back=False)
        self._reach[request_id] = (low, end)

    def held(self, request_id: int, length: int) -> int:
        low, end = self._reach.get(request_id, (0, 0))
        return min(length, end) if min(length, end) >= low else 0

    def restore(self, request_id: int, length: int) -> None:
        low, end = self._reach.get(request_id, (0, 0))
        if length:
            self._aside(request_id, length, end, back=True)
        self._reach[request_id] = (low, min(length, end)) if length else (0, 0)

    def end(self, request_id: int) -> None:
        self._reach.pop(request_id, None)

    def _aside(self, request_id: int, start: int, end: int, *, back: bool) -> None:
        """Copy what lies where rows of these positions go to the spare slots, or back."""
        positions = range(max(start, self.size), end)
        ring = [p % self.size for p in positions]
        aside = [self.size + p % self.spare for p in positions]
        if positions:
            self._move(request_id, aside if back else ring, ring if back else aside)

"""Toy states, of each kind that there is: what they are after n tokens is one number, and they fail where they are told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from power_lab.engine.speculation.snapshots import BLANK, Ring, Snapshots

Tick = Callable[[], None]
"""Called wherever a fault may come; raises where one does."""

EVERY = 5  # tokens between two checkpoints
WIDE = 8  # tokens of a window


def fold(tokens: Sequence[int], state: int = 17) -> int:
    for token in tokens:
        state = (state * 1_000_003 ^ token + 1) % (1 << 61)
    return state


class Recurrent:
    """A fold over all tokens: no length brings it back."""

    name = "recurrent"

    def __init__(self, depth: int, tick: Tick = lambda: None) -> None:
        self.depth, self.tick = depth, tick
        self.snapshots = Snapshots(depth)
        self.slots: dict[tuple[int, int], int] = {}
        self.replays: list[tuple[int, int]] = []  # first token, tokens

    def begin(self, request_id: int, length: int, rows: int, drafts: int) -> None:
        self.tick()
        self.snapshots.begin(request_id, length, rows, drafts)
        self.tick()

    def held(self, request_id: int, length: int) -> int:
        return self.snapshots.held(request_id, length)

    def restore(self, request_id: int, length: int) -> None:
        self.tick()
        self.snapshots.restore(request_id, length)
        self.tick()

    def replay(self, request_id: int, start: int, tokens: Sequence[int]) -> None:
        self.run(request_id, start, tokens)
        self.replays.append((start, len(tokens)))

    def end(self, request_id: int) -> None:
        self.snapshots.end(request_id)

    def run(self, request_id: int, start: int, tokens: Sequence[int]) -> list[int]:
        """Rows of a pass; what it is behind each of them."""
        return self.prepare(request_id, start, len(tokens))(tokens)

    def prepare(self, request_id: int, start: int, rows: int) -> Callable[[Sequence[int]], list[int]]:
        """The same for a device that runs behind its host, which has decided on the slots."""
        source, slots = self.snapshots.slot(request_id, start), self.snapshots.slots_of(request_id, start, rows)

        def write(tokens: Sequence[int]) -> list[int]:
            state, found = fold([]) if source == BLANK else self.slots[request_id, source], []
            for token, slot in zip(tokens, slots, strict=True):
                self.tick()
                state = fold([token], state)
                found.append(state)
                if slot != BLANK:
                    assert 0 <= slot < self.snapshots.slots
                    self.slots[request_id, slot] = state
            return found

        return write

    def value(self, request_id: int, length: int) -> int:
        slot = self.snapshots.slot(request_id, length)
        assert (slot == BLANK) == (length == 0), f"not after {length} tokens"
        return fold([]) if slot == BLANK else self.slots[request_id, slot]

    @staticmethod
    def plain(tokens: Sequence[int]) -> int:
        return fold(tokens)


class Windowed(Recurrent):
    """The last tokens, in a ring that is no longer than they are."""

    name = "windowed"

    def __init__(self, depth: int, tick: Tick = lambda: None) -> None:
        self.depth, self.tick, self.replays = depth, tick, []
        self.ring = Ring(WIDE, depth, self._move)
        self.rows: dict[int, list[int]] = {}

    def begin(self, request_id: int, length: int, rows: int, drafts: int) -> None:
        self.rows.setdefault(request_id, [-1] * (WIDE + self.ring.spare))
        self.tick()
        self.ring.begin(request_id, length, rows, drafts)
        self.tick()

    def held(self, request_id: int, length: int) -> int:
        return self.ring.held(request_id, length)

    def restore(self, request_id: int, length: int) -> None:
        self.tick()
        self.ring.restore(request_id, length)
        self.tick()

    def end(self, request_id: int) -> None:
        self.ring.end(request_id)

    def prepare(self, request_id: int, start: int, rows: int) -> Callable[[Sequence[int]], list[int]]:
        return partial(self.run, request_id, start)

    def run(self, request_id: int, start: int, tokens: Sequence[int]) -> list[int]:
        found = []
        for at, token in enumerate(tokens, start):
            self.tick()
            self.rows[request_id][at % WIDE] = token
            found.append(self.value(request_id, at + 1))
        return found

    def value(self, request_id: int, length: int) -> int:
        return fold([self.rows[request_id][p % WIDE] for p in range(max(0, length - WIDE), length)])

    def _move(self, request_id: int, source: Sequence[int], target: Sequence[int]) -> None:
        assert len(source) == len(target) <= self.ring.spare and not {*source} & {*target}
        for one, other in zip(source, target, strict=True):
            self.tick()
            self.rows[request_id][other] = self.rows[request_id][one]

    @staticmethod
    def plain(tokens: Sequence[int]) -> int:
        return fold(tokens[-WIDE:])


class Checkpointed(Recurrent):
    """A fold that is kept at multiples of some tokens only, the last two of them: what is refused has to be run again."""

    name = "checkpointed"

    def __init__(self, depth: int = 0, tick: Tick = lambda: None) -> None:
        self.depth, self.tick, self.replays = 0, tick, []
        self.kept: dict[int, dict[int, int]] = {}
        self.now: dict[int, tuple[int, int]] = {}

    def begin(self, request_id: int, length: int, rows: int, drafts: int) -> None:
        self.tick()
        kept = self.kept.setdefault(request_id, {})
        for old in sorted(kept)[:-2]:
            del kept[old]
        assert self.now.setdefault(request_id, (0, fold([])))[0] == length
        self.tick()

    def held(self, request_id: int, length: int) -> int:
        return max((n for n in self._all(request_id) if n <= length), default=0)

    def restore(self, request_id: int, length: int) -> None:
        self.tick()
        self.now[request_id] = (length, self._all(request_id)[length] if length else fold([]))
        self.tick()
        self.kept[request_id] = {n: state for n, state in self.kept.get(request_id, {}).items() if n <= length}

    def end(self, request_id: int) -> None:
        self.kept.pop(request_id, None)
        self.now.pop(request_id, None)

    def prepare(self, request_id: int, start: int, rows: int) -> Callable[[Sequence[int]], list[int]]:
        return partial(self.run, request_id, start)

    def run(self, request_id: int, start: int, tokens: Sequence[int]) -> list[int]:
        state, found = self.value(request_id, start), []
        for at, token in enumerate(tokens, start + 1):
            self.tick()
            state = fold([token], state)
            found.append(state)
            self.now[request_id] = (at, state)
            if not at % EVERY:
                self.kept[request_id][at] = state
        return found

    def value(self, request_id: int, length: int) -> int:
        at, state = self.now.get(request_id, (0, fold([])))
        assert at == length, f"after {at} tokens and not {length}"
        return state

    def _all(self, request_id: int) -> dict[int, int]:
        now = dict([self.now[request_id]]) if request_id in self.now else {}
        return now | self.kept.get(request_id, {})


class Paged:
    """Rows that are read up to a length: nobody tells it of one."""

    name = "paged"

    def __init__(self, tick: Tick = lambda: None) -> None:
        self.tick = tick
        self.rows: dict[int, list[int]] = {}

    def run(self, request_id: int, start: int, tokens: Sequence[int]) -> list[int]:
        rows = self.rows.setdefault(request_id, [])
        found = []
        for at, token in enumerate(tokens, start):
            self.tick()
            rows[at : at + 1] = [token]
            found.append(self.value(request_id, at + 1))
        return found

    def value(self, request_id: int, length: int) -> int:
        rows = self.rows.get(request_id, [])
        assert len(rows) >= length
        return fold(rows[:length])

    @staticmethod
    def plain(tokens: Sequence[int]) -> int:
        return fold(tokens)

"""An operation table that remembers what was recorded and replayed: a step's graph, and the operations in it, timed alone."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.floors import seconds
from power_lab.kernels.ops import Array, Graph, Ops, Weight

ASIDE = ("empty", "parts", "asarray", "tohost", "weight", "vector", "kv_cache", "rope_tables", "digest", "reasons")
"""Methods of a table that are no operations of a step."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a step. weight_bytes: of the matrices it reads."""

    label: str
    run: Callable[[], Any]
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """Operations of one kind in a step: how many, seconds of all together, bytes of the matrices that they read."""

    label: str
    calls: int
    seconds: float
    weight_bytes: int


class Spy:
    """Stands in for an `Ops`.

    Args:
        ops: the table that does the work.

    Attributes:
        launches: seconds of the host's time that the last replays took to be launched.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._calls: list[Call] | None = None  # of the forward pass that is being recorded
        self._of: dict[int, list[Call]] = {}
        self._replays: Counter[Graph] = Counter()
        self._hook: tuple[int, Callable[[Graph], None]] | None = None
        self.launches: deque[float] = deque(maxlen=100)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if self._calls is None or name in ASIDE or not callable(found):
            return found
        return partial(self._note, name, found)

    def capture(self, forward: Callable[[], Array], *args: Any, **options: Any) -> tuple[Graph, Array] | None:
        calls: list[Call] = []

        def noted() -> Array:
            calls.clear()
            self._calls = calls
            try:
                return forward()
            finally:
                self._calls = None

        captured = self._ops.capture(noted, *args, **options)
        if captured is not None:
            self._of[id(captured[0])] = calls
        return captured

    def replay(self, graph: Graph) -> None:
        self._replays[graph] += 1
        if self._hook is not None and self._replays[graph] == self._hook[0]:
            (_, hook), self._hook = self._hook, None
            hook(graph)
        begun = time.perf_counter()
        self._ops.replay(graph)
        self.launches.append(time.perf_counter() - begun)

    def on_replay(self, count: int, hook: Callable[[Graph], None]) -> None:
        """Call `hook` once, when some graph is replayed for the count-th time from now: only then do its arrays hold what belongs to it."""
        self._replays.clear()
        self._hook = count, hook

    def graph_seconds(self, device: str, graph: Graph, repeats: int = 50) -> float:
        """Seconds of one replay, back to back with others, without the host in between. In a hook."""
        self._ops.replay(graph)
        return seconds(device, lambda: self._ops.replay(graph), repeats)

    def shares(self, device: str, graph: Graph, repeats: int = 20) -> list[Share]:
        """Where the graph's time goes: the operations of each kind, recorded without the others, longest first. In a hook.

        Between one operation and its next run lie all others of its kind, so that weights come from memory as they do in the step.
        """
        groups: dict[str, list[Call]] = defaultdict(list)
        for call in self._of[id(graph)]:
            groups[call.label].append(call)
        shares = []
        for label, calls in groups.items():
            captured = self._ops.capture(partial(_all, calls))
            if captured is not None:
                time = self.graph_seconds(device, captured[0], repeats)
                shares.append(Share(label, len(calls), time, sum(call.weight_bytes for call in calls)))
        return sorted(shares, key=lambda share: -share.seconds)

    def _note(self, name: str, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        assert self._calls is not None
        weights = [w for arg in args for w in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(w, Weight)]
        size = "" if not weights or name == "embed" else f" {sum(w.rows for w in weights)} x {weights[0].cols}"
        read = 0 if name == "embed" else sum(w.data.nbytes for w in weights)
        self._calls.append(Call(name + size, partial(operation, *args, **options), read))
        return operation(*args, **options)


def _all(calls: list[Call]) -> None:
    for call in calls:
        call.run()

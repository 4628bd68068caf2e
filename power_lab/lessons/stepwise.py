"""An engine in this process that serves several requests and moves one step at a time, keeping what each step was: the lessons' film.

It is the engine that serves notebooks, with an observer. `Microscope` looks at the rounds of one request; this looks at a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.inspection import StepRecord
from power_lab.engine.loader import load
from power_lab.engine.models.spec import ModelSpec
from power_lab.engine.plan import StepPlan
from power_lab.engine.request import Prompt
from power_lab.engine.shapes import Coverage
from power_lab.engine.ticket import Ticket
from power_lab.engine.trace import BlockState
from power_lab.errors import ConfigError
from power_lab.kernels.ops import BLOCK, Array, Batch, KVCache
from power_lab.keywords import sampling
from power_lab.run import Run
from power_lab.widgets.inspect import Inspect


@dataclass(frozen=True)
class Part:
    """What one request had in a step.

    Attributes:
        name: of the request. phase: `prefill`, `decode` or `verify`. rows: its token rows.
        start: position of the first of them. table: its block table. preempted: its blocks were taken away in this step; it has no rows.
    """

    name: str
    phase: str
    rows: int
    start: int
    table: tuple[int, ...]
    preempted: bool = False


@dataclass(frozen=True)
class Frame:
    """One step, and the pool behind it.

    Attributes:
        number: of the step, from 0. parts: the requests that had rows, or were preempted, in order.
        waiting: names in the queue behind the step. ended: names that ended with it.
        blocks: every block. names: number of a request -> its name, for the owners of blocks.
        record: rows, shape and times of the step.
    """

    number: int
    parts: tuple[Part, ...]
    waiting: tuple[str, ...]
    ended: tuple[str, ...]
    blocks: tuple[BlockState, ...]
    names: Mapping[int, str]
    record: StepRecord

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def part(self, name: str) -> Part | None:
        return next((part for part in self.parts if part.name == name), None)


@dataclass(frozen=True, eq=False)
class Attended:
    """One row of one layer's attention: what went in and what the kernel made of it.

    Attributes:
        name: of the request. layer, position: which row. table: block ids of its pages.
        q: f32 [heads, dim]. out: f32 [heads, dim]. scale: of the scores. window: last keys seen, 0 for all.
        keys: f32 [pages, KV heads, dim, 64], values: f32 [pages, KV heads, 64, dim]: copies of the table's pages, in its order.
    """

    name: str
    layer: int
    position: int
    table: tuple[int, ...]
    q: np.ndarray
    out: np.ndarray
    scale: float
    window: int
    keys: np.ndarray
    values: np.ndarray

    def dense(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values without pages: f32 [position + 1, KV heads, dim] each."""
        return dense(self.keys, self.values, self.position + 1)


Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, float, int], np.ndarray]
"""q f32 [heads, dim], keys and values f32 [n, KV heads, dim], scale, rows of the step -> f32 [heads, dim]."""


class Stepwise:
    """An engine of its own for several requests. Closes with `close()` or a `with` block.

    Args:
        model, settings: as for `lab.load`. paths: this user's directories.
        buckets: pad steps to these row counts, as engines on GPUs do; none: every count of rows as it is.
        attention: layer whose attention is kept, row by row; None for none. Steps then run operation by operation.
        instead: computes the attention of every row of every layer in the kernel's place, slowly; for models without further rules.

    Attributes:
        engine: the engine; nothing moves unless it is stepped. frames: the steps so far.
        logits: name -> position of the token that they draw -> f32 [V].
        attended: that layer's rows so far, the last of each request and step.

    Raises:
        ConfigError, and what loading raises.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        paths: Paths | None = None,
        buckets: tuple[int, ...] = (),
        attention: int | None = None,
        instead: Attention | None = None,
        **settings: Any,
    ) -> None:
        listening = attention is not None or instead is not None
        recording = {"graph_mb": 0} if listening else {}  # a recorded step calls no operation that could be listened to
        config = EngineConfig.of({"model": model, "draft": "", "device": "cpu", **settings, **recording})
        padded = Coverage(buckets).rows if buckets else ()  # refused before anything is loaded
        self._loaded = load(config, paths or Paths.default(), lambda *_: None)
        self._ops = self._loaded.model.ops
        if padded:
            self._ops.row_buckets = padded  # of this operation table, which nobody else has
        self._tickets: dict[str, Ticket] = {}
        self._open: dict[str, int] = {}  # name -> id of requests that have not ended
        self._names: dict[int, str] = {}
        self._plans: list[StepPlan] = []  # of the step at hand: one, or none
        self._layer, self._calls = attention, 0
        self._heard: tuple[np.ndarray, np.ndarray, float, int, KVCache] | None = None
        self._closed = False
        self._inspect = Inspect(self)
        self.frames: list[Frame] = []
        self.logits: dict[str, dict[int, np.ndarray]] = {}
        self.attended: list[Attended] = []
        self._attend, self._instead = self._ops.attention, instead
        if listening:
            self._ops.attention = self._listen
        self.engine = Engine(config, loaded=self._loaded, threaded=False, observer=self._observe)

    def submit(self, name: str, prompt: Prompt, *, chat: bool | None = None, cache_key: str = "", **params: Any) -> Ticket:
        """Queue a request under a name; `step()` moves it. Other arguments as for `lab.generate`.

        Raises ConfigError for a name that a live request has, and what `lab.generate` raises.
        """
        if name in self._open:
            raise ConfigError("name", f"{name!r} is still running", "Use another name, or let it end.")
        wanted = sampling({"speculate": "off", **params})
        ticket = self.engine.submit(
            prompt, wanted, chat=chat, cache_key=cache_key, on_done=lambda _: self._open.__delitem__(name)
        )
        self._open[name], self._names[ticket.id], self._tickets[name] = ticket.id, name, ticket
        self.logits[name] = {}
        return ticket

    def step(self, count: int = 1) -> Frame | None:
        """Some steps. The last one, None where there was nothing to do."""
        frame = None
        for _ in range(count):
            frame = self._one()
            if frame is None:
                return None
        return frame

    def run(self) -> dict[str, Run]:
        """Step until nothing is left to do. Name -> run of the latest request of that name."""
        while self.step() is not None:
            pass
        return {name: Run(ticket.result()) for name, ticket in self._tickets.items()}

    def generate(self, name: str, prompt: Prompt, **options: Any) -> Run:
        """Submit and run to the end, with whatever else is there."""
        ticket = self.submit(name, prompt, **options)
        while name in self._open:
            self.step()
        return Run(ticket.result())

    def attend(self, rows: Sequence[Attended], window: int = 0) -> list[np.ndarray]:
        """The engine's own kernel on rows that were kept, all in one call: f32 [heads, dim] of each.

        Their pages are put into a pool in another order than the engine had. window: as of the layer.
        """
        pages = [len(row.table) for row in rows]
        order = 1 + np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
        tables = np.zeros((len(rows), max(pages)), np.int32)
        heads, dim = rows[0].keys.shape[1:3]
        cache = self._ops.kv_cache(1 + sum(pages), heads, dim)
        first = 0
        for at, row in enumerate(rows):
            tables[at, : pages[at]] = mine = order[first : first + pages[at]]
            cache.keys[mine], cache.values[mine] = row.keys, row.values
            first += pages[at]
        count = np.arange(len(rows), dtype=np.int32)
        places = np.array([row.position for row in rows], np.int32)
        batch = Batch(ids=count, positions=places, slots=places.astype(np.int64), table_of=count, tables=tables, sampled=count)
        queries = np.stack([row.q.reshape(-1) for row in rows])
        out = np.empty_like(queries)
        self._attend(queries, batch, rows[0].q.shape[0], rows[0].scale, cache, out, window)
        return list(out.reshape(len(rows), *rows[0].q.shape))

    @property
    def inspect(self) -> Inspect:
        """The inspectors, as `lab.inspect` has them, of this engine."""
        return self._inspect

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes."""
        return self._loaded.model.spec

    def piece(self, token: int) -> str:
        """The text of one token as it decodes alone."""
        return self._loaded.tokenizer.piece(token)

    def close(self) -> None:
        """End the engine and give its memory back."""
        if self._closed:
            return
        self._closed = True
        self.engine.close()
        self._loaded.model.release()
        self._ops.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- listening ----------------------------------------------------------------------------------------------------------------

    def _one(self) -> Frame | None:
        before = tuple(self._open)
        self._plans.clear()
        if not self.engine.step():
            return None
        plan = self._plans[-1] if self._plans else None
        if plan is None:  # it only ended requests, such as cancelled ones
            return self.frames[-1] if self.frames else None
        parts = [Part(self._names[s.request_id], s.phase, s.rows, s.start, s.blocks) for s in plan.spans]
        parts += [Part(self._names[i], "", 0, 0, (), preempted=True) for i in plan.preempted]
        blocks = self.engine.blocks()
        holding = {owner for block in blocks for owner in block.owners}
        self.frames.append(
            Frame(
                number=len(self.frames),
                parts=tuple(parts),
                waiting=tuple(name for name, request in self._open.items() if request not in holding),
                ended=tuple(name for name in before if name not in self._open),
                blocks=blocks,
                names={owner: self._names[owner] for owner in holding},
                record=self.engine.steps()[-1],
            )
        )
        return self.frames[-1]

    def _observe(self, plan: StepPlan, logits: np.ndarray) -> None:
        """Between a forward pass and its draws."""
        self._plans.append(plan)
        row = 0
        for span in plan.spans:
            first = span.start + span.rows - span.sampled + 1
            kept = self.logits[self._names[span.request_id]]
            for at in range(span.sampled):
                kept[first + at] = logits[row + at].copy()
            row += span.sampled
        if self._layer is not None:
            self.attended += self._attended(plan)

    def _listen(
        self, qkv: Array, batch: Batch, q_heads: int, scale: float, cache: KVCache, out: Array, *rules: Any, **named: Any
    ) -> None:
        """The operation itself; of the layer that is looked at, what it was given and what it made."""
        if self._instead is None:
            self._attend(qkv, batch, q_heads, scale, cache, out, *rules, **named)
        else:
            self._replace(self._instead, qkv, batch, q_heads, scale, cache, out)
        layer = self._calls % len(self._loaded.model.spec.layers)
        self._calls += 1
        if layer == self._layer:
            window = named.get("window", rules[0] if rules else 0)
            queries = qkv[:, : q_heads * cache.head_dim].reshape(-1, q_heads, cache.head_dim)
            self._heard = queries.copy(), out.reshape(queries.shape).copy(), scale, window, cache

    @staticmethod
    def _replace(
        attend: Attention, qkv: Array, batch: Batch, q_heads: int, scale: float, cache: KVCache, out: Array
    ) -> None:
        for row, position in enumerate(batch.positions):
            pages = batch.tables[batch.table_of[row]][: position // BLOCK + 1]
            keys, values = dense(cache.keys[pages], cache.values[pages], int(position) + 1)
            query = qkv[row, : q_heads * cache.head_dim].reshape(q_heads, -1)
            out[row] = attend(query, keys, values, scale, len(out)).reshape(-1)

    def _attended(self, plan: StepPlan) -> Iterator[Attended]:
        """The last row of every request in a step; rows inside of prompts would be many."""
        assert self._heard is not None and self._layer is not None
        queries, outputs, scale, window, cache = self._heard
        row = -1
        for span in plan.spans:
            row += span.rows
            position = span.start + span.rows - 1
            table = span.blocks[: position // BLOCK + 1]
            pages = list(table)
            yield Attended(
                name=self._names[span.request_id],
                layer=self._layer,
                position=position,
                table=tuple(table),
                q=queries[row],
                out=outputs[row],
                scale=scale,
                window=window,
                keys=cache.keys[pages],
                values=cache.values[pages],
            )


def dense(keys: np.ndarray, values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages [n, KV heads, dim, 64] of keys and [n, KV heads, 64, dim] of values as [count, KV heads, dim] each."""
    heads, dim = keys.shape[1:3]
    return (
        keys.transpose(0, 3, 1, 2).reshape(-1, heads, dim)[:count],
        values.transpose(0, 2, 1, 3).reshape(-1, heads, dim)[:count],
    )

"""An engine in this process that moves one step at a time and keeps what was drawn from: every logit of target and drafter.

It is the engine that serves notebooks, with an observer; only the operation that draws tokens is listened to. A row of a 49,152-token
vocabulary is 196 kB, so it is for looking at a few dozen tokens and not for work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np

from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded, load
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.request import Finish, Prompt
from power_lab.engine.scheduler import Outcome
from power_lab.engine.speculation.drafters.neural.noise import gumbel
from power_lab.engine.speculation.transaction import match
from power_lab.engine.ticket import Ticket
from power_lab.engine.trace import BlockState
from power_lab.kernels.ops import BLOCK, Array, SampleRows
from power_lab.kernels.ops import Draw as Drawing
from power_lab.keywords import sampling
from power_lab.run import Run


@dataclass(frozen=True, eq=False)
class Draw:
    """One token, drawn from one row of logits.

    Attributes:
        position: absolute, of the token; it and the seed key the noise.
        logits: f32 [V], -inf for what the drawing model cannot say.
        token: what was drawn.
        temperature: 0 is greedy; seed: of the request.
    """

    position: int
    logits: np.ndarray
    token: int
    temperature: float
    seed: int

    @cached_property
    def scores(self) -> np.ndarray:
        """f64 [V]: log-probabilities at the temperature (at 1 where that is 0)."""
        scaled = self.logits.astype(np.float64) / (self.temperature or 1.0)
        scaled -= scaled.max()
        return scaled - np.log(np.exp(scaled).sum())

    @property
    def probabilities(self) -> np.ndarray:
        """f64 [V], which sum to 1."""
        return np.exp(self.scores)

    def probability(self, token: int) -> float:
        return float(np.exp(self.scores[token]))

    def top(self, count: int) -> list[int]:
        """The likeliest tokens, the best one first."""
        return np.argsort(-self.logits, kind="stable")[:count].tolist()

    def noise(self, tokens: Sequence[int]) -> np.ndarray:
        """f64 [n]: what is added to the scores of these tokens; zeros where nothing is, at temperature 0."""
        if not self.temperature:
            return np.zeros(len(tokens))
        return gumbel(self.seed, self.position, np.asarray(tokens, np.int64))


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a verified window.

    Attributes:
        draft: the token that was guessed for this position, None in the last row, whose draw is the bonus.
        target: the target's draw. drafter: what the drafter drew from, where it has logits.
        verdict: `kept`; `refused`, where the target's draw stands; `unused` behind that; `bonus` in the last row.
    """

    draft: int | None
    target: Draw
    drafter: Draw | None
    verdict: str

    @property
    def position(self) -> int:
        return self.target.position


@dataclass(frozen=True, eq=False)
class Window:
    """One round: rows in one pass of the target, and what became of them.

    Attributes:
        number: of the round. anchor: the last committed token, which is the first row's input.
        rows: drafts + 1 of them. accepted: drafts that were kept. emitted: what was committed.
        start: position of the anchor, whose keys and values this pass writes. blocks: the request's block table.
    """

    number: int
    anchor: int
    rows: tuple[Row, ...]
    accepted: int
    emitted: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]

    @property
    def drafts(self) -> tuple[int, ...]:
        return tuple(row.draft for row in self.rows if row.draft is not None)

    @property
    def committed(self) -> int:
        """Positions whose keys and values count after the round: the cursor."""
        return self.start + 1 + self.accepted

    def slot(self, position: int) -> tuple[int, int]:
        """(block, place in it) where the keys and values of a position lie."""
        return self.blocks[position // BLOCK], position % BLOCK


@dataclass
class _Seen:
    """What was heard since the last committed step."""

    plan: StepPlan | None = None
    drafter: dict[int, Draw] = field(default_factory=dict)  # by position


class Microscope:
    """An engine of its own, for one request at a time. Closes with `close()` or a `with` block.

    Args:
        model, settings: as for `lab.load`. paths: this user's directories.
        loaded: a model that is in memory already, such as `load_ordinary()`. It ends with this.

    Attributes:
        engine: the engine; nothing moves unless it is stepped. windows: the rounds of the latest request.

    Raises:
        ConfigError, and what loading raises.
    """

    def __init__(
        self, model: str = "smollm2", *, paths: Paths | None = None, loaded: Loaded | None = None, **settings: Any
    ) -> None:
        config = EngineConfig.of({"model": model, **settings})
        self._loaded = loaded or load(config, paths or Paths.default(), lambda *_: None)
        self._seen = _Seen()
        self._interrupting = self._closed = False
        self.windows: list[Window] = []
        ops = self._loaded.model.ops
        self._sample, self._ops = ops.sample, ops
        ops.sample = self._listen  # of this operation table, which nobody else has
        self.engine = Engine(config, loaded=self._loaded, threaded=False, observer=self._observe)

    def start(self, prompt: Prompt, **params: Any) -> Ticket:
        """Queue a request; `step()` moves it. Arguments as for `lab.generate`."""
        self.windows = []
        self._seen = _Seen()
        return self.engine.submit(prompt, sampling(params))

    def step(self) -> bool:
        """One step: a piece of the prompt, or a round. False when there is nothing to do."""
        return self.engine.step()

    def generate(self, prompt: Prompt, **params: Any) -> Run:
        """Run a request to its end. `windows` then has its rounds."""
        return Run(self.start(prompt, **params).result())

    def interrupt_next(self) -> None:
        """Raise KeyboardInterrupt in the middle of the next step: the rows are computed and written, nothing is committed."""
        self._interrupting = True

    def next_draw(self, tokens: Sequence[int]) -> Draw:
        """What the target makes of a text given as token ids."""
        self.start([int(token) for token in tokens], max_tokens=1, speculate="off").result()
        return self.windows[-1].rows[-1].target

    def piece(self, token: int) -> str:
        """The text of one token as it decodes alone."""
        return self._loaded.tokenizer.piece(token)

    def blocks(self) -> tuple[BlockState, ...]:
        """Every KV block now, for `Inspect(scope).blocks()`."""
        return self.engine.blocks()

    def close(self) -> None:
        """End the engine and give its memory back."""
        if self._closed:
            return
        self._closed = True
        self.engine.close()
        self._loaded.model.release()
        if self._loaded.trained is not None:
            self._loaded.trained.release()
        self._ops.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- listening ----------------------------------------------------------------------------------------------------------------

    def _observe(self, plan: StepPlan, logits: np.ndarray) -> None:
        """Between a forward pass and its draws."""
        if self._interrupting:
            self._interrupting = False
            self._seen = _Seen()
            raise KeyboardInterrupt
        self._seen.plan = plan if logits.shape[0] else None

    def _listen(
        self, logits: Array, rows: SampleRows, tokens: Array, draw: Drawing = "limited", ids: Array | None = None
    ) -> None:
        self._sample(logits, rows, tokens, draw, ids)
        values, drawn = self._ops.tohost(logits), self._ops.tohost(tokens)
        controls = [self._ops.tohost(array) for array in (rows.positions, rows.temperature, rows.seeds)]
        draws = [
            Draw(int(at), values[i].copy(), int(drawn[i]), float(heat), int(seed))
            for i, (at, heat, seed) in enumerate(zip(*controls, strict=True))
        ]
        plan, self._seen.plan = self._seen.plan, None
        if plan is None:  # no pass of the target came before: a drafter draws
            self._seen.drafter |= {one.position: one for one in draws}
        elif len(plan.spans) == 1:
            self._keep(plan.spans[0], draws)

    def _keep(self, span: Span, draws: Sequence[Draw]) -> None:
        drafts = span.tokens[span.rows - span.drafts :]
        ends = self._loaded.tokenizer.end_ids
        outcome = match(drafts, [one.token for one in draws], lambda token: Finish.STOP if token in ends else None)
        verdicts = _verdicts(len(drafts), outcome)
        rows = tuple(
            Row(draft, one, self._seen.drafter.get(one.position) if draft is not None else None, verdict)
            for draft, one, verdict in zip((*drafts, None), draws, verdicts, strict=True)
        )
        anchor = span.rows - span.sampled
        self.windows.append(
            Window(
                len(self.windows),
                span.tokens[anchor],
                rows,
                outcome.accepted,
                outcome.emitted,
                span.start + anchor,
                span.blocks,
            )
        )
        self._seen = _Seen()


def _verdicts(drafts: int, outcome: Outcome) -> list[str]:
    """One word a row: what became of its draft, or of its draw in the last one."""
    said = len(outcome.emitted)
    verdicts = ["kept" if row < outcome.accepted else "refused" if row < said else "unused" for row in range(drafts)]
    return [*verdicts, "bonus" if said > drafts else "unused"]

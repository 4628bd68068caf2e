"""Drafters that read more than tokens, as tables of what they say behind each of them: for replays, which have nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from power_lab.engine.speculation.drafters import Draft, DraftAsk
from power_lab.engine.speculation.drafters.copied import Copied, drafted
from power_lab.engine.speculation.drafters.cursor import Cursor
from power_lab.engine.trace import DraftTable
from power_lab.errors import ReplayRefused

if TYPE_CHECKING:
    from power_lab.engine.speculation.drafters.neural import Drafting
    from power_lab.engine.speculation.drafters.neural.inputs import Block
    from power_lab.kernels.ops import Array


class Tabled:
    """A drafter as its table. See `Drafter`.

    Attributes:
        drawn: how many tokens its latest draft has.
    """

    def __init__(self, name: str, table: DraftTable) -> None:
        self.name, self.drawn = name, 0
        self._table, self._cursor = table, Cursor()

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        """It has read nothing."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        """The next proposal reads these."""

    def end(self, request_id: int) -> None:
        """It serves one request."""

    def _draft(self, ask: DraftAsk) -> Draft:
        table, known = self._table, len(ask.tokens)
        start = self._cursor.settle(ask.tokens)
        self.drawn = 0
        if table.reads and known - start > table.reads:
            return self._cursor.read(ask, table.reads)
        at = known - table.first
        draft = Draft(table.drafts[at][: ask.width], table.confidence[at][: ask.width], table.notes[at])
        self._cursor.drew(ask, draft)
        self.drawn = len(draft.tokens)
        return draft


class TabledOnDevice(Tabled):
    """One that drafts on the device, too, behind a step that is not over. See `Resuming`, of which there is no device here to call."""

    places = 1

    @property
    def most(self) -> int:
        return self._table.most

    def resume(self, blocks: Sequence[Block], marks: Array) -> Drafting:
        raise AssertionError("a replay launches nothing")

    def light(self, request_id: int) -> bool:
        return False

    def onward(self, tokens: Sequence[int], width: int, light: bool) -> tuple[int, ...]:
        """What the device drafts behind these tokens, exactly so many. light: as it was when the step was launched."""
        made = self._table.drafts[len(tokens) - self._table.first][:width]
        if len(made) < width:
            raise ReplayRefused(
                f"drafts[{self.name!r}]: {len(made)} behind {len(tokens)} tokens, and {width} are made there on the device",
                "The drafter's logits hold NaN there, and what a device makes of them is not foreseen.",
            )
        return made


class TabledHybrid(TabledOnDevice):
    """The hybrid drafter: its network as a table, its copies from the tokens themselves."""

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        self._copied = Copied(prompt)

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        if emitted:
            self._copied.commit(emitted)

    def light(self, request_id: int) -> bool:
        return self._copied.fast

    def onward(self, tokens: Sequence[int], width: int, light: bool) -> tuple[int, ...]:
        return drafted(tokens, width, () if light else self._table.drafts[len(tokens) - self._table.first])

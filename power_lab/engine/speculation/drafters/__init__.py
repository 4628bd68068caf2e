"""Drafters: cheap guesses of the next tokens, one file each, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from power_lab.errors import ConfigError

if TYPE_CHECKING:
    from power_lab.engine.request import SamplingParams
    from power_lab.engine.speculation.drafters.neural import Companion


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """One request that wants drafts.

    Attributes:
        request_id: whose; tokens: that are committed; width: the most drafts that its next step can verify (>= 1).
        blocks: the request's KV blocks, which cover its first `computed` tokens; what a companion keeps of these lies in the same.
        params: how the target draws, the seed included; None is greedily. Its noise is known beforehand: a drafter that draws with it,
            too, is right more often than one that guesses the likeliest token.
    """

    request_id: int
    tokens: Sequence[int]
    width: int
    params: SamplingParams | None = None
    blocks: Sequence[int] = ()
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess of the next tokens.

    Attributes:
        tokens: ids; () where there is none.
        confidence: for each token the probability, as the drafter sees it, that the target says it if it said those before; () where the
            drafter has no opinion.
        note: why there is none, where the drafter can say.
        drafter: which part of it made them, "" for a drafter of one part.
        later: whether there may be some when it is asked again, as it has not read the request's tokens yet.
    """

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    note: str = ""
    later: bool = False
    drafter: str = ""

    def gated(self, gate: float) -> tuple[Draft, str]:
        """As far as its first token that is less sure than `gate`, and what to add to the reason of its round where that cuts it."""
        drawn = len(self.tokens)
        kept = next((at for at, sure in enumerate(self.confidence) if sure < gate), drawn)
        if kept == drawn:
            return self, ""
        told = f"gate {gate:g}: draft {kept + 1} of {drawn} has confidence {self.confidence[kept]:.2f}"
        cut = replace(self, tokens=self.tokens[:kept], confidence=self.confidence[:kept], note="" if kept else told)
        return cut, f"; {told}"


class Drafter(Protocol):
    """Proposes tokens for several requests at once. A wrong guess costs time, never a token.

    A drafter sees committed tokens only; whatever it keeps per request, it keeps under `request_id` between `begin` and `end`.
    """

    name: str

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        """A request starts; `prompt` is all that is known of it. What it says may only serve requests of the same namespace."""
        ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """A guess of at most `width` tokens for each ask, in order."""
        ...

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        """Tokens that were verified and emitted."""
        ...

    def end(self, request_id: int) -> None:
        """The request is over; forget it."""
        ...


COPY = "copy"
"""The part of a drafter that copies what followed the same tokens before."""

TRAINED = ("mtp", "eagle", "dflash", "dflash2", "dspark")
"""Names of drafters that are trained for their target."""


def resolve(name: str, draft_model: Drafter | None = None, companion: Companion | None = None) -> str:
    """What `auto` is for one engine; other names are what they are. Arguments as of `make`."""
    if name != "auto":
        return name
    if companion is not None:
        return companion.serves[0]
    return "ngram" if draft_model is None else "draft-model"


def make(
    name: str,
    draft_model: Drafter | None = None,
    companion: Companion | None = None,
    remedy: Callable[[str], str] = lambda _: "",
    why: str = "",
) -> Drafter:
    """The drafter of that name, for one engine.

    draft_model: what the engine has loaded as its draft model; companion: as its trained drafter. remedy: how it would get another one.
    why: it has no trained drafter, if it has none.

    Raises ConfigError for key `speculate` when there is none and it is asked for.
    """
    name = resolve(name, draft_model, companion)
    if name in (*TRAINED, "hybrid"):
        if companion is None or name not in companion.serves:
            none = f"none: {why}" if why else "none"
            has = none if companion is None else f"one that serves {', '.join(companion.serves)}"
            raise ConfigError(
                "speculate",
                f"{name!r} needs a drafter that was trained for this model, and this engine has {has}",
                remedy(name),
            )
        return companion.drafter(name)
    if name == "draft-model":
        if draft_model is None:
            raise ConfigError(
                "speculate",
                "'draft-model' needs a draft model, and this engine has none",
                'Load the model with draft="...", the name or path of a smaller one with the same vocabulary.',
            )
        return draft_model
    from power_lab.engine.speculation.drafters.corpus import Corpus
    from power_lab.engine.speculation.drafters.suffix import LookupDrafter, NgramDrafter

    return NgramDrafter(Corpus()) if name == "ngram" else {"lookup": LookupDrafter}[name]()

"""Trained drafters that come with a model: which one a request's `speculate` needs, and whether a lab loads it by itself.

An engine has one. A lab whose user chose none (`draft="auto"`) loads its engine anew with another of the model's own where a request names
it: no token depends on that. What a user chose, and an engine that others use, stay as they are; then the error says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from power_lab.display import notebook_shell
from power_lab.engine.config import AUTO_DRAFT, TRAINED_DRAFTS, EngineConfig
from power_lab.engine.report import Decision
from power_lab.engine.speculation.drafters.neural import shipped
from power_lab.engine.speculation.drafters.neural.choice import serving
from power_lab.errors import ConfigError, EngineInUse
from power_lab.models import CATALOGUE

NAMED = (*TRAINED_DRAFTS, "hybrid")
"""Values of `speculate` that mean a trained drafter; `auto` is the best that an engine happens to have."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A drafter that a lab takes by itself, beside its user's settings.

    Attributes:
        name: of the drafter; draft: the setting that loads it, `auto` for the model's default one.
        speculate: of the request that needs it; before: the drafter of the engine until then, "" where none was loaded.
    """

    name: str
    draft: str
    speculate: str
    before: str = ""

    @property
    def kept(self) -> Taken | None:
        """What a lab remembers of it: nothing where its user's own setting is in force again."""
        return None if self.draft == AUTO_DRAFT else self

    def __str__(self) -> str:
        """What happened, in a line."""
        instead = f" instead of {self.before!r}" if self.before else ""
        return f"speculate={self.speculate!r}: the engine is loaded with the drafter {self.name!r}{instead}, which comes with the model."


def may_choose(speculate: str, config: EngineConfig) -> bool:
    """Whether a request names a trained drafter, and the user has left to us which one the engine has."""
    return speculate in NAMED and config.draft == AUTO_DRAFT


def identity(model: str) -> str:
    """SHA-256 of a model, where its name alone tells; else ""."""
    return CATALOGUE[model].sha256 if model in CATALOGUE else ""


def wanted(speculate: str, sha256: str, taken: Taken | None, *, loaded: bool) -> Taken | None:
    """The drafter to load for a request; None where the engine has it, or where the model does not come with it.

    Args:
        sha256: of the model; taken: what the lab has taken so far; loaded: whether there is an engine.
    """
    default = shipped.default(sha256)
    has = taken.name if taken is not None else default
    needed = serving(speculate, sha256)
    if needed in ("", has):
        return None
    return Taken(needed, AUTO_DRAFT if needed == default else needed, speculate, has if loaded else "")


def with_drafter(config: EngineConfig, taken: Taken | None) -> EngineConfig:
    """The user's settings with what the lab has taken."""
    return config if taken is None else msgspec.structs.replace(config, draft=taken.draft)


def refused(taken: Taken, model: str, error: EngineInUse) -> ConfigError:
    """Why the engine was not loaded anew, and what to do."""
    return ConfigError(
        "speculate",
        f"{taken.speculate!r} needs the drafter {taken.name!r}, and this engine has {taken.before!r}. {error.message}",
        f'lab.load("{model}", draft="{taken.name}") loads an engine of your own.',
    )


def tell(taken: Taken) -> None:
    """Say what happened: below the cell in a notebook, elsewhere beside the bars, on stderr."""
    print(taken, file=sys.stdout if notebook_shell() is not None else sys.stderr)


def explained(decisions: Iterable[Decision], taken: Taken | None) -> list[Decision]:
    """An engine's decisions, with whose that of the drafter was."""
    if taken is None:
        return list(decisions)
    said = f"; this lab asked for it, since a request had speculate={taken.speculate!r}"
    return [
        msgspec.structs.replace(item, reason=item.reason + said) if item.key == "draft" else item for item in decisions
    ]

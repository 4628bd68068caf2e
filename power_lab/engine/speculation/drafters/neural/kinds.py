"""Which kinds of trained drafters there are, and how an artifact becomes one of them."""

from __future__ import annotations

from collections.abc import Callable

from power_lab.engine.speculation.drafters.neural import Trained
from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Target, refused


def _dflash(artifact: Artifact, target: Target, context: int) -> Trained:
    from power_lab.engine.speculation.drafters.neural.dflash import DFlash

    return DFlash(artifact, target, context)


def _dflash2(artifact: Artifact, target: Target, context: int) -> Trained:
    from power_lab.engine.speculation.drafters.neural.dflash2 import DFlash2

    return DFlash2(artifact, target, context)


def _mtp(artifact: Artifact, target: Target, context: int) -> Trained:
    from power_lab.engine.speculation.drafters.neural.mtp import Mtp

    return Mtp.of(artifact, target, context)


def _eagle(artifact: Artifact, target: Target, context: int) -> Trained:
    from power_lab.engine.speculation.drafters.neural.eagle import Eagle

    return Eagle(artifact, target, context)


KINDS: dict[str, Callable[[Artifact, Target, int], Trained]] = {
    "dflash": _dflash,
    "dflash2": _dflash2,
    "mtp": _mtp,
    "eagle": _eagle,
}
"""kind -> what binds an artifact of it to a target that will run so long a context."""


def bind(artifact: Artifact, target: Target, context: int) -> Trained:
    """An artifact as a drafter of its target.

    Raises ConfigError for key `draft`, naming the tensor or value, where it is not sound or was made for another model.
    """
    artifact.check_target(target.spec, target.sha256)
    kind = artifact.header.kind
    if kind not in KINDS:
        raise refused(artifact.path, f"is of the unknown kind {kind!r}; known are {', '.join(KINDS)}")
    return KINDS[kind](artifact, target, context)

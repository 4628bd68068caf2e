"""Typed errors. Each one names the offending key or value and says what to do about it."""

from __future__ import annotations


class PowerLabError(Exception):
    """Base of all errors that Power Lab raises on purpose.

    Args:
        message: what went wrong, naming the key or value.
        remedy: what the reader can do; empty only where nothing can be done.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        end = "." if self.remedy and not self.message.endswith((".", "?", "!", ":")) else ""
        return f"{self.message}{end} {self.remedy}".strip()


class ConfigError(PowerLabError, ValueError):
    """A setting is unknown, out of range or impossible together with another."""

    def __init__(self, key: str, message: str, remedy: str = "") -> None:
        super().__init__(f"{key}: {message}", remedy)
        self.key = key


class ModelFileError(PowerLabError, ValueError):
    """A model file is truncated, malformed, hostile or of an unsupported kind."""


class TokenizerError(PowerLabError, ValueError):
    """Tokenizer metadata or a chat template cannot be used."""


class DownloadError(PowerLabError):
    """A model could not be fetched or its bytes do not match their SHA-256."""


class LicenseNotAccepted(DownloadError):
    """A model comes under terms of use that a person must accept before it is fetched; the message names them."""


class ExactnessError(PowerLabError):
    """This machine's arithmetic fails the row-invariance probe, so exact mode is refused."""


class CapacityError(PowerLabError):
    """A request needs more than the engine's memory plan holds; the message carries the numbers."""


class QueueFull(PowerLabError):
    """The bounded queue has no room for another request."""


class DeadlineExceeded(PowerLabError, TimeoutError):
    """The request's one deadline, counted from queueing to the last token, has passed."""


class RequestCancelled(PowerLabError):
    """The request was cancelled at a step boundary."""


class StepFailed(PowerLabError):
    """A step raised; the requests in it ended with this error and the engine goes on."""


class EngineClosed(PowerLabError):
    """The engine was closed or its host shut down."""


class EngineInUse(PowerLabError):
    """A change was refused because other live clients use the engine; the message names them."""


class HostUnavailable(PowerLabError):
    """The engine host cannot be started or reached; the message carries its log path."""


class ProtocolError(PowerLabError):
    """A frame on the engine socket is malformed, too large or of another version."""


class ReplayRefused(PowerLabError):
    """A record does not hold what a counterfactual replay needs; the message names what is missing."""


class EvidenceError(PowerLabError, ValueError):
    """A record or receipt is malformed, was changed, or does not fit what it is compared with.

    Attributes:
        field: dotted name of the part that is wrong, such as `claim.output` or `claim.output.sha256`.
    """

    def __init__(self, field: str, message: str, remedy: str = "") -> None:
        super().__init__(f"{field}: {message}", remedy)
        self.field = field

"""Requests: what was asked, what is known so far, how it ended. No torch, no numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

import msgspec

from power_lab.errors import ConfigError

Drafting = Literal[
    "off", "auto", "lookup", "ngram", "draft-model", "hybrid", "mtp", "eagle", "dflash", "dflash2", "dspark"
]
Controlling = Literal["cost", "adaptive", "governor", "fixed"]
Recording = Literal["", "replay"]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages ({"role", "content"})."""


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-text token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn and when a request ends.

    Attributes:
        max_tokens: most tokens to emit.
        temperature: 0 is greedy; else 1e-6..100.
        top_k, top_p, min_p: filters on the distribution at that temperature; 0, 1 and 0 are off.
        repetition_penalty: divides positive (multiplies negative) logits of tokens seen in prompt or output; 1 is off.
        presence_penalty: subtracted once from logits of tokens already generated; 0 is off.
        logit_bias: token id -> value added to its logit.
        stop: strings that end the output; the string itself is not part of the text.
        stop_tokens: token ids that end the output, beside the model's own end tokens.
        ignore_eos: go on past the model's end tokens (benchmarks).
        logprobs: None, or how many alternatives to report beside each token's log-probability (0..20).
        seed: noise key; None draws one when the request is submitted and records it.
        speculate: which drafter proposes tokens; `auto` is the best that the engine has: `hybrid`, which is one trained for its model
            beside what the text itself has said before, else a draft model, else `ngram`. A record names the one that it was.
        width: most tokens drafted a round (1..64). Fewer cost less where `controller` is `fixed`; the others find out by themselves.
        controller: what chooses how many of these a round verifies. `cost`: as many as emit the most tokens a second, by what was
            accepted and what steps were measured to cost. `adaptive`: by this request's acceptance alone. `governor`: all or none,
            whichever was measured to be faster. `fixed`: always all. None of them changes a token.
        gate: how sure a drafter must be of a token (0..1; 0 is off): a draft is verified up to its first token, the very first included, of
            which it is less sure, and controllers see what is left. Token by token, not cumulative: the probability that the target
            says it if it said those before, as the drafter sees it, which is its own probability of the token, for `dspark` that of
            its confidence head, and for `lookup` and `ngram` how often such matches were right so far. What `hybrid` copies has
            none and passes. Such requests are drafted for on the host, on a GPU too, which costs time there. It changes no token.
        record: what is kept beside the trace. `replay`: what each trained drafter or draft model of the engine says behind every token of
            the output, at most `width` drafts; it is asked for them when the request is over, so the result comes later. The
            output is then not offered to the prefix cache. Also what earlier `ngram` requests of the namespace said, 131,072 tokens at
            most: whoever gets such a record can read these.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    speculate: Drafting = "off"
    width: int = 15
    controller: Controlling = "cost"
    gate: float = 0.0
    record: Recording = ""

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, 1, 1 << 24)
        _check("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < 1e-6:  # logits divided by it would not be finite
            raise ConfigError("temperature", f"{self.temperature} is too small to divide by", "Use 0 for greedy.")
        _check("top_k", self.top_k, 0, 1 << 24)
        _check("top_p", self.top_p, 1e-6, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check("width", self.width, 1, 64)
        _check("gate", self.gate, 0.0, 1.0)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, 20)
        if self.seed is not None:
            _check("seed", self.seed, 0, (1 << 63) - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError("ignore_eos", f"{self.ignore_eos!r} is neither True nor False")
        if self.speculate not in get_args(Drafting):
            known = ", ".join(get_args(Drafting))
            raise ConfigError("speculate", f"{self.speculate!r} is not a drafter", f"Use one of {known}.")
        if self.controller not in get_args(Controlling):
            known = ", ".join(get_args(Controlling))
            raise ConfigError("controller", f"{self.controller!r} does not choose widths", f"Use one of {known}.")
        if self.record not in get_args(Recording):
            raise ConfigError(
                "record", f"{self.record!r} is nothing that can be recorded", 'Use "replay", or "" for nothing.'
            )
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise ConfigError("stop", f"{self.stop!r} is not a tuple of strings", 'For one string write ("...",).')
        if len(self.stop) > 16 or any(not text or len(text) > 256 for text in self.stop):
            raise ConfigError("stop", "at most 16 strings of 1 to 256 characters are allowed")
        if len(self.logit_bias) > 1024:
            raise ConfigError("logit_bias", f"{len(self.logit_bias)} entries; at most 1024 are allowed")
        for token in self.stop_tokens:
            _check("stop_tokens", token, 0, (1 << 31) - 1)
        for token, value in self.logit_bias.items():
            if token < 0:
                raise ConfigError("logit_bias", f"token id {token} is negative")
            # A text for each of a thousand keys takes long: only what is refused gets one.
            if type(value) is not float or not -1000.0 <= value <= 1000.0:
                _check(f"logit_bias[{token}]", value, -1000.0, 1000.0)

    @property
    def penalised(self) -> bool:
        """Whether what is drawn depends on the tokens before, beside the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0


def _check(key: str, value: float, low: float, high: float) -> None:
    """Raises ConfigError unless `value` is within low..high, and an int where they are."""
    kind, name = (int, "a whole number") if isinstance(low, int) else ((int, float), "a number")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(key, f"{value!r} is not {name}", "Use Python's own int and float.")
    if not low <= value <= high:  # also refuses NaN
        raise ConfigError(key, f"{value} is outside {low}..{high}")


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine. Only the scheduler's `commit` moves `tokens`, `computed` and `blocks`.

    Attributes:
        id: engine-wide number.
        prompt_len: tokens of the prompt.
        params: sampling parameters with the seed filled in.
        tokens: prompt and emitted tokens.
        limit: most tokens that prompt and output may have together.
        end_tokens: ids that end the output.
        namespace: cache namespace; requests share prefixes only inside one.
        deadline: monotonic seconds, or None.
        computed: tokens whose KV is committed.
        blocks: block table of the committed tokens.
        hashes: chained digests of the full blocks of `tokens`, as far as computed.
        cached: tokens that came from the prefix cache at the first admission.
        drafts: proposed for the next step, not yet verified.
        resting: rounds to come for which no drafts will be proposed, though it speculates.
        cancelled: set from outside, honoured at the next step boundary.
        recorded: whether drafters are asked behind each of its tokens once it is over. Its blocks are kept until then, and what drafters
            have in them is overwritten.
    """

    id: int
    prompt_len: int
    params: SamplingParams
    tokens: list[int]
    limit: int
    end_tokens: frozenset[int]
    namespace: str = ""
    deadline: float | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cached: int = 0
    drafts: tuple[int, ...] = ()
    resting: int = 0
    preemptions: int = 0
    cancelled: bool = False
    recorded: bool = False
    finish: Finish | None = None
    error: Exception | None = None

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def penalised(self) -> bool:
        """As of its parameters."""
        return self.params.penalised

    @property
    def shareable(self) -> int:
        """How many of its tokens, from the first on, the prefix cache may hold; the last one of a prompt is followed by drafts."""
        return self.prompt_len - 1 if self.recorded else len(self.tokens)

    @property
    def foreseeable(self) -> bool:
        """Whether its next step can be planned and launched before its last token is known on the host."""
        return (self.params.speculate == "off" or self.resting > 0) and not self.penalised

    @property
    def resumable(self) -> bool:
        """Whether its next step can be planned before the host knows how many tokens this one adds, as nothing reads their list, nor how
        sure a drafter is of them."""
        gated = self.params.gate > 0 and self.params.speculate != "off"
        return not self.penalised and not self.params.logit_bias and not gated

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

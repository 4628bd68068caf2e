"""What may become a request: prompts in their three forms, and the checks before anything is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from power_lab.engine.chat import chat_ids
from power_lab.engine.messages import Options, Tool
from power_lab.engine.request import Prompt, SamplingParams
from power_lab.engine.tokenizer import Tokenizer
from power_lab.errors import CapacityError, ConfigError


def encode(
    tokenizer: Tokenizer,
    prompt: Prompt,
    chat: bool | None = None,
    tools: Sequence[Tool] = (),
    options: Options | None = None,
) -> list[int]:
    """Token ids of a prompt; arguments as for `Engine.submit`. Raises ConfigError, TokenizerError."""
    if isinstance(prompt, str) and chat is None:
        chat = tokenizer.chat_template is not None and not tokenizer.chat_template.empty
    if isinstance(prompt, str) and chat:
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str) and len(prompt) and all(isinstance(item, Mapping) for item in prompt):
        return chat_ids(tokenizer, [dict(item) for item in prompt], tools=tools, options=options)  # type: ignore[arg-type]
    if tools:
        raise ConfigError("tools", "a raw prompt has no place for them", "Pass messages, or text with chat=True.")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, special=False, bos=True)
    if chat:
        raise ConfigError("chat", "token ids cannot be wrapped as a chat", "Pass text or messages, or leave chat out.")
    return list(prompt)  # type: ignore[arg-type]


def check(tokens: list[int], params: SamplingParams, deadline_s: float | None, *, vocab: int, context: int) -> None:
    """Raises ConfigError naming the key of a token id or deadline out of range, CapacityError with the numbers."""
    if not tokens:
        raise ConfigError("prompt", "it is empty", "Pass at least one token.")
    for key, ids in (("prompt", tokens), ("stop_tokens", params.stop_tokens), ("logit_bias", params.logit_bias)):
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < vocab:
                raise ConfigError(key, f"token id {token!r} is outside the vocabulary of {vocab}")
    if deadline_s is not None and not 0 < deadline_s < 1e9:
        raise ConfigError("deadline_s", f"{deadline_s} is outside 0..1e9 seconds")
    if len(tokens) + params.max_tokens > context:
        raise CapacityError(
            f"The prompt has {len(tokens)} tokens and max_tokens is {params.max_tokens}, but the engine's context is {context}.",
            f"Lower max_tokens to {context - len(tokens)} or less." if len(tokens) < context else "Shorten the prompt.",
        )

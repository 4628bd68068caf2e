"""llama.cpp on a file, for its logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np


class LlamaCpp:
    """Called with tokens, it gives log-probabilities of the next one: f64 [vocabulary], NaN where `best` leaves a token out.

    Args:
        path: a GGUF file.
        vocabulary: its tokens.
        best: how many of the likeliest tokens are wanted.
        context: most tokens of a prompt.
    """

    def __init__(self, path: Path, vocabulary: int, best: int, context: int = 1024) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = context, 1, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
        self._server = xllamacpp.Server(params)
        self._vocabulary = vocabulary
        self._wanted = {"n_probs": best, "logprobs": best, "ignore_eos": True}

    def __call__(self, tokens: list[int]) -> np.ndarray:
        body = {"prompt": tokens, "max_tokens": 1, "cache_prompt": True, "temperature": 0.0, **self._wanted}
        answer = self._server.handle_completions(body)["choices"][0]
        result = np.full(self._vocabulary, np.nan)
        for entry in answer["logprobs"]["content"][0]["top_logprobs"]:
            result[entry["id"]] = entry["logprob"]
        return result

"""Zero-weight drafters: the longest recent suffix is looked up in earlier tokens, and what followed it there is the guess.

`lookup` searches the prompt only (Saxena, "Prompt Lookup Decoding", 2023); `ngram` searches prompt and output, and what the requests
before it in the same namespace said (as SuffixDecoding does: Oliaro et al. 2024, arXiv 2411.04975). Matches may have any length; the
structure is `automaton`, which defines what is drafted.

What they propose is a function of the calls they got, so a replay of the same calls drafts the same; `NgramDrafter(corpus=None)` needs no
more than the request's own tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from power_lab.engine.speculation.drafters import Draft, DraftAsk
from power_lab.engine.speculation.drafters.automaton import Cursor, SuffixAutomaton
from power_lab.engine.speculation.drafters.confidence import Confidence, likely
from power_lab.engine.speculation.drafters.corpus import Corpus

SHORTEST = 1
"""Tokens of a match that is worth a draft."""
FLOOR = 0.2
"""A draft ends where it is less likely than this to be right so far.

Over bench/prompts.py at width 8, matches of one token with it give 3% more tokens a pass than those of two without, from 29% fewer drafts.
"""
OWN_PIECE, CORPUS_PIECE = 2048, 256
"""Most tokens of prompts, and of a corpus, that one call of `propose` indexes: about 7 ms and 1 ms. Longer ones take several."""


class Text:
    """A request's tokens, indexed up to `searched` of them in pieces.

    Attributes:
        tokens: all that are known; the first `prompt` are the prompt.
        from_corpus: whether the last proposal came from other requests' tokens.
    """

    def __init__(self, prompt: Sequence[int], namespace: str) -> None:
        self.tokens = array("i", prompt)
        self.prompt = len(prompt)
        self.namespace = namespace
        self.automaton = SuffixAutomaton()
        self.confidence = Confidence()
        self.cursor: Cursor | None = None
        self.from_corpus = False

    def index(self, end: int, budget: int) -> int:
        """Index tokens before `end`, at most `budget`; returns how many."""
        known = self.automaton.tokens
        if known >= end:
            return 0
        piece = self.tokens[known : min(end, known + budget)]
        self.automaton.extend(piece)
        return len(piece)


class LookupDrafter:
    """Guesses that the output quotes the prompt."""

    name = "lookup"

    def __init__(self) -> None:
        self._texts: dict[int, Text] = {}

    @property
    def bytes(self) -> int:
        """Memory held for running requests."""
        texts = list(self._texts.values())  # requests may come meanwhile
        return sum(text.automaton.bytes + text.tokens.itemsize * len(text.tokens) for text in texts)

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        self._texts[request_id] = Text(prompt, namespace)  # indexed once it runs: many may wait

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        budget = OWN_PIECE
        drafts = []
        for ask in asks:
            text = self._texts[ask.request_id]
            budget -= text.index(self._searched(text), budget)
            drafts.append(self._draft(ask, text))
        return drafts

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        text = self._texts[request_id]
        text.confidence.learn(emitted)
        text.tokens.extend(emitted)

    def end(self, request_id: int) -> None:
        self._texts.pop(request_id, None)

    def _searched(self, text: Text) -> int:
        """How many of its tokens a request's drafts come from."""
        return text.prompt

    def _draft(self, ask: DraftAsk, text: Text) -> Draft:
        return self._continue(text, text.automaton, *self._own(text), ask.width)

    def _own(self, text: Text) -> tuple[int, int]:
        """State and length of the request's match in its prompt; none before all of it is indexed."""
        if text.automaton.tokens < text.prompt:
            return 0, 0
        if text.cursor is None:
            text.cursor = Cursor(text.prompt, *text.automaton.match())
        return text.cursor.follow(text.automaton, text.tokens)

    def _continue(self, text: Text, automaton: SuffixAutomaton, state: int, length: int, width: int) -> Draft:
        drafted = automaton.continuation(state, length, width, SHORTEST) if length >= SHORTEST else []
        worth = likely(drafted, text.from_corpus, FLOOR)
        return Draft(tuple([token for token, _, _ in worth]), text.confidence.of(worth, text.from_corpus))


class NgramDrafter(LookupDrafter):
    """Guesses that the output repeats the prompt, itself, or what others of its namespace said.

    Of several matches the longest counts; of equals the request's own, then the one in newer texts.

    Args:
        corpus: what earlier requests said; finished ones are added. None searches each request's own tokens only.
    """

    name = "ngram"

    def __init__(self, corpus: Corpus | None) -> None:
        super().__init__()
        self.corpus = corpus

    @property
    def bytes(self) -> int:
        """Memory held, for running requests and the corpus."""
        return super().bytes + (self.corpus.bytes if self.corpus is not None else 0)

    def from_corpus(self, request_id: int) -> bool:
        """Whether the request's last proposal came from other requests' tokens, so that a replay of it needs them."""
        return self._texts[request_id].from_corpus

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        if self.corpus is not None:
            budget = CORPUS_PIECE
            for namespace in dict.fromkeys(self._texts[ask.request_id].namespace for ask in asks):
                budget -= self.corpus.index(namespace, budget)
        return super().propose(asks)

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        super().commit(request_id, emitted)
        text = self._texts[request_id]
        text.index(len(text.tokens), OWN_PIECE)

    def end(self, request_id: int) -> None:
        text = self._texts.pop(request_id, None)
        if text is None or self.corpus is None:
            return
        self.corpus.forget(request_id, text.namespace)
        if len(text.tokens) > text.prompt:  # what was refused or never began leaves nothing
            self.corpus.add(text.namespace, text.tokens)

    def _searched(self, text: Text) -> int:
        return len(text.tokens)

    def _draft(self, ask: DraftAsk, text: Text) -> Draft:
        automaton = text.automaton
        state, length = self._own(text)
        text.from_corpus = False
        shelf = self.corpus.use(text.namespace) if self.corpus is not None else None
        for generation in shelf.generations if shelf is not None else ():
            other, reach = generation.match(ask.request_id, text.tokens)
            if reach > max(length, SHORTEST - 1):
                automaton, state, length, text.from_corpus = generation.automaton, other, reach, True
        return self._continue(text, automaton, state, length, ask.width)

    def _own(self, text: Text) -> tuple[int, int]:
        """State and length of the longest suffix that occurred before; none before all is indexed."""
        return text.automaton.match() if text.automaton.tokens == len(text.tokens) else (0, 0)

"""A finished run: text, tokens, trace, receipt, and how it shows itself in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from power_lab.engine.trace import RunRecord
from power_lab.evidence.page import MIME as EVIDENCE_MIME
from power_lab.widgets.text import count

if TYPE_CHECKING:
    import xarray

    from power_lab.engine.speculation.metrics import Metrics
    from power_lab.evidence.receipt import Receipt
    from power_lab.what_if import WhatIf

NO_MATH = "mathjax_ignore tex2jax_ignore"  # notebooks typeset $…$ in HTML, and output must show as it is
_LARGEST_EVIDENCE = 8192  # bytes; a larger receipt is read from `run.receipt` and not stored in every output

# The same colours in JupyterLab (its variables), on GitHub and in exported HTML (the fallbacks). What a sanitizer drops only loses colour.
_BOX = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:var(--jp-ui-font-size1,13px)"
_TEXT = (
    "max-width:52em;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.55;font-size:var(--jp-content-font-size1,14px);"
    "font-family:var(--jp-content-font-family,system-ui,sans-serif)"
)
_FACTS = (
    "margin-top:8px;padding-top:6px;border-top:1px solid rgba(128,128,128,0.3);line-height:1.7;"
    "font-variant-numeric:tabular-nums;color:var(--jp-ui-font-color2,inherit)"
)
_BADGE = "border:1px solid rgba(128,128,128,0.6);border-radius:3px;padding:0 5px;margin-right:8px;white-space:nowrap"


_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"
}


def for_terminal(text: str) -> str:
    """Model output without control characters: an escape sequence could set the title, move the cursor or paste text."""
    return text.translate(_CONTROLS)


class Run:
    """One finished request. It holds the record alone and no engine object, so it may be kept, pickled and compared.

    Attributes:
        record: everything that is known of the run.
    """

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    @property
    def text(self) -> str:
        """The output text, cut at a stop string."""
        return self.record.text

    @property
    def tokens(self) -> list[int]:
        """The output token ids."""
        return list(self.record.tokens)

    @property
    def finish(self) -> str:
        """Why it ended: `stop`, `length`, `cancelled`, `deadline` or `error`."""
        return str(self.record.finish)

    @cached_property
    def trace(self) -> xarray.Dataset:
        """The trace as a dataset (see `power_lab.evidence.dataset`). Raises EvidenceError if the record contradicts itself."""
        from power_lab.evidence.dataset import trace_dataset

        return trace_dataset(self.record)

    @cached_property
    def receipt(self) -> Receipt:
        """What the run claims, bound by digests. Raises EvidenceError if a value has no exact JSON form."""
        from power_lab.evidence.receipt import Receipt

        return Receipt.of(self.record)

    @cached_property
    def speculation(self) -> Metrics:
        """What speculation came to: counts, histograms of widths and accepted lengths, and where the time went."""
        from power_lab.engine.speculation.metrics import Metrics

        return Metrics.of([self.record])

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return self.speculation.drafted

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return self.speculation.accepted

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.speculation.acceptance

    @property
    def tokens_per_pass(self) -> float | None:
        """Output tokens per pass of the target model that emitted any; None without a pass."""
        return self.speculation.tokens_per_pass

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed in tokens/s: the tokens after the first round over the time from the first token to the last.

        None when the output ended in the first round. Waiting and prefill are not in it; see `summary()` for those.
        """
        record = self.record
        later = len(record.tokens) - len(record.rounds[0].emitted) if record.rounds else 0
        return later / record.decode_s if later > 0 and record.decode_s > 0 else None

    def what_if(
        self,
        *,
        speculate: str | None = None,
        width: int | None = None,
        controller: str | None = None,
        gate: float | None = None,
        costs_from: Iterable[Run] | None = None,
    ) -> WhatIf:
        """What this run would have done under other settings of speculation, computed from the record without the model.

        Verification is exact, so the output is the same under every setting, and the rounds follow from what drafters make of it. They are
        those of the request alone, with fresh drafters; in a batch the engine may cut windows for lack of rows. Trained drafters and draft
        models read more than tokens, and n-grams those of earlier requests: what these say, and those had said, is in the records of runs
        with `record="replay"`. Seconds are medians of what steps of as many rows, and such drafts, took in recorded runs, both together
        where drafts are made on the device; where there was none, there is a reason and no number.

        Args:
            speculate: drafter. width: most tokens drafted a round. controller: what chooses the width of each round. gate: how sure the
                drafter must be of what is verified (`SamplingParams.gate`). What is None stays as it was.
            costs_from: runs whose steps give the costs, such as one for each width; this run if None.

        Raises:
            ConfigError for a wrong setting; ReplayRefused where the record does not hold what a drafter needs, or the run was ended from
            outside; EvidenceError if the record contradicts itself.
        """
        from power_lab.engine.speculation.recorded import RecordedCosts
        from power_lab.what_if import what_if

        costs = RecordedCosts.of([run.record for run in ((self,) if costs_from is None else costs_from)])
        return what_if(self.record, costs, speculate=speculate, width=width, controller=controller, gate=gate)

    def what_if_widths(
        self,
        widths: Sequence[int] = (1, 3, 7, 15),
        *,
        speculate: str | None = None,
        controller: str | None = None,
        gate: float | None = None,
        costs_from: Iterable[Run] | None = None,
    ) -> xarray.Dataset:
        """The same for several widths: dimension `width`. Arguments and errors as for `what_if`.

        `power_lab.what_if.sweep` takes more runs and drafters.
        """
        from power_lab.what_if import sweep

        drafter = str(self.record.params.get("speculate", "off")) if speculate is None else speculate
        options: dict[str, Any] = {"controller": controller, "gate": gate, "costs_from": costs_from}
        return sweep([self], speculate=[drafter], widths=widths, **options).isel(run=0, drafter=0)

    def summary(self) -> dict[str, str | int | float | None]:
        """The run in one flat row: counts, rates and times in seconds, for tables."""
        record = self.record
        return {
            "model": record.engine.model,
            "mode": record.engine.mode,
            "finish": self.finish,
            "prompt_tokens": len(record.prompt_tokens),
            "cached_tokens": record.cached,
            "tokens": len(record.tokens),
            **{key: value for key, value in self.speculation.row().items() if key != "emitted"},
            "tokens_per_s": self.tokens_per_s,
            "queue_s": record.queue_s,
            "prefill_s": record.prefill_s,
            "decode_s": record.decode_s,
            "preemptions": record.preemptions,
            "drafter": str(record.params.get("speculate", "off")),
            "seed": _seed(record),
        }

    def facts(self) -> list[str]:
        """The short facts under the text, in words."""
        record = self.record
        facts = [count(len(record.tokens), "token")]
        if self.tokens_per_s is not None:
            facts.append(f"{self.tokens_per_s:.1f} tok/s")
        if record.cached:
            facts.append(f"{record.cached:,} of {count(len(record.prompt_tokens), 'prompt token')} cached")
        if self.drafted:
            facts.append(f"{self.accepted:,} of {count(self.drafted, 'draft')} accepted")
        facts.append(_ending(record))
        seed = _seed(record)
        if seed is not None:
            facts.append(f"seed {seed}")
        return facts

    def to_html(self) -> str:
        """A small self-contained fragment: no scripts, no style sheets, nothing loaded."""
        record = self.record
        text = escape(record.text) if record.text else "<i>no text</i>"
        # One space around the dots lets the line wrap between facts and nowhere else.
        facts = " · ".join(f'<span style="white-space:nowrap">{escape(fact)}</span>' for fact in self.facts())
        return (
            f'<div class="{NO_MATH}" style="{_BOX}"><div dir="auto" style="{_TEXT}">{text}</div>'
            f'<div style="{_FACTS}"><span style="{_BADGE}" title="{escape(_promise(record))}">{escape(record.engine.mode)}</span>'
            f"{facts}</div></div>"
        )

    def __repr__(self) -> str:
        return f"{for_terminal(self.record.text)}\n[{self.record.engine.mode} · {' · '.join(self.facts())}]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.record == other.record

    __hash__ = None  # type: ignore[assignment]  # a record holds dictionaries

    def __reduce__(self) -> tuple[type[Run], tuple[RunRecord]]:
        """The record alone: neither what was derived from it nor in which cell it was shown, which is true in one kernel only."""
        return Run, (self.record,)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self.to_html()}
        if len(self.receipt.json) <= _LARGEST_EVIDENCE:
            bundle[EVIDENCE_MIME] = self.receipt.data
        return bundle


def _seed(record: RunRecord) -> int | None:
    seed = record.params.get("seed")
    return seed if isinstance(seed, int) else None


def _ending(record: RunRecord) -> str:
    words = {
        "stop": "ended by itself",
        "length": "reached its token limit",
        "cancelled": "cancelled",
        "deadline": "ran out of time",
        "error": f"failed: {record.finish_detail}",
    }
    return words.get(str(record.finish), str(record.finish))


def _promise(record: RunRecord) -> str:
    if record.engine.mode == "exact":
        return "Exact mode: these tokens do not depend on batch, prompt chunks, cache, speculation or preemption."
    return "Fast mode: the tokens may depend on batch, prompt chunks, cache and speculation."

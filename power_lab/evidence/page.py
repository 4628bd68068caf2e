"""A receipt as a page shows it where nothing of ours is installed: plain HTML, which exporters and hosting sites keep."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from power_lab.evidence.receipt import Receipt

MIME = "application/vnd.power-lab.evidence+json"
"""What our JupyterLab extension draws itself, closed and in full; by `data-power-lab-receipt` it knows that the HTML says the same."""


def receipt_html(receipt: Receipt) -> str:
    """What was computed, by what, and the digests that another run compares."""
    rows = "".join(
        f'<tr><th scope="row" style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in _facts(receipt)
    )
    return f"<div data-power-lab-receipt><table><caption>Receipt of a run</caption><tbody>{rows}</tbody></table></div>"


def _facts(receipt: Receipt) -> Iterator[tuple[str, str]]:
    claim: dict[str, Any] = receipt.claim
    engine, model, sampling = claim["engine"], claim["model"], claim["sampling"]
    yield "model", f"{model['name']}, {model['parameters']:,} parameters, {model['license']}"
    yield "model file", f"{model['file']}, sha256 {model['sha256']}"
    yield "engine", f"{engine['mode']} on {engine['device']}, {engine['threads']} threads"
    yield "sampling", ", ".join(f"{name}={value}" for name, value in sorted(sampling.items()))
    yield "prompt", f"{claim['prompt']['tokens']:,} tokens, sha256 {claim['prompt']['sha256']}"
    yield (
        "output",
        f"{claim['output']['tokens']:,} tokens ({claim['output']['finish']}), sha256 {claim['output']['sha256']}",
    )
    yield "arithmetic digest", engine["digest"]
    yield "claim", f"sha256 {receipt.claim_sha256}, equal for equal runs"
    yield "receipt", f"sha256 {receipt.sha256}"

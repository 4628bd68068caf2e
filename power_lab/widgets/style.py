"""The style of views and figures: one sheet, of which each saved output carries only the rules that its own content needs.

An output must stand alone, since cells are run again, cleared and copied one by one. So what it carries holds for it alone, by a class
named after the rules' digest: sheets of other outputs, which need other rules, would else come later on the page and win. A view that
is alive has the whole sheet instead, once a page (`live_style`), since what it will show is not known before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files

from power_lab.run import NO_MATH
from power_lab.widgets.palette import variables

ROOT = ".power-lab"
_SHEETS = ("view", "engine", "watch", "sweep")
_STATIC = files("power_lab.widgets") / "static"
_BLOCK = re.compile(r"([^{}]+)\{((?:[^{}]|\{[^{}]*\})*)\}")
_CLASS = re.compile(r"\.(pl-[\w-]+)")
_NOT = re.compile(r":not\([^)]*\)")
_CLASSES = re.compile(r'class="([^"]*)"')
_VARIABLE = re.compile(r"--pl-(\w+)")


@dataclass(frozen=True, slots=True)
class _Rule:
    """selectors: each with the classes that it asks for; around: a condition such as `@media (...)`, or ""."""

    selectors: tuple[tuple[str, frozenset[str]], ...]
    declarations: str
    around: str


def live_style() -> str:
    """The whole sheet, for views that are alive (`.pl-on`)."""
    return _sheet(variables(), _rules(), f"{ROOT}.pl-on")


def framed(html: str, attribute: str = "") -> str:
    """Content with the style that it needs: one fragment that stands alone, without scripts or external loads."""
    present = frozenset(name for names in _CLASSES.findall(html) for name in names.split())
    chosen = [one for rule in _rules() if (one := _fitting(rule, present))]
    used = frozenset(_VARIABLE.findall(html + "".join(rule.declarations for rule in chosen)))
    colours = variables(used)
    name = "pl" + blake2b(_sheet(colours, chosen, ROOT).encode(), digest_size=4).hexdigest()
    style = _sheet(colours, chosen, f".{name}")
    return f'<div class="power-lab {name} {NO_MATH}"{attribute}><style>{style}</style><div class="pl-body">{html}</div></div>'


@cache
def _rules() -> tuple[_Rule, ...]:
    text = "".join((_STATIC / f"{name}.css").read_text(encoding="utf-8") for name in _SHEETS)
    return tuple(_parsed(text, ""))


def _parsed(text: str, around: str) -> Iterator[_Rule]:
    for head, inside in _BLOCK.findall(text):
        head = head.strip()
        if head.startswith("@"):
            yield from _parsed(inside, head)
        else:
            yield _Rule(
                tuple((one, frozenset(_CLASS.findall(_NOT.sub("", one)))) for one in head.split(",")), inside, around
            )


def _fitting(rule: _Rule, present: frozenset[str]) -> _Rule | None:
    """The rule with those of its selectors that can match content of these classes."""
    always = {"pl-body"}
    fitting = tuple((one, needed) for one, needed in rule.selectors if needed <= present | always)
    return _Rule(fitting, rule.declarations, rule.around) if fitting else None


def _sheet(colours: str, rules: list[_Rule] | tuple[_Rule, ...], root: str) -> str:
    parts = [colours]
    for rule in rules:
        one = f"{','.join(selector for selector, _ in rule.selectors)}{{{rule.declarations}}}"
        parts.append(f"{rule.around}{{{one}}}" if rule.around else one)
    return "".join(parts).replace(ROOT, root)

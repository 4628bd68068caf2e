"""Mutations of chat templates that know Jinja's tokens: they reach what lies behind the parser. Transformers is the reference.

The sound templates are those of tests/engine/templates. What ours renders, Transformers must render to the same text; what ours
refuses may be what would never end, so the reference is not asked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from power_lab.engine.templates import ChatTemplate
from power_lab.errors import PowerLabError
from tests.engine.templating import CHATS, OPTIONS, TEMPLATES, TOOLS, theirs

AGREED, REFUSED, SAME, LENIENT, ALONE = (
    "rendered as the reference does",
    "refused",
    "rendered the same",
    "rendered what the reference refuses",
    "rendered, and not compared",
)
_UNBOUNDED = (
    "**",
    "lipsum",
    "cycler",
    "joiner",
)  # powers, which the reference computes as it compiles; what ours has not
MOST = 1 << 17  # characters of a mutated template: some are over what is allowed
_TOKENS = re.compile(r"""\{[{%#][-+]?|[-+]?[}%#]\}|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+|\w+|\s+|.""", re.S)
_NUMBERS = ("0", "-1", "2", "7", "64", "300", "9999", "99999", "10**9", "2**63", "1e308", "10**10**10", "0.5")
_WORDS = re.findall(
    r"\S+",
    "messages tools message loop ns namespace true none tool_call content role range cycler joiner lipsum dict self caller varargs"
    " __class__ __init__ __globals__ _Namespace__attrs format format_map mro pop append update items keys split strip replace join"
    " tojson map select selectattr reject attr sort unique items list string length first last indent round int float default random"
    " batch groupby sum upper title dictsort trim reverse min max is in not and or if else recursive with defined string mapping iterable"
    " raise_exception strftime_now generation break continue block include import extends autoescape do filter call macro set",
)
_SNIPPETS = (
    "{{ 'ab' * 9999 }}",
    "{{ messages }}",
    "{% for i in range(99999) %}",
    "{% endfor %}",
    "{% if true %}",
    "{% endif %}",
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% set x = [x, x] %}",
    "{% set x %}{{ x }}{{ x }}{% endset %}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(3) }}",
    "{{ ''.__class__ }}",
    "{{ x | attr('__class__') }}",
    "{{ '%9999999d' % 1 }}",
    "{{ ['a'] * 999 | map(attribute='0.0.0.0.0.0.0.0.0.0.0') | list }}",
    "{{ messages | map('tojson') | join('a' * 999) }}",
    "{{ messages[::-1][0].content[::-1] }}",
    "{{ {'a': messages} | tojson(indent=7) }}",
    "{{ dict(a=1, b=messages).items() | list }}",
    "{{ loop }}",
    "{{ ns }}",
    "{{ namespace(a=namespace).a() }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% raw %}",
    "{# ",
    "\\",
    "{{ [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]] }}",
)


def template(folder: Path) -> Callable[[int], str]:
    """One chat template. The seed also chooses the chat, the tools and the options."""
    sound = [path.read_text(encoding="utf-8") for path in TEMPLATES]
    chats = list(CHATS.values())

    def case(seed: int) -> str:
        rng = random.Random(seed)
        original = rng.choice(sound)
        source = mutate_template(original, rng, sound)
        chat, tools, options, prompt = (
            rng.choice(chats),
            rng.choice(([], TOOLS)),
            rng.choice(OPTIONS),
            rng.random() < 0.7,
        )
        try:
            text = ChatTemplate(source, bos="<s>", eos="</s>").render(chat, prompt, tools=tools, options=options)
        except PowerLabError as error:
            if len(str(error)) > 2000:
                raise AssertionError(f"an error of {len(str(error))} characters: {str(error)[:500]}") from error
            return REFUSED
        if any(word in source for word in _UNBOUNDED):
            return ALONE
        try:
            wanted = theirs(source, chat, tools, options, prompt)
        except Exception:  # noqa: BLE001 - of any kind
            return LENIENT
        if text != wanted:
            at = next((i for i, pair in enumerate(zip(text, wanted, strict=False)) if pair[0] != pair[1]), None)
            raise AssertionError(f"differs at {at}: {text[at:][:200]!r} against {wanted[at:][:200]!r}")
        return SAME if source == original else AGREED

    return case


def mutate_template(source: str, rng: random.Random, others: list[str]) -> str:
    """One to four changes of its tokens, then perhaps of a character. The same generator state gives the same text."""
    tokens = _TOKENS.findall(source)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 4))):
        rng.choice(_CHANGES)(tokens, rng, others)
    text = "".join(tokens)
    if text and rng.random() < 0.1:
        at = rng.randrange(len(text))
        text = (
            text[:at]
            + rng.choice(("", "{", "}", "%", "'", "\\", "\0", "\ud800", "é", "\ufdd0", "#"))
            + text[at + rng.randrange(2) :]
        )
    return text[:MOST]


def _span(tokens: list[str], rng: random.Random) -> slice:
    at = rng.randrange(len(tokens) + 1)
    return slice(at, at + rng.choice((1, 1, 2, 5, 20, 200)))


def _delete(tokens: list[str], rng: random.Random, others: list[str]) -> None:
    del tokens[_span(tokens, rng)]


def _repeat(tokens: list[str], rng: random.Random, others: list[str]) -> None:
    span = _span(tokens, rng)
    times = rng.choice((2, 2, 3, 30, 1000))
    tokens[span] = (tokens[span] * times)[:20_000]


def _swap(tokens: list[str], rng: random.Random, others: list[str]) -> None:
    one, two = _span(tokens, rng), _span(tokens, rng)
    if one.start < two.start and one.stop <= two.start:
        first, second = tokens[one], tokens[two]
        tokens[two], tokens[one] = first, second


def _word(tokens: list[str], rng: random.Random, others: list[str]) -> None:
    """A name for a name, mostly: the rest would not be parsed."""
    places = [at for at, token in enumerate(tokens) if token[0].isalpha()]
    if places:
        tokens[rng.choice(places)] = rng.choice(_WORDS) if rng.random() < 0.7 else tokens[rng.choice(places)]


def _number(tokens: list[str], rng: random.Random, others: list[str]) -> None:
    places = [at for at, token in enumerate(tokens) if token.isdigit()]
    if places:
        tokens[rng.choice(places)] = rng.choice(_NUMBERS)


def _grow(tokens: list[str], rng: random.Random, others: list[str]) -> None:
    """A text or name becomes a long one."""
    places = [at for at, token in enumerate(tokens) if token[0] in "'\"" or token.isidentifier()]
    if places:
        at = rng.choice(places)
        tokens[at] = f"({tokens[at]} * {rng.choice(_NUMBERS)})"


def _snippet(tokens: list[str], rng: random.Random, others: list[str]) -> None:
    edges = [at for at, token in enumerate(tokens) if token.startswith(("{%", "{{"))] or [0]
    tokens.insert(rng.choice(edges), rng.choice(_SNIPPETS))


def _splice(tokens: list[str], rng: random.Random, others: list[str]) -> None:
    other = _TOKENS.findall(rng.choice(others))
    tokens[_span(tokens, rng)] = other[_span(other, rng)]


def _nest(tokens: list[str], rng: random.Random, others: list[str]) -> None:
    opening, closing = rng.choice(
        (
            ("{% if messages %}", "{% endif %}"),
            ("{% for n in range(9) %}", "{% endfor %}"),
            ("{% set x %}", "{% endset %}{{ x }}"),
            ("{% macro f() %}", "{% endmacro %}{{ f() }}"),
            ("{% filter upper %}", "{% endfilter %}"),
            ("{{ (", ") }}"),
        )
    )
    times = rng.choice((1, 2, 5, 30, 2000))
    edges = [at for at, token in enumerate(tokens) if token.startswith(("{%", "{{"))] or [0]
    at = rng.choice(edges)
    tokens[at:at] = [opening] * times
    tokens += [closing] * times


_CHANGES = (_delete, _repeat, _swap, _word, _word, _number, _grow, _snippet, _splice, _nest)

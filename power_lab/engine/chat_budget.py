"""What a chat template may use up: the size of values, the work of one operation, and both for a whole rendering.

Every operation that makes a value, prints a text or repeats pays from a budget, which no single operation can overdraw
by much: its operands are bounded values, and the few operations whose result or work can be far larger than their
operands are checked before they run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

from power_lab.errors import TokenizerError

MAX_VALUE = 1 << 22  # weight of one value, see `weigh`
MAX_NODES = 200_000  # parts of one value
MAX_DEPTH = 64
MAX_TOTAL = 1 << 25  # weight of everything that one rendering makes and prints
MAX_SECONDS = 1.0  # of this thread's processor time, so that a busy machine changes nothing
MAX_CALLS = 64  # macros and recursive loops inside one another; each takes C stack, whatever Python's own limit is
# Of a float. Python raises 10 to that power, and one such operation stops every thread for as long as it takes.
MAX_DIGITS = 300
MAX_PATTERN = 256  # where the work is the product of both lengths
MAX_PATH = 8  # dots of an attribute path, which is walked for every item of a list

_QUADRATIC = frozenset(("lstrip", "rfind", "rpartition", "rsplit", "rstrip", "strip", "trim"))
_PATHS = {"selectattr": 1, "rejectattr": 1, "join": 2, "max": 2, "min": 2, "unique": 2, "sort": 3}  # where it may stand
_VIEWS = (type({}.items()), type({}.keys()), type({}.values()))
_FORM = re.compile(r"%(?:%|(?:\(\w{1,64}\))?[0-9]{0,2}(?:\.[0-9]{1,2})?[difrs])")  # what is left of a format has no "%"


class Lazy:
    """What a generator gave, taken at once so that no work hides in it. Like a generator it is used up once, has no length
    and counts as true.
    """

    __slots__ = ("_left", "items")

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self._left = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self._left


class Budget:
    """What one rendering may still use. Raises TokenizerError when it is used up."""

    __slots__ = ("_calls", "_end", "_left")

    def __init__(self) -> None:
        self._left = MAX_TOTAL
        self._end = time.thread_time() + MAX_SECONDS
        self._calls = 0

    def pay(self, weight: int = 1) -> None:
        self._left -= weight
        if self._left < 0:
            raise too_much(f"makes more than {MAX_TOTAL} characters")
        if time.thread_time() > self._end:
            raise too_much(f"runs longer than {MAX_SECONDS} s")

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call, so that calls inside one another are counted."""
        self.pay()
        if self._calls >= MAX_CALLS:
            raise too_much(f"has calls that are nested more than {MAX_CALLS} deep")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1


def too_much(what: str) -> TokenizerError:
    return TokenizerError(f"The chat template {what}.", "It is broken or hostile; use raw prompts with this model.")


def weigh(value: object) -> int:
    """Size of a plain value when written out: characters, and 1 + depth for each part; shared parts count each time.

    Raises TokenizerError for what is not plain data (text, numbers, lists, dicts) and for values over the bounds.
    """
    if isinstance(value, str) and len(value) < MAX_VALUE:
        return 1 + len(value)
    weight = parts = 0
    stack: list[tuple[Any, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        parts += 1
        weight += 1 + depth
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, (list, tuple, dict, Lazy, *_VIEWS)):
            item = item.items if isinstance(item, Lazy) else item
            if depth >= MAX_DEPTH or parts + len(stack) + len(item) > MAX_NODES:
                raise too_much("makes a value of too many parts")
            stack.extend((part, depth + 1) for part in item)
            if isinstance(item, dict):
                stack.extend((part, depth + 1) for part in item.values())
        elif isinstance(item, int):
            if item.bit_length() > 64:
                raise too_much("makes a number of more than 64 bits")
        elif not (item is None or isinstance(item, (float, range, Undefined))):
            raise TokenizerError(f"The chat template uses a {type(item).__name__} as a value.")
    if weight > MAX_VALUE:
        raise too_much(f"makes a value of more than {MAX_VALUE} characters")
    return weight


def settle(budget: Budget, value: Any) -> Any:
    """A fresh value, paid for."""
    if isinstance(value, (Undefined, Namespace, Macro)):
        budget.pay()
        return value
    if isinstance(value, Iterator):
        value = Lazy(_drained(budget, value))
    weigh(value)
    budget.pay(1 + _count(value))
    return value


def _drained(budget: Budget, items: Iterable[Any]) -> list[Any]:
    """Each item may be the work of a test or filter."""
    found: list[Any] = []
    for item in items:
        budget.pay()
        found.append(item)
        if len(found) > MAX_NODES:
            raise too_much("makes a value of too many parts")
    return found


def check_operation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a filter or method that would grow out of bounds before it runs. `args` begin with what it works on.

    Raises TokenizerError.
    """
    if name in ("length", "count", "first", "last", "default", "d") and len(args) == 1:
        return  # the work does not depend on the size, and templates ask for the length of a whole chat in loops
    subject, extra = (args[0] if args else None), [*args[1:], *kwargs.values()]
    total = sum(map(weigh, args)) + sum(map(weigh, kwargs.values()))
    texts = [part for part in extra if isinstance(part, str)]
    if name == "replace":
        old, new = (str(part) for part in [*extra, "", ""][:2])
        total += str(subject).count(old) * len(new)
    elif name == "join":
        longest = max((len(str(part)) for part in (subject, *extra) if isinstance(part, (str, int))), default=0)
        total += longest * max(_count(subject), *map(_count, extra), 1)
    elif name in ("indent", "tojson"):
        total *= 1 + sum(map(_width, extra))
    elif name == "round" and any(isinstance(part, int) and abs(part) > MAX_DIGITS for part in extra):
        raise too_much(f"rounds to more than {MAX_DIGITS} digits")
    elif name in _QUADRATIC and max(map(len, texts), default=0) > MAX_PATTERN:
        raise too_much(f"searches for a text of more than {MAX_PATTERN} characters")
    at = _PATHS.get(name, len(args))
    if any(str(path).count(".") > MAX_PATH for path in (*args[at : at + 1], kwargs.get("attribute"))):
        raise too_much(f"follows a path of more than {MAX_PATH} attributes")
    if total > MAX_VALUE:
        raise too_much(f"makes a value of more than {MAX_VALUE} characters")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """The same for operators. Raises TokenizerError."""
    if operator == "*":
        for sequence, times in ((left, right), (right, left)):
            repeated = isinstance(sequence, (str, list, tuple)) and isinstance(times, int)
            if repeated and len(sequence) * times > MAX_VALUE:
                raise too_much(f"makes a value of more than {MAX_VALUE} characters")
    elif operator == "**" and isinstance(left, int) and isinstance(right, int) and right * left.bit_length() > 128:
        raise too_much("makes a number of more than 64 bits")
    elif operator == "%" and isinstance(left, str):
        if "%" in _FORM.sub("", left):
            raise too_much("formats text in a way that chat templates cannot")
        if (1 + left.count("%")) * (100 + weigh(right)) > MAX_VALUE:
            raise too_much("formats a text that is too long")


def _count(value: Any) -> int:
    value = value.items if isinstance(value, Lazy) else value
    return len(value) if isinstance(value, (str, list, tuple, dict, range, *_VIEWS)) else 0


def _width(value: Any) -> int:
    """How many characters an option may add before each part: a number of blanks or a text."""
    if isinstance(value, (list, tuple)):
        return sum(map(_width, value))
    return len(value) if isinstance(value, str) else max(value, 0) if isinstance(value, int) else 0

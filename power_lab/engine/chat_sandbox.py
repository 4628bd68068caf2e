"""Jinja for templates that nobody vouches for: bounded in time, in memory and in reach.

A chat template comes with a model file, so it is hostile input. Jinja's immutable sandbox keeps it from Python's
insides, but not from `"x" * 10**9`, nested loops or a list that doubles fifty times. Here every operation that makes a
value, prints a text or repeats pays from a budget, which no single operation can overdraw by much: its operands are
bounded values, and the few operations whose result can be far larger than their operands are checked before they run.
Attributes, methods, filters and functions are lists of what chat templates need; nothing else exists.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from power_lab.errors import TokenizerError

MAX_SOURCE = 1 << 16  # characters of a template; the longest in use have about 20,000
MAX_VALUE = 1 << 22  # weight of one value, see `weigh`
MAX_NODES = 200_000  # parts of one value
MAX_DEPTH = 64
MAX_TOTAL = 1 << 25  # weight of everything that one rendering makes and prints
MAX_SECONDS = 1.0  # of this thread's processor time, so that a busy machine changes nothing
MAX_RANGE = 100_000
MAX_DIGITS = 300  # of a float; Python raises 10 to that power, and one such operation stops every thread for as long as it takes
MAX_PATTERN = 256  # where the work is the product of both lengths


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_QUADRATIC = _words("lstrip rfind rpartition rsplit rstrip strip trim")
_BUDGET = "#budget"  # names with "#" cannot be written in a template
_METHODS: dict[type, frozenset[str]] = {
    str: _words(
        "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper join lower lstrip"
        " partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip"
        " title upper"
    ),
    dict: _words("get items keys values"),
    list: _words("count index"),
    tuple: _words("count index"),
    LoopContext: _words(
        "changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0"
    ),
}
_FILTERS = _words(
    "abs capitalize count d default dictsort first float indent int items join last length list lower map max min"
    " reject rejectattr replace reverse round select selectattr sort string title trim unique upper"
)


class Budget:
    """What one rendering may still use. Raises TokenizerError when it is used up."""

    __slots__ = ("_end", "_left")

    def __init__(self) -> None:
        self._left = MAX_TOTAL
        self._end = time.thread_time() + MAX_SECONDS

    def pay(self, weight: int = 1) -> None:
        self._left -= weight
        if self._left < 0:
            raise too_much(f"makes more than {MAX_TOTAL} characters")
        if time.thread_time() > self._end:
            raise too_much(f"runs longer than {MAX_SECONDS} s")


def too_much(what: str) -> TokenizerError:
    return TokenizerError(f"The chat template {what}.", "It is broken or hostile; use raw prompts with this model.")


def weigh(value: object) -> int:
    """Size of a plain value when written out: characters, and 1 + depth for each part; shared parts count each time.

    Raises TokenizerError for what is not plain data (text, numbers, lists, dicts) and for values over the bounds.
    """
    weight = parts = 0
    stack: list[tuple[Any, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        parts += 1
        weight += 1 + depth
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, (list, tuple, dict)):
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
    """A fresh value, paid for. Lazy sequences become lists, so that no work hides in them."""
    if isinstance(value, (Undefined, Namespace, Macro)):
        budget.pay()
        return value
    if isinstance(value, Iterator) or type(value) in (type({}.items()), type({}.keys()), type({}.values())):
        value = list(islice(value, MAX_NODES + 1))
    weigh(value)
    budget.pay(1 + (len(value) if isinstance(value, (str, list, tuple, dict)) else 0))
    return value


def precheck(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what would grow out of bounds before it is done. `args` begin with the value that is worked on."""
    total = sum(map(weigh, args)) + sum(map(weigh, kwargs.values()))
    subject = args[0] if args else None
    extra = [*args[1:], *kwargs.values()]
    if name == "replace":
        old, new = (str(part) for part in [*extra, "", ""][:2])
        total += str(subject).count(old) * len(new)
    elif name == "join":
        items = extra[0] if isinstance(subject, str) and extra and not isinstance(extra[0], str) else subject
        longest = max((len(str(part)) for part in (subject, *extra) if isinstance(part, (str, int))), default=0)
        total += longest * (len(items) if isinstance(items, (str, list, tuple, dict)) else 1)
    elif name in ("indent", "tojson"):
        widths = [len(part) if isinstance(part, str) else part for part in extra if isinstance(part, (str, int))]
        total *= 1 + max([0, *widths])
    elif name == "round" and any(isinstance(part, int) and part > MAX_DIGITS for part in extra):
        raise too_much(f"rounds to more than {MAX_DIGITS} digits")
    elif name in _QUADRATIC and max((len(part) for part in extra if isinstance(part, str)), default=0) > MAX_PATTERN:
        raise too_much(f"searches for a text of more than {MAX_PATTERN} characters")
    if total > MAX_VALUE:
        raise too_much(f"makes a value of more than {MAX_VALUE} characters")


def _budget(context: Context) -> Budget:
    return context.parent[_BUDGET]


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its work. Jinja says by an attribute what a filter wants as its first argument."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def filter(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.pay()
        precheck(name, args, kwargs)
        lead = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return settle(budget, function(*([lead[wants]] if wants else []), *args, **kwargs))

    return filter


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context
def _made(context: Context, value: Any) -> Any:
    return settle(_budget(context), value)


@pass_context
def _text(context: Context, value: Any) -> str:
    """Text that is about to be joined or printed."""
    weigh(value)
    text = str(value)
    _budget(context).pay(1 + len(text))
    return text


@pass_context
def _tick(context: Context, value: Any) -> Any:
    _budget(context).pay()
    return value


class _Meter(NodeTransformer):
    """Puts the paying filters into a parsed template, where Jinja's sandbox has no hook of its own."""

    def _paid(self, name: str, node: Any) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        return self._paid("#made", self.generic_visit(node))

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._paid("#made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._paid("#text", part) for part in node.nodes]
        return self._paid("#made", node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        parts = [
            nodes.Const(part.data, lineno=part.lineno) if isinstance(part, nodes.TemplateData) else part
            for part in node.nodes
        ]
        node.nodes = [self._paid("#text", part) for part in parts]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = self._paid("#tick", node.test)
        tick = nodes.ExprStmt(self._paid("#tick", nodes.Const(None, lineno=node.lineno)), lineno=node.lineno)
        node.body.insert(0, tick)
        return node

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        raise TokenizerError(f"The chat template uses {type(node).__name__}, which chat templates cannot.")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = visit_Block = _refuse
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _refuse


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; in a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates. `now` is the clock behind `strftime_now`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, cache_size=0, extensions=[loopcontrols, _Generation]
        )

        def refuse(message: object) -> None:
            raise TokenizerError(f"The chat template refuses these messages: {str(message)[:500]}")

        def strftime_now(form: str) -> str:
            if not isinstance(form, str) or len(form) > 64 or re.search(r"%[^a-zA-Z]*\d", form):
                raise TokenizerError("The chat template asks for the date in a form that is not supported.")
            return now().strftime(form)

        def bounded_range(*bounds: int) -> range:
            numbers = range(*bounds)
            if len(numbers) > MAX_RANGE:
                raise too_much(f"counts over more than {MAX_RANGE} numbers")
            return numbers

        self.globals = {
            "namespace": Namespace,
            "raise_exception": refuse,
            "range": bounded_range,
            "strftime_now": strftime_now,
        }
        self._functions = tuple(self.globals.values())
        self.filters = {name: _metered(name, FILTERS[name]) for name in _FILTERS}
        self.filters |= {"tojson": _metered("tojson", _tojson), "safe": _metered("safe", lambda value: value)}
        self.filters |= {"#made": _made, "#text": _text, "#tick": _tick}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS.items())

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise TokenizerError(
            f"The chat template asks for {attribute!r} of a {type(obj).__name__}, which is not allowed."
        )

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, (Macro, LoopContext, Undefined)) or any(obj is known for known in self._functions):
            return True
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        return any(isinstance(owner, kind) and name in names for kind, names in _METHODS.items())

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # Jinja's own names
        budget = _budget(__context)
        budget.pay()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, list, dict, tuple)):
            precheck(__obj.__name__, (owner, *args), kwargs)
        return settle(budget, super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        budget.pay()
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                repeated = isinstance(sequence, (str, list, tuple)) and isinstance(times, int)
                if repeated and len(sequence) * times > MAX_VALUE:
                    raise too_much(f"makes a value of more than {MAX_VALUE} characters")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and right * left.bit_length() > 128:
            raise too_much("makes a number of more than 64 bits")
        elif operator == "%" and isinstance(left, str):
            widths = re.search(r"%[^a-zA-Z%]*[\d*]", left)
            if widths or (1 + left.count("%")) * weigh(right) > MAX_VALUE:
                raise too_much("formats text with a width, or makes a text that is too long")
        return settle(budget, super().call_binop(context, operator, left, right))


class Program:
    """A compiled template. Raises TokenizerError when the source is too long or no template."""

    def __init__(self, source: str, sandbox: Sandbox) -> None:
        if len(source) > MAX_SOURCE:
            raise too_much(f"has {len(source)} characters; at most {MAX_SOURCE} are allowed")
        try:
            tree = _Meter().visit(sandbox.parse(source))
            tree.set_environment(sandbox)
            code = sandbox.compile(tree)
            self._template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))
        except TokenizerError:
            raise
        except Exception as error:  # Jinja and Python's compiler fail in many ways on hostile source
            raise TokenizerError(f"The chat template cannot be compiled: {type(error).__name__}: {error}") from error

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises TokenizerError when the template fails or exceeds its bounds."""
        try:
            return self._template.render({**variables, _BUDGET: Budget()})
        except TokenizerError:
            raise
        except Exception as error:
            raise TokenizerError(f"The chat template failed: {type(error).__name__}: {error}") from error

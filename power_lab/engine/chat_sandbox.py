"""Jinja for templates that nobody vouches for: bounded in time, in memory and in reach.

A chat template comes with a model file, so it is hostile input. Jinja's immutable sandbox keeps it from Python's
insides, but not from `"x" * 10**9`, nested loops or a list that doubles fifty times. Here everything that makes a value,
prints a text, compares or repeats pays (see `chat_budget`), the parsed template is bounded before anything walks it, and
attributes, methods, filters and functions are lists of what chat templates need; nothing else exists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from types import TracebackType
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from power_lab.engine.chat_budget import Budget, Lazy, check_operation, check_operator, settle, too_much, weigh
from power_lab.errors import TokenizerError

MAX_SOURCE = 1 << 16  # characters of a template; the longest in use have about 20,000
MAX_SYNTAX = 10_000  # nodes of its syntax tree; the largest in use have about 1,500
MAX_NESTING = 100  # levels of its syntax tree; the deepest in use have about 30. Deeper ones overflow compilers' stacks
MAX_RANGE = 100_000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BUDGET = "#budget"  # names with "#" cannot be written in a template
_JINJA_KEYWORDS = ("_loop_vars", "_block_vars")  # its compiler adds them to every call
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
    " reject rejectattr replace reverse round safe select selectattr sort string title trim unique upper"
)
_TESTS = _words(
    "!= < <= == > >= boolean callable defined divisibleby eq equalto even false float ge greaterthan gt in integer iterable"
    " le lessthan lower lt mapping ne none number odd sameas sequence string true undefined upper"
)


def _budget(context: Context) -> Budget:
    return context.parent[_BUDGET]


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its work. Jinja says by an attribute what a filter wants as its first argument."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def filter(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.pay()
        check_operation(name, args, kwargs)
        lead = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return settle(budget, function(*([lead[wants]] if wants else []), *args, **kwargs))

    return filter


def _ticking(test: Callable[..., bool]) -> Callable[..., bool]:
    """A test that pays: `select` may ask it of many items before it yields any."""

    @pass_context
    def ticking(context: Context, *args: Any) -> bool:
        _budget(context).pay()
        return test(*args)

    return ticking


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
    if isinstance(value, Lazy):
        raise TokenizerError("The chat template prints what a filter has not listed yet.")
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

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            operand.expr = self._paid("#tick", operand.expr)
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

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


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
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": Namespace,
            "raise_exception": refuse,
            "range": bounded_range,
            "strftime_now": strftime_now,
        }
        self._functions = tuple(self.globals.values())
        self.filters = {name: _metered(name, FILTERS[name]) for name in _FILTERS}
        self.tests = {name: _ticking(TESTS[name]) for name in _TESTS}
        self.filters |= {"tojson": _metered("tojson", _tojson), "#made": _made, "#text": _text, "#tick": _tick}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS.items())

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise TokenizerError(
            f"The chat template asks for {str(attribute)[:100]!r} of a {type(obj).__name__}, which is not allowed."
        )

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, (Macro, LoopContext, Undefined)) or any(obj is known for known in self._functions):
            return True
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        return any(isinstance(owner, kind) and name in names for kind, names in _METHODS.items())

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # Jinja's own names
        budget = _budget(__context)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, list, dict, tuple)):
            given = {key: value for key, value in kwargs.items() if key not in _JINJA_KEYWORDS}
            check_operation(__obj.__name__, (owner, *args), given)
        with budget.call():
            return settle(budget, super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        budget.pay()
        check_operator(operator, left, right)
        return settle(budget, super().call_binop(context, operator, left, right))


class Program:
    """A compiled template.

    Attributes:
        words: every name, attribute, key and text in it, so what it can ask for at all.
        variables: the names that it takes from outside.

    Raises TokenizerError when the source is too long or no template; the message has the line.
    """

    def __init__(self, source: str, sandbox: Sandbox) -> None:
        if len(source) > MAX_SOURCE:
            raise too_much(f"has {len(source)} characters; at most {MAX_SOURCE} are allowed")
        try:
            tree = sandbox.parse(source)
            self.words = frozenset(_words_of(tree))
            self.variables = _variables(tree) - sandbox.globals.keys()
            tree = _Meter().visit(tree)
            tree.set_environment(sandbox)
            code = sandbox.compile(tree)
            self._template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))
        except TokenizerError:
            raise
        except RecursionError:
            raise too_much("is nested too deeply") from None
        except Exception as error:  # Jinja and Python's compiler fail in many ways on hostile source
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            said = str(error.args[0] if error.args else error)[:500]
            raise TokenizerError(
                f"The chat template cannot be compiled: {type(error).__name__}{line}: {said}",
                "Use raw prompts with this model.",
            ) from error

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises TokenizerError when the template fails or exceeds its bounds."""
        try:
            return self._template.render({**variables, _BUDGET: Budget()})
        except TokenizerError:
            raise
        except RecursionError:
            raise too_much("has calls that are nested too deeply") from None
        except Exception as error:
            line = _line(error.__traceback__)
            raise TokenizerError(
                f"The chat template failed{line}: {type(error).__name__}: {str(error)[:500]}"
            ) from error


def _words_of(tree: nodes.Template) -> Iterator[str]:
    """Names and texts of a syntax tree, which is bounded here: without recursion, since it may be as deep as it is long."""
    stack: list[tuple[nodes.Node, int]] = [(tree, 0)]
    seen = 0
    while stack:
        node, depth = stack.pop()
        seen += 1
        if seen > MAX_SYNTAX:
            raise too_much(f"has more than {MAX_SYNTAX} parts")
        if depth > MAX_NESTING:
            raise too_much(f"is nested more than {MAX_NESTING} deep")
        branches = node.elif_ if isinstance(node, nodes.If) else []  # compilers nest each in the one before
        stack.extend((branch, depth + index) for index, branch in enumerate(branches, 1))
        stack.extend((child, depth + 1) for child in node.iter_child_nodes(exclude=("elif_",)))
        for name in ("name", "attr", "value", "key"):
            word = getattr(node, name, None)
            if isinstance(word, str):
                yield word


def _variables(tree: nodes.Template) -> frozenset[str]:
    """Names that a template takes from outside: those that it reads before it sets them, if it sets them at all."""
    first: dict[str, str] = {}
    for name in tree.find_all(nodes.Name):
        first.setdefault(name.name, name.ctx)
    return frozenset(name for name in meta.find_undeclared_variables(tree) if first.get(name) == "load")


def _line(trace: TracebackType | None) -> str:
    """Where in the template an error was raised; Jinja gives its frames the template's own lines."""
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" in line {line}" if line else ""

"""Options of the magics. Those of `%%generate` are made from SamplingParams, so there is one list of parameters."""

from __future__ import annotations

import argparse
import ast
import difflib
import shlex
import types
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from IPython.core.error import UsageError

from power_lab.engine.request import SamplingParams


class Options(argparse.ArgumentParser):
    """A parser that raises IPython's UsageError (shown as one line, without a traceback)."""

    def __init__(self, magic: str, **options: Any) -> None:
        super().__init__(prog=magic, add_help=False, allow_abbrev=False, exit_on_error=False, **options)
        self.add_argument("--help", action="store_true", help="show this and do nothing")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; `{self.prog} --help` lists the options.")

    def read(self, line: str) -> argparse.Namespace:
        """Parse a magic's line. Raises UsageError that names the wrong option and a likely right one."""
        try:
            found, rest = self.parse_known_args(shlex.split(line))
        except (ValueError, argparse.ArgumentError) as error:
            self.error(str(error))
        if rest:
            self.error(f"{rest[0]} is not an option{self._near(rest[0])}")
        return found

    @property
    def names(self) -> list[str]:
        """All option names."""
        return sorted(self._option_string_actions)

    def _near(self, word: str) -> str:
        near = difflib.get_close_matches(word, self.names, 1)
        return f" (did you mean {near[0]}?)" if near else ""


def generate_options() -> Options:
    """The options of `%%generate`."""
    parser = Options("%%generate", description="The cell is the prompt; the answer streams below it.")
    parser.add_argument("--to", default="run", metavar="NAME", help="variable that gets the Run (default: run)")
    parser.add_argument(
        "--raw", action="store_const", const=False, dest="chat", help="no chat template around the text"
    )
    parser.add_argument(
        "--tools", metavar="NAME", help="variable with JSON schemas of functions that the model may call"
    )
    parser.add_argument(
        "--template-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="variable of the chat template, such as enable_thinking=False; may be given several times",
    )
    parser.add_argument("--quiet", action="store_const", const=False, dest="stream", help="show only the finished run")
    parser.add_argument("--cache-key", default="", help="namespace of the prefix cache")
    parser.add_argument("--deadline-s", type=float, help="seconds to the last token")
    for name, kind in get_type_hints(SamplingParams).items():
        _add(parser, name, kind)
    return parser


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    given = {name: getattr(options, name, None) for name in SamplingParams.__struct_fields__}
    return {name: value for name, value in given.items() if value is not None}


def _add(parser: Options, name: str, kind: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        parser.add_argument(flag, choices=get_args(kind))
    elif get_origin(kind) is tuple:
        item = get_args(kind)[0]
        parser.add_argument(
            flag, action="append", type=_text if item is str else item, help="may be given several times"
        )
    elif kind is bool:
        parser.add_argument(flag, action="store_const", const=True)
    elif kind in (int, float, str):
        parser.add_argument(flag, type=kind)  # a mapping (logit_bias) has no place on a line: lab.generate takes it


def _text(value: str) -> str:
    """`\\n` and `\\t` may be written as such in a stop string."""
    return value.replace("\\n", "\n").replace("\\t", "\t")


def settings_of(words: list[str]) -> dict[str, Any]:
    """`key=value` words as settings; numbers, several with commas between, and True/False are read as such. Raises UsageError."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"{word!r} is not a setting. Write key=value, for example kv_tokens=8192.")
        found[key] = _literal(value)
    return found


def _literal(value: str) -> Any:
    try:
        read = ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError):
        return value
    numbers = read if isinstance(read, tuple) else (read,)  # buckets=1,2,4
    return read if numbers and all(isinstance(one, (int, float)) for one in numbers) else value

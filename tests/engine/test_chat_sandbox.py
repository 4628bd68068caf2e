"""Templates that would take a process down, tried in one that may die: memory is limited, Python's recursion is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from power_lab.engine.chat_budget import MAX_CALLS
from power_lab.engine.templates import ChatTemplate
from power_lab.errors import TokenizerError

ROOT = Path(__file__).parents[2]
MEMORY = 1 << 30  # bytes of address space
SECONDS = 4.0  # of processor time for one template: its own bound is 1 s, and compiling is not in it

_NAMES = [f"a{index}" for index in range(6000)]
HOSTILE = {
    # results and work far larger than operands
    "join a range": "{{ range(99999) | join('a' * 10**6) }}",
    "join by an attribute": "{{ (['a'] * 99999) | join('a' * 10**6, attribute='x') }}",
    "separators of JSON": "{{ ([1] * 99999) | tojson(separators=('x' * 10**6, ':')) }}",
    "round to the left": "{{ 1 | round(-10**8) }}",
    "a long path": "{{ (['a'] * 99999) | map(attribute='0.' * 99999) | list }}",
    "a long path to sort by": "{{ (['a'] * 99999) | sort(attribute='0.' * 99999) }}",
    "a long path to select by": "{{ (['a'] * 99999) | selectattr('0.' * 99999) | list }}",
    "a width by name": "{{ '%(a)1999999999d' % {'a': 1} }}",
    "a precision": "{{ '%.999999999f' % 1.0 }}",
    "a number of many digits": "{{ ('f' * 4000000) | int(0, 16) }}",
    "a power of a float": "{{ 10.0 ** 400 }}",
    "compare, unrolled": "{% set a = [1] * 99999 %}{% set b = [1] * 99999 %}" + "{% if a == b %}{% endif %}" * 2000,
    "compare, chained": "{% set a = [1] * 99999 %}{% set b = [1] * 99999 %}{% for i in range(99) %}{% if a"
    + " == b" * 4000
    + " %}{% endif %}{% endfor %}",
    "search, unrolled": "{% set s = 'a' * 4000000 %}{% set p = 'a' * 2000000 ~ 'b' %}"
    + "{% if p in s %}{% endif %}" * 2000,
    "search, unseen": "{% set s = 'a' * 2000000 %}{{ (['a' * 20 ~ 'b'] * 90000) | select('in', s) | list }}",
    "test, unrolled": "{% set a = ['a'] * 99999 %}" + "{% if a is lower %}{% endif %}" * 2000,
    "calls of a caller": "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{% call f() %}{% endcall %}",
    "calls of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop of itself": "{% for i in [1] recursive %}{{ loop([i]) }}{% endfor %}",
    "deep dicts": "{% set n = namespace(d={}) %}{% for i in range(99999) %}{% set n.d = {'a': n.d} %}{% endfor %}",
    "doubled lists": "{% set n = namespace(x=1) %}{% for i in range(99999) %}{% set n.x = [n.x] * 2 %}{% endfor %}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ n | tojson }}",
    "a namespace in a list in itself": "{% set n = namespace() %}{% set n.l = [n] %}{{ n.l }}",
    "lengths": "{% for i in range(99999) %}{% for j in range(99999) %}{{ loop.length }}{% break %}{% endfor %}{% endfor %}",
    "changed": "{% for i in range(99999) %}{{ loop.changed([1] * 9999) }}{% endfor %}",
    # templates that compilers choke on
    "brackets": "{{ " + "[" * 30000 + "]" * 30000 + " }}",
    "braces": "{{ " + "{1:" * 15000 + "1" + "}" * 15000 + " }}",
    "open braces": "{" * 65000,
    "not": "{{ " + "not " * 15000 + "1 }}",
    "minus": "{{ " + "-" * 60000 + "1 }}",
    "powers": "{{ " + "1 ** " * 13000 + "1 }}",
    "attributes": "{{ a" + ".a" * 30000 + " }}",
    "filters": "{{ a" + "|abs" * 15000 + " }}",
    "tests": "{{ a" + " is none" * 7000 + " }}",
    "sums": "{{ 1" + "+1" * 30000 + " }}",
    "concatenations": "{% set x = 1" + "~1" * 30000 + " %}",
    "choices": "{{ " + "1 if 1 else " * 5000 + "1 }}",
    "branches": "{% if 1 %}" + "{% elif 1 %}" * 5000 + "{% endif %}",
    "ifs": "{% if 1 %}" * 3600 + "{% endif %}" * 3600,
    "loops": "{% for a in [1] %}" * 200 + "{% endfor %}" * 200,
    "macros": "{% macro a() %}" * 2000 + "{% endmacro %}" * 2000,
    "call blocks": "{% call a() %}" * 2000 + "{% endcall %}" * 2000,
    "filter blocks": "{% filter upper %}" * 1900 + "{% endfilter %}" * 1900,
    "sets": "{% set a %}" * 3000 + "{% endset %}" * 3000,
    "arguments": "{{ f(" + ",".join(f"{name}=1" for name in _NAMES) + ") }}",
    "parameters": "{% macro f(" + ",".join(f"{name}=1" for name in _NAMES) + ") %}{% endmacro %}",
    "targets": "{% set " + ",".join(_NAMES) + " = [1] %}",
    "a literal number": "{{ " + "1" * 60000 + " }}",
    "a comment without an end": "{#" * 32000,
    "a text without an end": "{{ '" + "\\" * 65000,
    "raw without an end": "{% raw %}" + "{%" * 30000,
    # what is not there
    "joiner": "{{ joiner() }}",
    "cycler": "{{ cycler(1)() }}",
    "lipsum": "{{ lipsum() }}",
    "random": "{{ [1, 2] | random }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "extends": "{% extends 'x' %}",
    "from import": "{% from 'x' import y %}",
    "a block": "{% block x %}{% endblock %}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
    "do": "{% do messages %}",
    "a private name of a namespace": "{{ namespace()['_Namespace__attrs'] }}",
    "the budget": "{{ self['#budget'] }}{{ messages | attr('#budget') }}",
    "a lazy sequence": "{{ messages | map('upper') }}",
    "a bound method": "{{ 'x'.upper }}",
}
_TRY = """
import json, resource, sys, threading, time
from power_lab.engine.templates import ChatTemplate
from power_lab.errors import TokenizerError
resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 20)
def attempt(source):
    try:
        return f"text of {len(ChatTemplate(source).render([{'role': 'user', 'content': 'x'}]))}"
    except TokenizerError as error:
        return "typed: " + str(error)
    except BaseException as error:
        return f"untyped: {type(error).__name__}: {error}"
def run():
    for name, source in json.load(sys.stdin).items():
        start = time.thread_time()
        said = attempt(source)
        print(json.dumps([name, said, time.thread_time() - start]), flush=True)
thread = threading.Thread(target=run)
thread.start()
thread.join()
""".replace("MEMORY", str(MEMORY))


@pytest.fixture(scope="module")
def tried() -> dict[str, tuple[str, float]]:
    done = subprocess.run(
        [sys.executable, "-c", _TRY], input=json.dumps(HOSTILE), cwd=ROOT, capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = {name: (said, seconds) for name, said, seconds in map(json.loads, done.stdout.splitlines())}
    died = next((name for name in HOSTILE if name not in found), None)
    assert done.returncode == 0, f"the process died of {died!r}: {done.returncode}, {done.stderr[-500:]}"
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_a_typed_error(name: str, tried: dict[str, tuple[str, float]]) -> None:
    said, seconds = tried[name]
    assert said.startswith("typed: ")
    assert len(said) < 1000
    assert seconds < SECONDS


def test_nothing_hides_behind_the_memory_limit(tried: dict[str, tuple[str, float]]) -> None:
    assert [name for name, (said, _) in tried.items() if "MemoryError" in said] == []


def test_depth_that_templates_use_is_allowed() -> None:
    deep = (
        "{{ "
        + "[" * 40
        + "]" * 40
        + " }}{% if a %}"
        + "{% elif b %}" * 40
        + "{% endif %}"
        + "{{ 'a'"
        + " + 'b'" * 40
        + " }}"
    )
    assert ChatTemplate(deep).render([{"role": "user", "content": "x"}]).endswith("b" * 40)
    calls = "{% macro f(n) %}{{ n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(N) }}"
    assert ChatTemplate(calls.replace("N", "30")).render([{"role": "user", "content": "x"}]).startswith("302928")
    with pytest.raises(TokenizerError, match=f"nested more than {MAX_CALLS} deep"):
        ChatTemplate(calls.replace("N", "99")).render([{"role": "user", "content": "x"}])

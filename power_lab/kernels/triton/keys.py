"""Names in Triton's cache that do not depend on which kernel comes first.

Triton 3.6 hashes a function together with the global constants that it and its callees use, but reads a callee's constants before it has
hashed it: of one that is met for the first time it sees none. A kernel's name then depends on what this process has launched before, and
what one process has compiled another does not find. So every function is hashed here once, callees first.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable


def settle(*modules: ModuleType) -> None:
    """Give all functions of these modules, and what they call, the names that they keep."""
    done: set[int] = set()
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, JITCallable):
                _settle(value, done)


def _settle(function: JITCallable, done: set[int]) -> None:
    if id(function) in done:
        return
    done.add(id(function))  # before its callees: it may be one of them
    for callee in _callees(function):
        _settle(callee, done)
    _ = function.cache_key


def _callees(function: JITCallable) -> Iterator[JITCallable]:
    """Functions that its code names, by themselves or as attributes of modules that it names."""
    code = function.fn.__code__
    named: list[Any] = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    for value in named:
        if isinstance(value, JITCallable):
            yield value
        elif isinstance(value, ModuleType):
            for name in code.co_names:
                if isinstance(found := vars(value).get(name), JITCallable):
                    yield found

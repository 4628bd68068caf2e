"""Operations as jobs of int64 words, and programs of jobs that run in one native call.

A job is (chunks, operation, arguments ...): addresses, counts, and floats as their bits. A step of a model is a few hundred jobs of
microseconds; with Python between them it takes a quarter longer. The words stay valid as long as the arrays stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import addressof, c_char
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np

from power_lab.kernels.numba.team import JOB_WORDS

Job = tuple[int, ...]

F32, I32, I64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
FLOAT, WORD = Struct("<f"), Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Recorded jobs.

    Attributes:
        words: int64 [jobs, 1 + JOB_WORDS].
        arrays: what the jobs' addresses point into.
    """

    words: np.ndarray
    arrays: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes


def words(jobs: Iterable[Job]) -> np.ndarray:
    """Jobs as the native loop reads them."""
    jobs = list(jobs)
    table = np.zeros((len(jobs), 1 + JOB_WORDS), np.int64)
    for row, job in zip(table, jobs, strict=True):
        row[: len(job)] = job
    return table


def address(array: np.ndarray) -> int:
    """Where an array's first element lies."""
    try:  # a quarter of the time; an operation has several
        return addressof(c_char.from_buffer(array))
    except (TypeError, ValueError):  # read-only, not in one piece, or empty
        return array.__array_interface__["data"][0]


def f32(array: np.ndarray) -> int:
    """The address of an f32 array that lies in one piece. Kernels trust addresses: anything else must stop here."""
    return _checked(array, F32)


def i32(array: np.ndarray) -> int:
    return _checked(array, I32)


def i64(array: np.ndarray) -> int:
    return _checked(array, I64)


def bits(value: float) -> int:
    """A float, rounded to f32, as the word that `vector.f32_from_bits` reads."""
    return WORD.unpack(FLOAT.pack(value))[0]


def _checked(array: np.ndarray, dtype: np.dtype[Any]) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(
            f"an array of {array.dtype} {array.shape} {array.strides} where {dtype.name} in one piece is expected"
        )
    return address(array)


def same(given: object, expected: object, what: str) -> None:
    """Kernels compute addresses: a wrong width must stop here."""
    if given != expected:
        raise ValueError(f"{what} is {given}, expected {expected}")


def within(numbers: np.ndarray, count: int, what: str, first: int = 0) -> None:
    if len(numbers) and not (numbers.min() >= first and numbers.max() < count):
        raise IndexError(f"{what} outside {first}..{count - 1}")

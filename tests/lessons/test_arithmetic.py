"""The kernels' arithmetic in numpy rounds where the kernels round."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.lessons.arithmetic import exp, fma, tree_sum

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


def rounded(exact: Fraction) -> np.float32:
    """The nearest f32, the even one of two: the candidates around a first guess, compared exactly."""
    guess = np.float32(float(exact))
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return min(near, key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.int32)) & 1))


@settings(max_examples=300, deadline=None)
@given(FLOATS, FLOATS, FLOATS)
def test_fma_rounds_once(a, b, c):
    a, b, c = (np.float32(value) for value in (a, b, c))
    if 0 < abs(float(a) * float(b)) < 2.0**-100:  # products of the smallest numbers are not what attention adds
        return
    assert fma(a, b, c) == rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def test_fma_is_not_a_product_and_a_sum():
    a, b, c = (np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32))
    assert (fma(a, b, c) != a * b + c).any()


def test_fma_where_rounding_twice_is_wrong():
    # The sum is just above the middle between two f32, by less than f64 can hold.
    a, b, c = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2.0**-80)
    product = Fraction(float(a)) * Fraction(float(b))
    assert fma(a, b, c) == rounded(product + Fraction(float(c)))
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) != fma(a, b, c)


def test_exp_is_within_an_ulp():
    x = np.linspace(-80, 80, 4001).astype(np.float32)
    true = np.exp(x.astype(np.float64))
    assert (np.abs(exp(x) - true) <= 1.02 * np.spacing(true.astype(np.float32))).all()


def test_tree_sum_folds_sixteen_strands():
    values = np.random.default_rng(1).normal(size=37).astype(np.float32)
    strands = [np.float32(0)] * 16
    for i, value in enumerate(values):
        strands[i % 16] += value
    while len(strands) > 1:
        half = len(strands) // 2
        strands = [strands[i] + strands[i + half] for i in range(half)]
    assert tree_sum(values) == strands[0]

"""The palette to other eyes: kinds of one legend stay apart, and words can be read on the tints below them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from power_lab.widgets import palette

LEGENDS = ("TOKENS", "BLOCKS", "STEPS", "PARTS", "GRAPHS", "PREFIXES", "POINTS")
PAPERS = {"light": (255, 255, 255), "dark": (17, 17, 17)}
# Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as it is seen.
EYES = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(channels):
    share = np.array(channels) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def channels(colour):
    return tuple(bytes.fromhex(colour[1:]))


def lab(light):
    """CIE L*a*b* of linear RGB."""
    xyz = XYZ @ np.clip(light, 0, 1) / XYZ.sum(1)
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def contrast(one, other):
    """WCAG's, of two colours of 0..255."""
    darker, lighter = sorted(XYZ[1] @ linear(colour) for colour in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", PAPERS)
@pytest.mark.parametrize("eye", EYES)
def test_kinds_of_one_legend_stay_apart(eye, theme):
    """By 12 or more in CIE 1976, where 2 can just be seen; kinds that share a colour differ by their signs."""
    for name in LEGENDS:
        colours = {getattr(mark, theme) for mark in getattr(palette, name).values()}
        seen = {colour: lab(np.array(EYES[eye]) @ linear(channels(colour))) for colour in colours}
        for one, other in combinations(sorted(seen), 2):
            assert np.linalg.norm(seen[one] - seen[other]) >= 12, f"{one} and {other} of {name}"


def test_kinds_that_share_a_colour_have_other_signs():
    for name in LEGENDS:
        for one, other in combinations(getattr(palette, name).values(), 2):
            if one.light == other.light:
                assert one.glyph != other.glyph, f"{one.name} and {other.name}"


@pytest.mark.parametrize("theme", PAPERS)
@pytest.mark.parametrize("mark", palette.MARKS.values(), ids=lambda mark: mark.name)
def test_a_sign_can_be_read_on_its_tint(mark, theme):
    tint = np.array([int(value) for value in mark.tint[5:].split(",")[:3]])
    below = 0.2 * tint + 0.8 * np.array(PAPERS[theme])
    assert contrast(channels(getattr(mark, theme)), below) >= 4.5

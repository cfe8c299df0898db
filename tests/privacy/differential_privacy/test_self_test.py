from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from federation.errors import LocalProtocolError, WhoActs
from privacy.differential_privacy import sampler as samplers
from privacy.differential_privacy.laws import gaussian_masses
from privacy.differential_privacy.sampler import Sampler, gaussian, skellam
from privacy.differential_privacy.self_test import (
    _remainder_chance,
    _spread_chance,
    _tail_chance,
    _variance_chance,
    self_test,
)
from privacy.differential_privacy.table import Table

Fixed = Callable[[str], Callable[[int], bytes]]

SOUND = [gaussian(64), gaussian(101), gaussian(4381**2), gaussian(215808**2), skellam(64), skellam(900), skellam(10**6)]

COARSE = Fraction(215808**2, 293**2)
"""The variance of the coarse table of the fourth."""


def shifted(masses: list[int]) -> list[int]:
    """The same law but for one part in 130, moved by a hundredth of a standard deviation across a bin's edge."""
    edge = int(0.157 * 737)
    return [*masses[: edge - 7], *(2 * mass for mass in masses[edge - 7 : edge]), *[0] * 7, *masses[edge + 7 :]]


@pytest.mark.parametrize("sampler", SOUND, ids=repr)
def test_a_sound_sampler_is_accepted(sampler: Sampler) -> None:
    """With the operating system's bytes every sampler passes at start, once in 10^11 starts excepted."""
    self_test(sampler)


@pytest.mark.parametrize("sampler", [SOUND[0], SOUND[2], SOUND[4]], ids=repr)
def test_the_checks_are_calibrated(sampler: Sampler, fixed: Fixed) -> None:
    """Over 40 starts no check finds a chance that is odd for 40: the expected laws are the samplers'."""
    draw, draws = fixed(f"calibrated {sampler!r}"), np.empty(1 << 18, np.int64)
    chances = []
    for _ in range(40):
        sampler.share(draw).fill(draws)
        chances.append(
            (
                _spread_chance(draws, sampler),
                _remainder_chance(draws, sampler.step),
                _variance_chance(draws, sampler),
                _tail_chance(draws, sampler),
            )
        )

    assert np.min(chances) > 1e-4
    assert np.all(np.mean(chances, axis=0) > 0.3)


def broken(masses: Sequence[int], sampler: Sampler, which: int) -> Sampler:
    """The sampler with another table in place of one of its own."""
    terms = list(sampler.terms)
    terms[which] = terms[which][0], Table(masses)
    return replace(sampler, terms=tuple(terms))


@pytest.mark.parametrize(
    ("check", "sampler"),
    [
        ("variance", replace(SOUND[2], variance=int(4381**2 * 1.04))),
        ("variance", replace(SOUND[4], variance=67)),
        ("variance", broken([1], SOUND[2], 1)),
        ("tails", broken(gaussian_masses(COARSE)[: int(3.5 * 737)], SOUND[3], 1)),
        ("chi-square", broken(shifted(gaussian_masses(COARSE)), SOUND[3], 1)),
        ("chi-square of remainders", broken([1], SOUND[3], 0)),
        ("chi-square of remainders", broken(gaussian_masses(Fraction(90**2)), SOUND[3], 0)),
    ],
)
def test_a_broken_sampler_is_refused(check: str, sampler: Sampler, fixed: Fixed) -> None:
    """Another variance, a stuck or narrow table and a table without tails are each found, by name."""
    with pytest.raises(LocalProtocolError, match=f"failed its self-test: {check} as odd as this") as refused:
        self_test(sampler, fixed("broken"))

    assert refused.value.who is WhoActs.SITE
    assert "take this machine out of service" in str(refused.value)


def test_bytes_that_repeat_themselves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator whose words come again and again makes no noise, though each of them is uniform."""

    class Repeating(samplers.Stream):
        """The first words of a stream, every time."""

        def _next(self, size: int) -> memoryview:
            self._first = getattr(self, "_first", None) or bytes(super()._next(1 << 16))
            return memoryview(self._first[:size])

    monkeypatch.setattr(samplers, "Stream", Repeating)

    with pytest.raises(LocalProtocolError, match="failed its self-test"):
        self_test(SOUND[2])


def test_a_value_that_cannot_be_is_refused(fixed: Fixed) -> None:
    """One draw of 2^18 beyond ten standard deviations is enough."""
    masses = gaussian_masses(Fraction(64))
    cut = broken([*masses, *[0] * 400, sum(masses) >> 16], SOUND[0], 1)

    with pytest.raises(LocalProtocolError, match="failed its self-test"):
        self_test(cut, fixed("far"))
    drawn = np.zeros(1 << 18, np.int64)
    drawn[7] = 81
    assert _tail_chance(drawn, SOUND[0]) == 0

"""From an epsilon to a noise multiplier that all sites find alike, and what a site refuses of a job's numbers."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from scipy.optimize import brentq

from federation.errors import ConfigurationError
from privacy.differential_privacy.accounting import epsilon, fourier_epsilon, gaussian_mu
from privacy.differential_privacy.events import Releases
from privacy.differential_privacy.record import share_variance

__all__ = [
    "DIGITS",
    "LinearDefaults",
    "Noise",
    "calibrated",
    "linear_defaults",
    "require_delta",
    "require_reproduced",
]

DIGITS = 6
"""Significant digits of a calibrated noise multiplier: few enough for every site to find the same number."""

_FIRST_LEAD: int = 10 ** (DIGITS - 1)
_PER_DECADE = 9 * _FIRST_LEAD
_HOPELESS = 2 * _PER_DECADE
_CORRECTIONS = 3
_CLOSE = 1e-5
_AGREES = 2e-5
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 100


# --------------------------------------------------------------------------------------------------- noise multiplier


@lru_cache(maxsize=64)
def calibrated(eps: float, delta: float, q: float, rounds: int) -> float:
    """The least z of six significant digits whose printed epsilon, for these rounds, is at most `eps`.

    The Fourier accountant, which is quick, finds the neighbourhood; the printed number decides, by doubling steps and
    then halving them.

    Raises:
        ConfigurationError: eps, delta, q or rounds is out of range, or dp-accounting is needed and not installed.
        LocalProtocolError: The accountants disagree.
    """

    def pays(place: int) -> bool:
        return _printed(_noise_at(place), delta, q, rounds) <= eps

    whole = math.sqrt(Releases(q, 1.0, rounds).count) / gaussian_mu(eps, delta)
    place = _place(whole if q == 1 else _neighbourhood(eps, delta, q, rounds, whole))
    reach = 1
    while pays(place):
        place, reach = place - reach, 2 * reach
    low, reach = place, 1
    while not pays(low + reach):
        if reach > _HOPELESS:
            raise ConfigurationError(
                f"no noise is proved to give epsilon = {eps:g} at delta = {delta:g}",
                fix="choose a larger epsilon, or delta of at least 1e-9",
            )
        low, reach = low + reach, 2 * reach
    high = low + reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return _noise_at(high)


def _printed(z: float, delta: float, q: float, rounds: int) -> float:
    return epsilon((Releases(q, z, rounds),), delta).value


def _neighbourhood(eps: float, delta: float, q: float, rounds: int, whole: float) -> float:
    """A z whose printed epsilon is near `eps`: the Fourier accountant's, corrected by what is printed there.

    `whole` is what whole batches would need, which is never less.
    """

    def excess(z: float, target: float) -> float:
        return fourier_epsilon((Releases(q, z, rounds),), delta) / target - 1

    target, z = eps, whole
    for _ in range(_CORRECTIONS):
        least, most = whole, whole
        while excess(least, target) <= 0:
            least /= 2
        while excess(most, target) > 0:
            most *= 2
        z = brentq(excess, least, most, args=(target,), rtol=1e-8)
        printed = _printed(z, delta, q, rounds)
        if abs(printed / eps - 1) < _CLOSE:
            break
        target *= eps / printed
    return float(z)


def _place(z: float) -> int:
    """The number of z among the decimals of six digits, in their order; the nearest one below z."""
    exponent = math.floor(math.log10(z))
    lead: int = math.floor(Fraction(z) * Fraction(10) ** (DIGITS - 1 - exponent))
    return exponent * _PER_DECADE + lead - _FIRST_LEAD


def _noise_at(place: int) -> float:
    exponent, rest = divmod(place, _PER_DECADE)
    return float((rest + _FIRST_LEAD) * Fraction(10) ** (exponent + 1 - DIGITS))


def require_delta(delta: float, n_pub: int) -> None:
    """Returns only if delta is at most 1/(10 N_pub): a larger one would allow whole records to be published.

    Raises:
        ConfigurationError: It is larger or not positive, or there are no records.
    """
    if n_pub < 1 or not 0 < delta <= 1 / (10 * n_pub):
        raise ConfigurationError(
            f"delta = {delta} for about {n_pub} records", fix="set a positive delta of at most 1/(10 N_pub), N_pub >= 1"
        )


@dataclass(frozen=True, slots=True)
class Noise:
    """What a job states of its noise, or a site finds for itself: z, and the D^2 of its grid."""

    z: float
    squared: int


def require_reproduced(stated: Noise, own: Noise, v: int, n_eff: int) -> None:
    """Returns only if a job's z, D and v are those of this site's own calibration.

    z may differ in its last digit, where two machines may round differently; D and, given z, v must be equal.

    Raises:
        ConfigurationError: One of them is another.
    """
    close = abs(stated.z / own.z - 1) <= _AGREES
    expected = share_variance(stated.z if close else own.z, own.squared, n_eff)
    differing = [
        f"{name} = {theirs} and not {ours}"
        for name, theirs, ours, same in (
            ("z", stated.z, own.z, close),
            ("D^2", stated.squared, own.squared, stated.squared == own.squared),
            ("v", v, expected, v == expected),
        )
        if not same
    ]
    if differing:
        raise ConfigurationError(
            f"the job's noise is not what this site computes from its epsilon: {', '.join(differing)}",
            fix="let this release make the job's plan, and leave z, D and v to it",
        )


# ------------------------------------------------------------------------------------------------------- linear models


@dataclass(frozen=True, slots=True)
class LinearDefaults:
    """Hyper-parameters of a private linear model that no private data was used for (section 2).

    Attributes:
        rounds: T.
        z: Its noise multiplier, to the calibration's digits.
        q: Rate of records.
        clip: C.
        learning_rate: eta.
        averaged: The model is the mean of the last so many iterates.
    """

    rounds: int
    z: float
    averaged: int
    q: float = 1.0
    clip: float = 1.0
    learning_rate: float = 1.0


def linear_defaults(eps: float, delta: float, *, n_pub: int, parameters: int, sites: int, n_eff: int) -> LinearDefaults:
    """T = clip(round(K/2), 2, 100) with K = mu N_pub sqrt(n_eff/n)/sqrt(d), and z = sqrt(T)/mu, rounded up.

    At level record-site, where every site adds the full noise, n_eff is 1.

    Raises:
        ConfigurationError: eps or delta is no budget for so many records.
    """
    require_delta(delta, n_pub)
    signal = gaussian_mu(eps, delta) * n_pub * math.sqrt(n_eff / sites / parameters)
    rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, round(signal / 2)))
    return LinearDefaults(rounds, calibrated(eps, delta, 1.0, rounds), rounds // 2)

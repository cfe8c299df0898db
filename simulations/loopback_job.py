"""Keys and terms of a job for a simulation: as many sites as asked for, one organisation each, default thresholds."""

import os
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.errors import ConfigurationError, WhoActs
from federation.vector import F32
from privacy.crypto.masks import Words
from privacy.differential_privacy.rotation import padded
from privacy.secure_aggregation.rostersum import noised, promise, rules
from privacy.secure_aggregation.rostersum.promise import Aim
from privacy.secure_aggregation.rostersum.site_events import Mask
from privacy.secure_aggregation.rostersum.terms import (
    GUARD_WORDS,
    Churn,
    DpCodec,
    Kind,
    Mechanism,
    Member,
    Plan,
    Ring,
    Roster,
    Terms,
    TrainCodec,
    Weighting,
    default_c_max,
    default_g_max,
    default_thresholds,
)

__all__ = ["AIM", "PLAN", "LoopbackJob", "encoded"]

AIM = Aim(epsilon=8.0, delta=1e-3, rounds=100, clip=1.0, law=Mechanism.DDGAUSS)
"""What churn "dp" promises in a simulation that asks for nothing else."""

PLAN = 1
"""The number of the job's one plan, a train plan."""

_WEIGHT = 1
_SIGNED = 31
"""Bits that a signed word has for a sum's magnitude; each site's values have so many less as n takes."""


@dataclass(frozen=True, slots=True)
class LoopbackJob:
    """A job and everybody's keys.

    Attributes:
        terms: The job's terms, by which all sites weigh the same.
        coordinator: The coordinator's protocol key.
        sites: The sites' protocol keys, in the roster's order.
    """

    terms: Terms
    coordinator: Ed25519PrivateKey = field(repr=False)
    sites: tuple[Ed25519PrivateKey, ...] = field(repr=False)

    @classmethod
    def of(
        cls, sites: int, parameters: int, churn: Churn, *, post_quantum: bool = True, aim: Aim = AIM
    ) -> "LoopbackJob":
        """A job over vectors of so many parameters in words of 32 bits, fresh keys and all; "dp" adds noise for `aim`.

        Raises:
            ConfigurationError: No job can be of so many sites or parameters under this churn rule, or no noise gives
                what is aimed at.
        """
        coordinator, *members = [Ed25519PrivateKey.generate() for _ in range(1 + sites)]
        vk, *vks = [each.public_key().public_bytes_raw() for each in (coordinator, *members)]
        roster = Roster(vk, tuple(Member(f"org{idx}", f"site{idx}", each) for idx, each in enumerate(vks)))
        c_max = default_c_max(sites)
        g_max = default_g_max(c_max, sites)
        cells = (tuple(range(sites)),)
        at = default_thresholds(sites, c_max, g_max, churn, cells)
        codec: TrainCodec | DpCodec = TrainCodec(
            0.5, 1.0, _SIGNED - sites.bit_length(), Weighting.UNIFORM, _WEIGHT, _WEIGHT
        )
        noise, words = None, 1 + parameters + GUARD_WORDS
        if churn is Churn.DP:
            codec = DpCodec(padded(parameters))
            noise = promise.calibrated(aim, codec.dimension, sites, at.m_min, c_max)
            words = codec.dimension + GUARD_WORDS
        plan = Plan(
            plan_id=PLAN,
            kind=Kind.TRAIN,
            churn=churn,
            group=0,
            m_min=at.m_min,
            o_min=at.o_min,
            t=at.t,
            ring=Ring.WORD,
            words=words,
            task_digest=bytes(32),
            rows_min=10,
            codec=codec,
            dp=noise,
        )
        terms = Terms(os.urandom(16), roster, c_max, g_max, int(post_quantum), cells, (plan,))
        if found := rules.broken(terms):
            problem = f"no job is of {sites} sites and {parameters} parameters: {found[0].problem}"
            raise ConfigurationError(problem, fix=found[0].fix, who=WhoActs.YOU)
        return cls(terms, coordinator, tuple(members))


def encoded(work: Mask, update: Words | F32) -> Words:
    """What a site sends of its update in one attempt with noise, its masks apart: the product's own encoding, whole."""
    return np.concatenate([*noised.prepare(work.plan, update.astype("<f4")).encode(work.ctx, work.members, work.c_max)])

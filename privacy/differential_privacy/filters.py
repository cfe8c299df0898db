"""A site's budget across jobs that may depend on one another's outputs: whole jobs are reserved, charged, released.

Within a job q, z and T are fixed beforehand, so that its privacy loss distribution says what it costs. Between jobs
they are chosen by people who have seen earlier models. To stop such a sequence once its composed loss distribution
reaches a budget is no valid rule (arXiv 2602.06756): each of two continuations may keep within it while choosing
between them, by what was seen, does not. Two sums may be stopped at: of 1/z^2, and of Rényi divergences at one order.
"""

import math
from dataclasses import dataclass, replace

from federation.errors import ConfigurationError, LocalProtocolError, PolicyRefused, WhoActs
from privacy.differential_privacy.accounting import (
    ORDERS,
    gaussian_epsilon,
    gaussian_mu,
    renyi,
    renyi_epsilon,
    renyi_overhead,
)
from privacy.differential_privacy.events import Event, Releases, Unit, exposures, protecting

__all__ = ["Account", "Budget", "Filter", "GdpFilter", "RenyiFilter", "Reservation", "best_order", "budget_filter"]

_ROUNDED = 1 / 64
"""Relative: rounding v >= 64 up to an integer moves it by no more, so rounds of one z may differ by less."""


@dataclass(frozen=True, slots=True)
class GdpFilter:
    """Sum count/z^2 <= mu^2, for whole batches only (Smith-Thakurta 2022; Koskela et al. 2023).

    Attributes:
        epsilon: The budget.
        delta: At this delta.
    """

    epsilon: float
    delta: float

    @property
    def limit(self) -> float:
        """mu^2 of the budget, a hair below."""
        return gaussian_mu(self.epsilon, self.delta) ** 2 * (1 - 1e-12)

    def cost(self, releases: tuple[Releases, ...]) -> float:
        """Sum count/z^2.

        Raises:
            PolicyRefused: One of them samples records.
        """
        if any(each.q < 1 for each in releases):
            raise PolicyRefused(
                "this data set's budget, as enrolled, pays for whole batches only (filter gdp), and the job samples",
                fix="submit the job with q = 1, or enrol a data set with filter rdp before its first job",
            )
        return math.fsum(each.count / each.z**2 for each in releases)

    def proved(self, cost: float) -> float:
        """The epsilon that holds for a sequence of this cost, however it was chosen."""
        return gaussian_epsilon(math.sqrt(cost), self.delta) if cost > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RenyiFilter:
    """Sum R(order) <= epsilon - overhead, at one integer order fixed at enrolment (Feldman-Zrnic 2021).

    Attributes:
        epsilon: The budget.
        delta: At this delta.
        order: The only order that is ever summed.
    """

    epsilon: float
    delta: float
    order: int

    @property
    def limit(self) -> float:
        """The budget less the overhead: epsilon - [ln(1 - 1/order) - ln(delta order)/(order - 1)]."""
        return self.epsilon - renyi_overhead(self.order, self.delta)

    def cost(self, releases: tuple[Releases, ...]) -> float:
        """Sum count * R(order)."""
        return math.fsum(each.count * renyi(each.q, each.z, self.order) for each in releases)

    def proved(self, cost: float) -> float:
        """The epsilon that holds for a sequence of this cost, however it was chosen."""
        return max(0.0, cost + renyi_overhead(self.order, self.delta)) if cost > 0 else 0.0


Filter = GdpFilter | RenyiFilter


def budget_filter(name: str, epsilon: float, delta: float, order: int | None = None) -> Filter:
    """The filter that a site's administrator names at enrolment; it is never changed afterwards.

    Args:
        name: "gdp" where every job will have q = 1, else "rdp".
        epsilon: The budget.
        delta: At this delta.
        order: For "rdp": the Rényi order, usually `best_order` of what the site plans.

    Raises:
        ConfigurationError: The name is another one ("pld" among them), or the numbers leave nothing to spend.
    """
    _ = gaussian_mu(epsilon, delta)
    match name, order:
        case "gdp", None:
            return GdpFilter(epsilon, delta)
        case "rdp", int() if order in ORDERS:
            found = RenyiFilter(epsilon, delta, order)
            if found.limit <= 0:
                raise ConfigurationError(
                    f"at Rényi order {order} an epsilon of {epsilon:g} at delta = {delta:g} leaves nothing to spend",
                    fix="choose a higher order, or a larger epsilon",
                    who=WhoActs.SITE,
                )
            return found
        case "gdp" | "rdp", _:
            raise ConfigurationError(
                f"filter {name} with order {order}: gdp takes none, and rdp one of {ORDERS[0]} to {ORDERS[-1]}",
                fix="name an order for rdp, the best for the jobs you plan, and none for gdp",
                who=WhoActs.SITE,
            )
        case "pld", _:
            raise ConfigurationError(
                "a privacy loss distribution is no rule to stop at across jobs: a choice of the next job by what the "
                "last one showed can cost more than any of the choices",
                fix="choose filter gdp where all jobs have q = 1, else rdp",
                who=WhoActs.SITE,
            )
        case _:
            raise ConfigurationError(
                f"there is no filter {name!r}",
                fix="choose filter gdp where all jobs have q = 1, else rdp",
                who=WhoActs.SITE,
            )


def best_order(plan: tuple[Event, ...], delta: float) -> int:
    """The order that proves the least epsilon for what a site plans; high ones explode under sampling.

    Raises:
        ConfigurationError: The plan is empty.
    """
    if not plan:
        raise ConfigurationError(
            "a Rényi order is chosen for planned jobs, and there are none",
            fix="declare the jobs that this data set is for",
            who=WhoActs.SITE,
        )
    return renyi_epsilon(tuple(event.releases for event in plan), delta)[1]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a site's administrator allows one data set to give away, over all its jobs.

    Attributes:
        rule: How spending is summed, and up to where.
        unit: What the budget protects.
        q_most: The highest rate of records that a job may ask for.
    """

    rule: Filter
    unit: Unit = Unit.RECORD
    q_most: float = 1.0

    def cost(self, events: tuple[Event, ...]) -> float:
        """What the events cost the record that is in most of them.

        Raises:
            ConfigurationError: An event protects something finer than the budget does.
            PolicyRefused: The filter does not pay for such events.
        """
        return max(self.rule.cost(protecting(world, self.unit)) for world in exposures(events))


@dataclass(frozen=True, slots=True)
class Reservation:
    """A job that was promised its rounds: one line, with their count, for each purpose and population."""

    job: bytes
    lines: tuple[Event, ...]

    def rest(self, charged: tuple[Event, ...]) -> tuple[Event, ...]:
        """The lines without the rounds already charged."""
        left = ((line, line.count - _rounds(line, charged)) for line in self.lines)
        return tuple(replace(line, count=count) for line, count in left if count > 0)

    def line(self, event: Event) -> Event | None:
        """The line that an event is of: none where it reads more records, or has less noise, than promised."""
        return next((line for line in self.lines if _same(line, event) and _covers(line, event)), None)


def _same(line: Event, event: Event) -> bool:
    return (line.job, line.purpose, line.population) == (event.job, event.purpose, event.population)


def _covers(line: Event, event: Event) -> bool:
    within = line.first_round <= event.first_round and event.last_round <= line.last_round
    alike = line.level is event.level and line.unit is event.unit
    return within and alike and event.q <= line.q and event.z >= line.z * (1 - _ROUNDED)


def _rounds(line: Event, charged: tuple[Event, ...]) -> int:
    return sum(event.count for event in charged if _same(line, event))


@dataclass(frozen=True, slots=True)
class Account:
    """A data set's budget, all that was charged to it, and what open jobs were promised.

    **Formal guarantee.** However jobs are chosen, the charged events of one `budget.unit` are
    (epsilon, delta)-indistinguishable for the epsilon and delta of the budget's rule.

    | case | what happens |
    | --- | --- |
    | a job that ends early | `close` gives back what was not charged, and nothing else |
    | a burned round, an empty batch | charged like any other; nothing is refunded |
    | a job after its last round | refused |

    Attributes:
        budget: What may be spent.
        events: All charges so far, of closed jobs and open ones.
        reservations: The open jobs.
    """

    budget: Budget
    events: tuple[Event, ...] = ()
    reservations: tuple[Reservation, ...] = ()

    @property
    def proved(self) -> float:
        """The epsilon, at the budget's delta, of what was charged, however it was chosen."""
        return self.budget.rule.proved(self.budget.cost(self.events))

    @property
    def affordable(self) -> bool:
        """Whether what was charged, and all that is still promised, is within the budget."""
        promised = (event for each in self.reservations for event in each.rest(self.events))
        return self.budget.cost((*self.events, *promised)) <= self.budget.rule.limit

    def reserve(self, job: bytes, lines: tuple[Event, ...]) -> "Account":
        """The account once all rounds of the job are promised to it: nothing is promised in part.

        Raises:
            ConfigurationError: The lines are not those of one job, each purpose and population once, or protect less.
            PolicyRefused: q is above this site's cap, the job is known, or the budget is short of the whole job.
        """
        names = {(line.purpose, line.population) for line in lines}
        if not lines or len(names) < len(lines) or any(line.job != job for line in lines):
            raise ConfigurationError(
                "a reservation takes one line for each purpose and population of one job",
                fix="give all rounds of a purpose the same q and noise",
            )
        highest = max(line.q for line in lines)
        if highest > self.budget.q_most:
            raise PolicyRefused(
                f"the job samples records with q = {highest:g}, and this site allows at most {self.budget.q_most:g}",
                fix="lower q in the job, or ask this site's administrator to raise the cap",
            )
        if self._open(job) or any(event.job == job for event in self.events):
            raise PolicyRefused("this job was promised its rounds before", fix="submit it as a new job")
        promised = replace(self, reservations=(*self.reservations, Reservation(job, lines)))
        if not promised.affordable:
            raise PolicyRefused(
                f"the budget of epsilon = {self.budget.rule.epsilon:g} at delta = {self.budget.rule.delta:g} "
                f"is short of the whole job: {_planned(lines)}",
                fix="plan fewer rounds or more noise, or ask this site's administrator for a larger budget",
            )
        return promised

    def charge(self, event: Event) -> "Account":
        """The account once `event` is charged: to be durable before anything of that round leaves.

        Raises:
            PolicyRefused: All its rounds are used, or the budget does not pay for noise that is less than promised.
            LocalProtocolError: The job was promised nothing of the kind.
        """
        reservation = self._open(event.job)
        line = reservation.line(event) if reservation else None
        if line is None:
            raise LocalProtocolError(
                "a round was charged that no reservation covers", fix="reserve the whole job before its first round"
            )
        if _rounds(line, self.events) + event.count > line.count:
            raise PolicyRefused(
                f"all {line.count} rounds that the job was promised for {line.purpose} are used",
                fix="end the job; a longer one is a new job",
            )
        charged = replace(self, events=(*self.events, event))
        if not charged.affordable:
            raise PolicyRefused(
                "the budget does not pay for this round's noise, which is less than was promised",
                fix="let the coordinator open rounds with the noise of the job's plan",
            )
        return charged

    def close(self, job: bytes) -> "Account":
        """The account once the job has ended, down to what was charged; closing twice changes nothing."""
        return replace(self, reservations=tuple(each for each in self.reservations if each.job != job))

    def _open(self, job: bytes) -> Reservation | None:
        return next((each for each in self.reservations if each.job == job), None)


def _planned(lines: tuple[Event, ...]) -> str:
    return ", ".join(f"{line.count} rounds ({line.purpose}) with q = {line.q:g} and z = {line.z:.6g}" for line in lines)

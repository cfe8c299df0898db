"""What attacks need of a product with one guard less: guards and rules taken away by name, for one test."""

from collections.abc import Callable
from typing import Any

import pytest

from privacy.secure_aggregation.rostersum import floor, guards, rules, site
from privacy.secure_aggregation.rostersum.rules import Broken, Rule


@pytest.fixture
def disarm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Takes these guards of TRAIN and ROUND_START away from every site; a name that is none is an error."""

    def take(*names: str) -> None:
        known: set[str] = set()
        for table in ("TRAIN_GUARDS", "START_GUARDS"):
            held = getattr(guards, table)
            known |= {each.__name__ for each in held}
            monkeypatch.setattr(guards, table, tuple(each for each in held if each.__name__ not in names))
        assert known.issuperset(names), f"{set(names) - known} are no guards"

    return take


@pytest.fixture
def overlook(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every site overlook these rules, of all sites and of its own floor, whoever asks for them."""

    def take(*gone: Rule) -> None:
        def blind(asked: Callable[..., Any]) -> Callable[..., tuple[Broken, ...]]:
            return lambda *given: tuple(each for each in asked(*given) if each.rule not in gone)

        for owner, name in _ASKED:
            monkeypatch.setattr(owner, name, blind(getattr(owner, name)))

    return take


_ASKED: tuple[tuple[Any, str], ...] = (
    (rules, "broken"),
    (site, "job_refusals"),
    (floor.Floor, "of_terms"),
    (floor.Floor, "of_plan"),
    (floor, "exact_refusals"),
    (guards, "exact_refusals"),
)
"""Where a site asks for what is refused."""

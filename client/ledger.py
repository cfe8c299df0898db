"""The privacy ledger of this site, as its agent asks it: what can be paid, what is promised, what is charged.

```
secure sums     refusal(terms) -> F1: promise -> affords(charge) -> F3: charge -> F5: end       with the vault's Persist
record-site     reserve(job) ------------------> require(event) --> charge(event) --> close(job)
```

What a secure job is promised, charged and released to becomes durable with the machine's own state, in the vault's one
transaction. All else is written by this object, into the audit log and then into the vault, before it returns.
"""

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from federation.errors import ConfigurationError, LocalProtocolError, PolicyRefused, WhoActs
from privacy import ledger, ledger_chain
from privacy.ledger import Book, BudgetSet, Charged, Ended, Entry, Promised
from privacy.secure_aggregation.rostersum.durable import Charge
from privacy.secure_aggregation.rostersum.rules import Broken, Rule
from privacy.secure_aggregation.rostersum.terms import Terms

if TYPE_CHECKING:
    from client.vault import Vault
    from federation.audit import AuditLog
    from privacy.differential_privacy.events import Event

__all__ = ["SiteLedger", "require_same_rule"]


class SiteLedger:
    """This site's ledger: a round is charged before anything of it leaves, once, and never refunded.

    **Formal guarantee.** However jobs are chosen, what was charged to a data family is, for one `unit` of its budget,
    (epsilon, delta)-indistinguishable for the largest epsilon that its administrator ever allowed it.

    | case | what happens |
    | --- | --- |
    | a family without a budget | no job with noise is accepted |
    | a whole job that the budget does not pay | refused before its first round; it says how many would be paid |
    | the same rounds charged again | nothing: they are paid |
    | a budget lowered below what was spent and promised | no further round is charged |

    Args:
        vault: Where it is durable; this process alone has it open.
        audit: Where all that an older copy would lack is found again.
        clock: The time, in Unix seconds; it orders nothing.
    """

    def __init__(self, vault: "Vault", audit: "AuditLog", clock: Callable[[], float] = time.time) -> None:
        self._vault = vault
        self._audit = audit
        self._clock = clock

    @property
    def book(self) -> Book:
        """What the ledger's entries come to."""
        return self._vault.book

    # ----------------------------------------------------------------------------------------------------- secure sums

    def affords(self, charge: Charge) -> bool:
        """Whether the family's budget pays the charge: a round of an accepted job, or of another all of a plan's."""
        try:
            entry = ledger.charged(charge)
            if self.book.promise(charge.job_hash) is None and not self.book.paid(entry.event):
                ledger.require_payable(
                    self.book, Promised(entry.family, charge.job_hash, (entry.event,), entry.added_delta)
                )
            else:
                ledger.require_chargeable(self.book, entry)
        except (ConfigurationError, PolicyRefused, LocalProtocolError):
            return False
        return True

    def refusal(self, terms: Terms, family: str) -> Broken | None:
        """Why the budget of the family does not pay the whole job, all its plans together; None if it does.

        An accepted job was promised its rounds: nothing is said against it.
        """
        if self.book.promise(terms.job_hash) is not None:
            return None
        try:
            found = ledger.promise(terms, family)
            if found is not None:
                ledger.require_payable(self.book, found)
        except (ConfigurationError, PolicyRefused) as refused:
            return Broken(Rule.LEDGER, refused.problem, refused.fix)
        return None

    # ----------------------------------------------------------------------------------------------------- record-site

    def reserve(self, job: bytes, family: str, lines: tuple["Event", ...], *, added_delta: float = 0.0) -> None:
        """Promises a job all its rounds, before its first; durable. The same again, after a restart, changes nothing.

        Args:
            job: The job's digest.
            family: The data family that it reads.
            lines: Its rounds: one event, with their count, for each purpose and population.
            added_delta: What its rounding and sampling add to delta in all.

        Raises:
            PolicyRefused: The family has no budget, or one that is short: it says how many rounds could be paid; or the
                job was promised other rounds, or is over.
            ConfigurationError: The job protects less than the budget.
            StorageError: The disk does not take it: the process must end.
        """
        asked = Promised(family, job, lines, added_delta)
        if self.book.promise(job) == asked:
            return
        ledger.require_payable(self.book, asked)
        self._post(asked)

    def require(self, event: "Event", *, added_delta: float = 0.0) -> None:
        """Returns only if `charge` would: to be asked before training, so that no work is done in vain.

        Raises:
            PolicyRefused: The rounds promised are used up, or the budget was lowered since.
            LocalProtocolError: The job was promised nothing of the kind.
        """
        if not self.book.paid(event):
            ledger.require_chargeable(self.book, self._of(event, added_delta))

    def charge(self, event: "Event", *, added_delta: float = 0.0) -> bool:
        """Charges rounds, durably, before anything of them may leave; False if these very rounds were charged before.

        Rounds that are tried again are charged once. That holds for what is *sent again*: a site without a secure sum,
        whose coordinator sees each attempt, must keep a round's result before it leaves and send those bytes, and not
        train the round anew.

        Raises:
            PolicyRefused: As `require`.
            LocalProtocolError: As `require`, or some of the rounds were charged with other numbers.
            StorageError: The disk does not take it: nothing may leave, and the process must end.
        """
        if self.book.paid(event):
            return False
        entry = self._of(event, added_delta)
        ledger.require_chargeable(self.book, entry)
        self._post(entry)
        return True

    def close(self, job: bytes) -> None:
        """Releases what a job that is over was promised and not charged; again, it changes nothing."""
        if self.book.promise(job) is not None:
            self._post(Ended(job))

    def _of(self, event: "Event", added_delta: float) -> Charged:
        found = self.book.promise(event.job)
        if found is None:
            raise LocalProtocolError(
                "a round was charged that no reservation covers", fix="reserve the whole job before its first round"
            )
        return Charged(found.family, event, added_delta)

    # ------------------------------------------------------------------------------------------- the administrator's

    def set_budget(self, entry: BudgetSet) -> None:
        """From now on, durably, the family may give away this much; the audit log says so first, and why.

        Raises:
            ConfigurationError: The numbers leave nothing to spend, or another rule or unit than before is asked for
                after something was promised or charged.
            StorageError: The disk does not take it.
        """
        _ = entry.budget
        require_same_rule(self.book, entry)
        self._post(entry)

    def _post(self, entry: Entry) -> None:
        """Into the log first: what an older vault lacks, the log must not."""
        self._audit.append(ledger.AUDITED, json.dumps(ledger_chain.entry_json(entry)).encode(), self._clock())
        self._vault.post((entry,))


def require_same_rule(book: Book, entry: BudgetSet) -> None:
    """Returns only if the rule and unit of a family's budget stay what they were, once anything was spent by them.

    Raises:
        ConfigurationError: They would change.
    """
    before = book.budget(entry.family)
    if before is None or before.fixed == entry.fixed or not book.written(entry.family):
        return
    raise ConfigurationError(
        f"the budget of {entry.family!r} sums by {before.rule} for one {before.unit}, and that is fixed once a job was "
        f"promised or charged anything; {entry.rule} for one {entry.unit} would prove nothing about what is spent",
        fix=f"keep the rule and unit ({_flags(before)}), and change epsilon, delta or the highest rate",
        who=WhoActs.SITE,
    )


def _flags(budget: BudgetSet) -> str:
    rule = "--rule gdp" if budget.order is None else f"--rule rdp --order {budget.order}"
    return f"{rule} --unit {budget.unit}"

"""What `parley site recell`, `answer`, `restore` and `witness` do: say what follows, ask, and only then do it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.prompt import Confirm

from client import decisions, restoring, vault
from client.decisions import Grant, Wanted
from client.policy import floor
from client.summing import Sealing
from federation import audit
from federation.errors import ParleyError, StorageError, WhoActs
from parley.commands.audit import digest_of
from parley.commands.site import only_agent, read_policy, sealing
from parley.homes import Identity, MemberHome
from parley.terminal import console, errors, moment
from privacy.ledger import BudgetSet
from privacy.secure_aggregation.rostersum.durable import Family
from privacy.secure_aggregation.rostersum.site_events import Clock

__all__ = ["answer", "confirm", "recell", "restore", "witness"]

_RESTORED = "restored"
"""Kind of the audit log's entry that a vault put back was given what it lacked."""


def recell(member: MemberHome, family: str, cell: str, *, yes: bool) -> None:
    """Lets the family be summed over the cell of this digest, once whom that exposes was said and confirmed.

    Raises:
        ConfigurationError: No job has asked for it.
        ParleyError: It was not confirmed.
        StorageError: An agent runs, or the disk refuses.
    """
    own = member.load()

    def meaning(wanted: Wanted, known: Family) -> tuple[str, ...]:
        new = tuple(wanted.what.split(" "))
        first = f"Exact sums of {family!r} would be over the cell {', '.join(new)}."
        if not known.pin:
            return first, "They were over no cell yet: nobody is exposed."
        old = decisions.cells_of(audit.entries(member.folder / audit.FILE), own.keys.protocol_key).get(known.pin)
        before = "" if old is None else f"Until now they were over the cell {', '.join(old)}."
        subtract = "Whoever has the sums of both cells can subtract those of the old from those of the new."
        return first, before, subtract, decisions.exposure(old, new)

    _granted(member, own, (Grant.CELL, family, cell), meaning, yes=yes)


def answer(member: MemberHome, family: str, plan: str, *, yes: bool) -> None:
    """Lets the family answer the exact statistic of this digest, once that was confirmed.

    Raises:
        ConfigurationError: No job has asked for it.
        ParleyError: It was not confirmed.
        StorageError: An agent runs, or the disk refuses.
    """

    def meaning(wanted: Wanted, known: Family) -> tuple[str, ...]:
        count = len(known.plans)
        more = f"{family!r} has answered {count} exact statistics, and would answer one more, {wanted.what}."
        price = (
            "Exact sums add up: with enough different ones over the same records, single records can be worked out. "
            "Noise (churn dp) bounds that, and nothing else does."
        )
        return more, price

    _granted(member, member.load(), (Grant.PLAN, family, plan), meaning, yes=yes)


def _granted(
    member: MemberHome,
    own: Identity,
    asked: tuple[Grant, str, str],
    meaning: Callable[[Wanted, Family], tuple[str, ...]],
    *,
    yes: bool,
) -> None:
    """Grants what was asked for, with its meaning said before."""
    with _held(member, own) as held:
        wanted = decisions.find(audit.entries(member.folder / audit.FILE), *asked)
        known = held.vault.durable.family(wanted.family)
        if wanted.digest in (known.pin, *known.plans):
            console.print("That is granted already; nothing was changed.")
            return
        for line in (*meaning(wanted, known), *_running(held, wanted)):
            errors.print(line, markup=False, highlight=False)
        confirm("Is that to be so?", yes=yes)
        limits = floor(read_policy(member), (), own.revocations)
        decisions.grant(held, limits, wanted, Clock(time.time(), time.monotonic()))
    console.print("Granted, and in the audit log. Start the agent again; jobs that were refused may be submitted anew.")


def _running(held: Sealing, wanted: Wanted) -> tuple[str, ...]:
    """That jobs over the old cell come to a stop."""
    count = sum(job.family == wanted.family for job in held.vault.durable.jobs)
    if not count or wanted.grant is not Grant.CELL:
        return ()
    return (f"{count} open job{'s' * (count > 1)} on it over another cell can make no exact sum any more.",)


@contextmanager
def _held(member: MemberHome, own: Identity, *, restored: bool = False) -> Iterator[Sealing]:
    with only_agent(member.folder), sealing(member.folder, own, restored=restored) as held:
        yield held


def confirm(question: str, *, yes: bool) -> None:
    """Returns once somebody has said yes.

    Raises:
        ParleyError: Somebody has not.
    """
    if not yes and not Confirm.ask(question, console=errors, default=False):
        raise ParleyError("nothing was changed: it was not confirmed", fix="run the command again when it is to be so")


# ------------------------------------------------------------------------------------------------------------- restore


def restore(member: MemberHome, head: str, *, yes: bool) -> None:
    """Gives the vault what the audit log knows and it does not, durably and at once; from now on it is the newest.

    Raises:
        StorageError: The log is broken, does not hold the head, or does not say enough; an agent runs; a disk refuses.
        ConfigurationError: The head is no digest.
        ParleyError: It was not confirmed.
    """
    noted = digest_of(head)
    own = member.load()
    path = member.folder / audit.FILE
    with errors.status("Reading the audit log ..."):
        _require_whole(path, noted)
    if _newest(member, own):
        errors.print(
            "Its witness takes this vault for the newest. Go on only if the whole disk was put back, witness and all."
        )
    with _held(member, own, restored=True) as held:
        found = restoring.reentry(held.vault.durable, held.vault.book, audit.entries(path), own.keys.protocol_key)
        *_, last = audit.entries(path)
        for line in _found(held.vault.durable.families, found, last):
            errors.print(line, markup=False, highlight=False)
        confirm("Is this the newest audit log of this site?", yes=yes)
        told = f"{found.charges} charges and {found.ended} jobs, from line {last.line} {last.digest.hex()}"
        held.audit.append(_RESTORED, told.encode(), time.time())
        held.vault.reenter(found.durable, found.posted)
    console.print("The vault has what the log knows. Next:  parley site run")


def _newest(member: MemberHome, own: Identity) -> bool:
    """Whether the vault would be opened as it is."""
    try:
        with sealing(member.folder, own):
            return True
    except StorageError:
        return False


def _require_whole(path: Path, noted: bytes | None) -> None:
    verdict = audit.verify(path, noted)
    if verdict.broken is not None:
        raise audit.BrokenLogError(path, verdict.broken)
    if noted is not None and verdict.noted_at is None:
        raise StorageError(
            f"{path} does not hold the head noted elsewhere: it is an older copy, or another log",
            fix="put the newest audit log back; if it is lost, enrol the site anew, with new keys",
            who=WhoActs.SITE,
        )


def _found(before: tuple[Family, ...], found: restoring.Reentry, last: audit.Entry) -> Iterator[str]:
    yield f"The audit log's last line is {last.line}, of {moment(last.at)} UTC; what came later is lost."
    changed = [each for each in found.durable.families if each not in before]
    for each in changed:
        pin = f"cell {each.pin.hex()[:16]}" if each.pin else "no cell"
        yield f"  data family {each.name}: {pin}, {len(each.plans)} exact statistics"
    yield f"  {found.charges} charges to the privacy ledger that the vault lacks"
    for budget in found.posted:
        if isinstance(budget, BudgetSet):
            told = f"epsilon = {budget.epsilon:g} at delta = {budget.delta:g}"
            yield f"  the privacy budget of {budget.family}: {told}"
    yield f"  {found.ended} jobs that the vault does not know to be closed: they are over for this site, for good"
    yield "A site whose vault was put back without its newest log counts as one that colludes."


# ------------------------------------------------------------------------------------------------------------- witness


def witness(member: MemberHome, folder: Path | None) -> None:
    """Says where the vault's changes are counted; with a folder, has them counted in one of the site's own in there.

    Raises:
        StorageError: The vault is open, or not the newest; the folder holds another site's; a disk refuses.
    """
    own = member.load()
    if folder is None:
        console.print(str(vault.witness_in(member.folder)), markup=False, highlight=False)
        return
    with only_agent(member.folder):
        with sealing(member.folder, own):
            pass  # it is the newest
        where = vault.keep_witness(member.folder, folder / f"parley-{own.root.consortium}-{own.statement.name}")
    console.print(f"The vault's changes are counted in {where}. Leave that folder out of backups.", markup=False)
    if where.stat().st_dev == member.folder.stat().st_dev:
        errors.print("It is on the disk of the vault itself: a snapshot of that disk takes both back.", markup=False)

"""Whoever says two things is convicted: from the members' logs, by a file that a third party checks by itself.

A third party has the file and the roster that people compared, nothing else. The logs are written as the product's are:
the terms, every signed message that came or went, and the evidence that the site's machine asks for.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from federation.audit import AuditLog, LogName
from federation.errors import IdentityError
from parley.commands import audit_proof
from privacy.secure_aggregation.rostersum import messages, proof
from privacy.secure_aggregation.rostersum.logged import Logged, evidence_entry, message_entry, terms_entry
from privacy.secure_aggregation.rostersum.messages import Encaps, FromCoordinator, Keys, Message, Open, Outcome
from privacy.secure_aggregation.rostersum.proof import Proof, Rule, Signer
from privacy.secure_aggregation.rostersum.site_events import Log
from tests.attacks.siege import OPEN, Siege, besiege

AT = 1_800_000_000.0
COORDINATOR, ROGUE = None, 2
Conviction = tuple[str, int | None]
"""A rule, and who has broken it: a site, or None for the coordinator."""


# ------------------------------------------------------------------------------------------------ logs, files, verdicts


def author(b: Siege, message: Message) -> tuple[int | None, bool]:
    """Who has signed a message that came to a site, and whether the signature holds."""
    roster = b.terms.roster
    match message:
        case Keys(idx=peer) | Encaps(lo=peer):
            return peer, messages.verify(message, roster.members[peer].vk)
        case _ if isinstance(message, FromCoordinator):
            return None, messages.verify(message, roster.coordinator_vk)
        case _:
            return None, False


def log_of(b: Siege, idx: int, folder: Path, *, all_that_came: bool = True) -> Path:
    """The audit log of a site; of a product that logs less, without the messages that came and were not refused."""
    came = [(message, *author(b, message)) for message in b.heard[idx]] if all_that_came else []
    entries = [
        terms_entry(b.terms),
        *(message_entry(Logged.RECEIVED, message, peer) for message, peer, holds in came if holds),
        *(message_entry(Logged.SENT, message, None) for message in b.sent(b.effects[idx])),
        *(evidence_entry(b.job_hash, log.evidence) for log in b.of(b.effects[idx], Log)),
    ]
    return written(folder / f"site-{idx}" / "audit.log", f"s{idx}", entries)


def coordinators_log(b: Siege, said: Iterable[Message], heard: Sequence[tuple[int, Message]], folder: Path) -> Path:
    """The audit log of an honest coordinator that said and heard this."""
    entries = [terms_entry(b.terms), *(message_entry(Logged.SENT, each, 0) for each in said)]
    entries += [message_entry(Logged.RECEIVED, message, peer) for peer, message in heard]
    return written(folder / "coordinator" / "audit.log", "coordinator", entries)


def written(path: Path, member: str, entries: Sequence[tuple[str, bytes]]) -> Path:
    """A log of these entries."""
    with AuditLog(path, LogName(member, "attack"), AT) as log:
        log.extend(entries, AT)
    return path


def convicted(b: Siege, logs: Sequence[Path], folder: Path) -> set[Conviction]:
    """Whom these logs convict: each proof is exported, and checked from its file against the roster."""
    audit_proof.find(logs, folder, as_json=False)
    found: set[Conviction] = set()
    for file in folder.glob("*.json") if folder.exists() else ():
        audit_proof.check(file, as_json=False)
        sheet = json.loads(file.read_text())
        index = sheet["index"]
        roster = b.terms.roster
        assert bytes.fromhex(sheet["key"]) == (roster.coordinator_vk if index is None else roster.members[index].vk)
        found.add((sheet["rule"], index))
    return found


# ------------------------------------------------------------------------------------------------------ the coordinator


def two_models(b: Siege) -> None:
    """Site 0 is told of one model, the others of another, in one and the same attempt."""
    for idx in range(3):
        model = b"for the first" if idx == 0 else b"for the rest"
        b.order(1, (idx,), model=model)
        b.tried(b.start(1, model=model), (idx,))


def two_sets(b: Siege) -> None:
    """Sites 0 and 1 are told that they are with 2, site 3 that it is with 0 and 1."""
    b.order(1)
    b.tried(b.start(1, 0, (0, 1, 2)), (0, 1))
    b.tried(b.start(1, 0, (0, 1, 3)), (3,))


def two_results(b: Siege) -> None:
    """Site 0 is told that the round was burned, the others that it was opened."""
    b.order(1)
    start = b.start(1)
    b.seeds(b.tried(start))
    for idx in range(3):
        b.say(idx, b.result(start.ctx, Outcome.BURNED if idx == 0 else Outcome.OPENED))


def two_uploads(b: Siege) -> None:
    """Site 2 signs two vectors, and the coordinator shows one to site 0 and the other to site 1: both are in it."""
    b.order(1)
    uploads = b.tried(b.start(1))
    other = messages.sign(replace(uploads[ROGUE], y_hash=b"\x55" * 32), b.consortium.sites[ROGUE])
    b.seeds(uploads, (0,))
    b.seeds({**uploads, ROGUE: other}, (1,))


def two_keys(b: Siege) -> None:
    """Site 2 shows each of the others another key of the same generation."""
    for idx in (0, 1):
        keys = replace(b.keys[ROGUE], gen=2**40, nonce=bytes([idx]) * 32)
        b.say(idx, messages.sign(keys, b.consortium.sites[ROGUE]))


EQUIVOCATIONS: dict[str, tuple[int, Callable[[Siege], None], tuple[int, ...], set[Conviction]]] = {
    "two models": (3, two_models, (0, 1), {("STARTS", COORDINATOR)}),
    "two sets": (4, two_sets, (0, 3), {("STARTS", COORDINATOR)}),
    "two results": (3, two_results, (0, 1), {("RESULTS", COORDINATOR)}),
    "two uploads": (3, two_uploads, (0, 1), {("UPLOADS", ROGUE), ("FULLS", COORDINATOR)}),
    "two keys": (3, two_keys, (0, 1), {("KEYS", ROGUE)}),
}
"""How many sites, what happens, whose logs are brought together, and whom they convict."""


@pytest.mark.parametrize("name", EQUIVOCATIONS)
def test_what_was_said_to_two_sites_convicts_who_said_it(name: str, tmp_path: Path) -> None:
    """Neither site has seen a contradiction, and each log by itself proves none; both together do.

    It takes logs of all that came: of a product that logs refusals alone, the equivocator gets away.
    """
    n, equivocate, sites, expected = EQUIVOCATIONS[name]
    b = besiege(n, (OPEN,))
    equivocate(b)
    logs = [log_of(b, idx, tmp_path) for idx in sites]
    for idx, log in zip(sites, logs, strict=True):
        assert convicted(b, [log], tmp_path / f"alone-{idx}") == set()
    assert convicted(b, logs, tmp_path / "together") == expected
    less = [log_of(b, idx, tmp_path / "less", all_that_came=False) for idx in sites]
    assert convicted(b, less, tmp_path / "away") == set()


def test_an_honest_job_convicts_nobody(tmp_path: Path) -> None:
    """Two rounds, a retry, a restart with new keys, and a new epoch: no log, and not all of them together."""
    b = besiege(4, (OPEN,))
    b.order(1)
    b.tried(b.start(1))
    assert b.round(1, 1, (0, 1, 2)) is not None
    b.crash(3)
    b.epoch(1, [3])
    assert b.round(2) is not None
    b.epoch(2)
    assert b.round(3) is not None
    assert convicted(b, [log_of(b, idx, tmp_path) for idx in range(4)], tmp_path / "proofs") == set()


# --------------------------------------------------------------------------------------------------------------- a site


def test_a_site_that_opens_two_attempts_of_a_round_is_convicted(tmp_path: Path) -> None:
    """Site 2 opens, is put back to an older disk, and opens the next attempt: the coordinator's log proves it.

    A restored disk looks like malice, which is why the file says that it proves who, and not why.
    """
    b = besiege(4, (OPEN,))
    b.order(1)
    before = b.durable(ROGUE)
    first = b.start(1, 0, (0, 1, ROGUE))
    b.seeds(b.tried(first), (ROGUE,))
    b.crash(ROGUE, before)
    b.epoch(1, [ROGUE])
    b.order(1)
    second = b.start(1, 1)
    b.seeds(b.tried(second), (ROGUE,))
    opens = [(ROGUE, opened) for opened in b.sent(b.effects[ROGUE], Open)]
    assert [opened.ctx for _, opened in opens] == [first.ctx, second.ctx]
    log = coordinators_log(b, (first, second), opens, tmp_path)
    assert convicted(b, [log], tmp_path / "proofs") == {("OPENS", ROGUE)}


# --------------------------------------------------------------------------------------------------------------- frames


def framed(b: Siege, folder: Path) -> set[Conviction]:
    """The coordinator writes a log in which site 1 has signed two OPENs of one round: whom it convicts."""
    b.order(1)
    uploads = b.tried(b.start(1))
    (opened,) = b.sent(b.say(1, b.full(1, uploads.values())), Open)
    other = b.start(1, 1)
    forged = messages.sign(replace(opened, ctx=other.ctx), b.consortium.coordinator)
    log = coordinators_log(b, (b.start(1), other), [(1, opened), (1, forged)], folder)
    return convicted(b, [log], folder / "proofs")


def test_nobody_is_convicted_of_what_it_did_not_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a key did not sign both sides of is no contradiction of its owner's, unless signatures are not looked at."""
    assert framed(besiege(), tmp_path / "guarded") == set()
    monkeypatch.setattr(proof, "verify", lambda *_: True)
    assert framed(besiege(), tmp_path / "unguarded") == {("OPENS", 1)}


def handed_over(b: Siege) -> bool:
    """The coordinator makes the file itself: its own signature under a site's name, and the site's true key."""
    b.order(1)
    upload = b.tried(b.start(1))[1]
    forged = messages.sign(replace(upload, y_hash=bytes(32), seals=()), b.consortium.coordinator)
    both = tuple(messages.encode(each) for each in (replace(upload, seals=()), forged))
    pretended: Any = Proof(Rule.UPLOADS, Signer(1, "org1", "s1"), b.terms.roster.members[1].vk, both)  # type: ignore[arg-type] # two
    try:
        proof.check(pretended)
    except IdentityError:
        return False
    return True


def test_a_forged_file_is_refused_by_whoever_checks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third party verifies both signatures by the key in the file, and trusts nobody's word for them."""
    assert not handed_over(besiege())
    monkeypatch.setattr(proof, "verify", lambda *_: True)
    assert handed_over(besiege())

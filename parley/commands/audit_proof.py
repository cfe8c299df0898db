"""What `parley audit proof` does: searches logs for contradictions, makes each a file, and checks such a file."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from federation import audit, files
from federation.audit import BrokenLogError, Entry
from federation.errors import IdentityError, RemoteProtocolError, WhoActs
from parley.commands.audit import say
from parley.terminal import emit, errors
from privacy.secure_aggregation.rostersum import logged, messages, proof
from privacy.secure_aggregation.rostersum.logged import Noted, Passed, Withheld
from privacy.secure_aggregation.rostersum.messages import Message
from privacy.secure_aggregation.rostersum.proof import Found, Proof, Rule, Signer
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["check", "find"]

_MOST = 1 << 20
_FORMAT = "parley-proof-1"
_NOT_WHY = "A signature shows who, not why: a member restored from a copy, or running twice, signs the same by mistake."


def find(paths: Sequence[Path], to: Path | None, *, as_json: bool) -> None:
    """Says which contradictions these logs prove, and makes each a file in the folder `to`, if one is given.

    Raises:
        StorageError: A log is not there.
    """
    with errors.status("Reading ..."):
        found = _search(paths)
    written = [] if to is None else [_write(to, each) for each in found.proofs]
    if as_json:
        sheets = [_Sheet.of(each) for each in found.proofs]
        emit({"messages": found.messages, "unproven": found.unproven, "proofs": sheets, "files": written})
    else:
        _say_found(found, written, paths)


def _search(paths: Sequence[Path]) -> Found:
    """The contradictions in these logs, each read as far as it is whole: a proof stands by itself."""
    broken: dict[Path, BrokenLogError] = {}
    found = proof.prove(lambda: (each for path in paths for each in _material(path, broken)))
    for each in broken.values():
        errors.print(f"{each.problem}; what stands behind it was not read", markup=False, highlight=False)
    return found


def _material(path: Path, broken: dict[Path, BrokenLogError]) -> Iterator[Terms | Message]:
    """The terms and messages in a log, as far as it is whole."""
    try:
        for entry in audit.entries(path):
            yield from _held(entry)
    except BrokenLogError as found:
        broken[path] = found


def _held(entry: Entry) -> Iterator[Terms | Message]:
    try:
        held = logged.read(entry.kind, entry.content)
    except RemoteProtocolError:
        return
    match held:
        case Terms():
            yield held
        case Passed(message=message) if not isinstance(message, Withheld):
            yield message
        case Noted(evidence=evidence):
            for content in evidence.messages:
                try:
                    yield messages.decode(content)
                except RemoteProtocolError:
                    continue
        case _:
            return


def _say_found(found: Found, written: Sequence[Path], paths: Sequence[Path]) -> None:
    where = ", ".join(map(str, paths))
    for each in found.proofs:
        say(f"{_party(each.signer)} signed {each.rule.value}")
        for line in _shown(each):
            say(f"  {line}")
    if found.unproven:
        say(f"{found.unproven} more that no key of the logged jobs has signed both sides of: forged, or of other jobs.")
    if not found.proofs:
        say(f"No contradiction is proven by the {found.messages} messages in {where}.")
        return
    for path in written:
        say(f"Written: {path}")
    say(_NOT_WHY if written else f"{_NOT_WHY} To make each a file of its own:  parley audit proof --to FOLDER")


def _party(signer: Signer) -> str:
    return (
        "the coordinator" if signer.index is None else f"site {signer.index} ({signer.site} of {signer.organisation})"
    )


def _shown(found: Proof) -> Iterator[str]:
    return (logged.message_words(messages.decode(content)) for content in (*found.messages, *found.starts))


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A proof as its file holds it: bytes in hexadecimal, and what it says in words, which nothing checks."""

    format: str
    rule: str
    says: str
    index: int | None
    organisation: str
    site: str
    key: str
    messages: tuple[str, str]
    starts: tuple[str, ...]

    @classmethod
    def of(cls, found: Proof) -> Self:
        """The file of a proof."""
        signer = found.signer
        return cls(
            format=_FORMAT,
            rule=found.rule.name,
            says=f"{_party(signer)} signed {found.rule.value}",
            index=signer.index,
            organisation=signer.organisation,
            site=signer.site,
            key=found.key.hex(),
            messages=(found.messages[0].hex(), found.messages[1].hex()),
            starts=tuple(each.hex() for each in found.starts),
        )

    def proof(self) -> Proof:
        """The proof that the file holds.

        Raises:
            ValueError: It is of another format, breaks an unknown rule, or what should be hexadecimal is not.
        """
        if self.format != _FORMAT or self.rule not in Rule.__members__:
            raise ValueError(f"{self.format} with the rule {self.rule} is unknown")
        first, second, *starts = (bytes.fromhex(each) for each in (*self.messages, *self.starts))
        signer = Signer(self.index, self.organisation, self.site)
        return Proof(Rule[self.rule], signer, bytes.fromhex(self.key), (first, second), tuple(starts))


def _write(folder: Path, found: Proof) -> Path:
    """The file of a proof: the same proof has the same name."""
    sheet = _Sheet.of(found)
    name = hashlib.sha256(b"".join(found.messages)).hexdigest()[:16]
    path = folder / f"proof-{sheet.rule.lower()}-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(TypeAdapter(_Sheet).dump_json(sheet, indent=2) + b"\n")
    return path


def check(path: Path, *, as_json: bool) -> None:
    """Says what the file proves, and what not.

    Raises:
        StorageError: There is no such file, or it cannot be read.
        IdentityError: It is no proof, or proves nothing.
        RemoteProtocolError: What it holds are no messages.
    """
    found = _read(path)
    proof.check(found)
    if as_json:
        emit({"proven": True, "proof": _Sheet.of(found)})
        return
    party = "coordinator" if found.signer.index is None else "site"
    say(f"PROVEN: one key signed {found.rule.value}.")
    for line in _shown(found):
        say(f"  {line}")
    say(f"  key {found.key.hex()}")
    say(f"No honest {party} signs both.")
    say(f"Not proven: whose key it is. The file says {_party(found.signer)}: compare the membership statement.")
    say(f"Not proven: intent. {_NOT_WHY}")


def _read(path: Path) -> Proof:
    """The proof in a file that anybody may have written.

    Raises:
        StorageError: There is no such file, or it cannot be read.
        IdentityError: It is no such file.
    """
    if path.is_file() and path.stat().st_size > _MOST:
        raise _no_proof(path, f"it has {path.stat().st_size} bytes")
    content = files.read(path, "name a file that `parley audit proof --to FOLDER` made")
    try:
        return TypeAdapter(_Sheet).validate_json(content).proof()
    except ValidationError as wrong:
        raise _no_proof(path, f"{wrong.error_count()} of its fields are missing or wrong") from wrong
    except ValueError as wrong:
        raise _no_proof(path, str(wrong)) from wrong


def _no_proof(path: Path, problem: str) -> IdentityError:
    fix = "name a file that `parley audit proof --to FOLDER` made"
    return IdentityError(f"{path} is no proof: {problem}", fix=fix, who=WhoActs.YOU)

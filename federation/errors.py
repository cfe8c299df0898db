"""The error tree: every error names who must act, and its message carries the facts and the way out."""

from enum import Enum

__all__ = [
    "ConfigurationError",
    "DataContractError",
    "IdentityError",
    "LocalProtocolError",
    "ParleyError",
    "PolicyRefused",
    "RemoteProtocolError",
    "StorageError",
    "UnreachableError",
    "WhoActs",
]


class WhoActs(Enum):
    """Who can make an error go away."""

    SITE = "the site's administrator"
    COORDINATOR = "the coordinator's operator"
    CONSORTIUM = "the consortium's administrator"
    AUTHOR = "the job's author"
    DEVELOPERS = "Parley's developers"
    YOU = "you"


class ParleyError(Exception):
    """Something was refused and nothing changed; `who` must act, and `fix` says how.

    Args:
        problem: What was found, with the facts, and never a record.
        who: Who can make it go away.
        fix: The action that does.
    """

    who: WhoActs = WhoActs.YOU

    def __init__(self, problem: str, *, fix: str = "", who: WhoActs | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix
        if who is not None:
            self.who = who

    def __str__(self) -> str:
        if not self.fix:
            return self.problem
        return f"{self.problem}. To fix ({self.who.value}): {self.fix}"


class ConfigurationError(ParleyError):
    """A job, policy or settings file asks for something that cannot be."""

    who = WhoActs.AUTHOR


class DataContractError(ParleyError):
    """A site's data does not meet the job's contract, or cannot be read."""

    who = WhoActs.SITE


class PolicyRefused(ParleyError):  # noqa: N818 - the name the house gives it
    """This site's own rule forbids it; no message can change that."""

    who = WhoActs.SITE


class IdentityError(ParleyError):
    """A certificate, membership statement, invitation or signature is not what it must be."""

    who = WhoActs.CONSORTIUM


class RemoteProtocolError(ParleyError):
    """The peer broke the protocol; nothing changed here."""

    who = WhoActs.DEVELOPERS


class LocalProtocolError(ParleyError):
    """This program broke the protocol: a bug of ours."""

    who = WhoActs.DEVELOPERS


class StorageError(ParleyError):
    """A disk, directory or database does not take or give what it must."""

    who = WhoActs.YOU


class UnreachableError(ParleyError):
    """The other side cannot be reached now."""

    who = WhoActs.YOU

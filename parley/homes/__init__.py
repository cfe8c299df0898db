"""Where a consortium and its members keep their files, and what an administrator may do with them. No clock, no socket.

```
HOME/consortium/  root.key root.pem consortium.json revocations.bin invitations/SERIAL.json members/NAME.{pem,bin}
HOME/{site,operator,coordinator}/identity/  tls.key protocol.key certificate.pem statement.bin root.pem
                                            coordinator.bin revocations.bin connection.json
```

Every file is written whole or not at all, and durably, before the next is begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from federation.messages import Role
from parley.homes.consortium import Consortium, ConsortiumHome, ConsortiumSettings, InvitationRecord, Registered
from parley.homes.member import Connection, Identity, MemberHome, coordinator_request

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Connection",
    "Consortium",
    "ConsortiumHome",
    "ConsortiumSettings",
    "Home",
    "Identity",
    "InvitationRecord",
    "MemberHome",
    "Registered",
    "coordinator_request",
    "home_folder",
]


def home_folder(given: Path | None, environment: Mapping[str, str]) -> Path:
    """The one folder of all Parley files: as given, else `$PARLEY_HOME`, else `~/.parley`."""
    if given is not None:
        return given
    named = environment.get("PARLEY_HOME")
    return Path(named) if named else Path.home() / ".parley"


@dataclass(frozen=True, slots=True)
class Home:
    """All that one machine keeps: usually one of these, on the administrator's machine two."""

    folder: Path

    @property
    def consortium(self) -> ConsortiumHome:
        """The consortium's own files."""
        return ConsortiumHome(self.folder / "consortium", self.operator)

    @property
    def site(self) -> MemberHome:
        """A site's files."""
        return MemberHome(self.folder / "site", Role.SITE)

    @property
    def operator(self) -> MemberHome:
        """An operator's files."""
        return MemberHome(self.folder / "operator", Role.OPERATOR)

    @property
    def coordinator(self) -> MemberHome:
        """The coordinator's files."""
        return MemberHome(self.folder / "coordinator", Role.COORDINATOR)

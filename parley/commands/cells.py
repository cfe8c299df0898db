"""`parley consortium cells`: proposes a partition of the sites into cells for a job file, and says what it costs."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from federation.errors import ConfigurationError, IdentityError, WhoActs
from federation.messages import MembershipStatement, Role
from parley.homes import ConsortiumHome
from parley.terminal import HomeOption, JsonOption, emit, errors, home
from privacy.secure_aggregation.rostersum.plans import seats
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    Member,
    Roster,
    cell_sites,
    default_c_max,
    default_g_max,
    default_thresholds,
    org_floor,
    propose_cells,
)

__all__ = ["Bounds", "Partition", "cells", "proposed"]

_NO_KEY = bytes(32)
"""Stands for the coordinator's key in a roster of which only the cells are asked."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many sites, of how many organisations, may collude with the coordinator."""

    sites: int
    organisations: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Cells by the names of their sites.

    Attributes:
        bounds: The colluders that they bear.
        organisations: How many organisations the sites are of.
        needed: Sites without which there is no sum over several cells.
        spare: So many cells, whichever they are, may be missing from a sum.
    """

    cells: tuple[tuple[str, ...], ...]
    bounds: Bounds
    organisations: int
    needed: int
    spare: int

    @property
    def sites(self) -> int:
        """How many sites there are."""
        return sum(map(len, self.cells))

    @property
    def lines(self) -> tuple[str, ...]:
        """What to paste into a job file."""
        rows = (f"  {json.dumps(cell)}," for cell in self.cells)
        return (
            "[privacy]",
            f"colluding_sites = {self.bounds.sites}",
            f"colluding_organisations = {self.bounds.organisations}",
            "cells = [",
            *rows,
            "]",
        )


def cells(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SITE]...", help="The job's sites [default: all members].", show_default=False),
    ] = None,
    colluding_sites: Annotated[
        int | None,
        typer.Option(
            min=0, max=98, help="Sites that may collude with the coordinator [default: a third].", show_default=False
        ),
    ] = None,
    colluding_organisations: Annotated[
        int | None, typer.Option(min=0, max=98, help="Organisations of these sites.", show_default=False)
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B,C", help="A cell that stays as it is; may be repeated.", show_default=False),
    ] = None,
    home_: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Proposes cells for a job's [privacy] section: the most that the sites allow, organisations mixed in each.

    A sum holds whole cells only, so no subtraction of sums shows one site. A site's data stay with the cell that they
    were first summed in: keep the cells of earlier jobs with --keep, and newcomers make cells of their own.
    """
    members = _chosen(home(home_).consortium, names or [])
    kept = tuple(tuple(each.strip() for each in cell.split(",")) for cell in keep or ())
    c_max = default_c_max(len(members)) if colluding_sites is None else colluding_sites
    g_max = colluding_organisations
    bounds = Bounds(c_max, default_g_max(c_max, _roster(members).orgs) if g_max is None else g_max)
    found = proposed(members, bounds, kept)
    if as_json:
        emit(
            {
                "cells": found.cells,
                "colluding_sites": bounds.sites,
                "colluding_organisations": bounds.organisations,
                "sites": found.sites,
                "organisations": found.organisations,
                "sites_needed": found.needed,
                "cells_that_may_be_missing": found.spare,
                "lines": found.lines,
            }
        )
        return
    for line in (*_meaning(found), *_hint(found, members, kept)):
        errors.print(line, markup=False, highlight=False)
    print("\n".join(found.lines))


def proposed(
    members: Sequence[MembershipStatement], bounds: Bounds, kept: tuple[tuple[str, ...], ...] = ()
) -> Partition:
    """The most cells that these sites allow; cells that are `kept` stay as they are.

    Raises:
        ConfigurationError: There is no such partition, or a kept cell is none.
    """
    if bounds.organisations > bounds.sites:
        raise ConfigurationError(
            f"{bounds.organisations} organisations cannot be those of {bounds.sites} colluding sites",
            fix="give --colluding-organisations at most as many as --colluding-sites",
            who=WhoActs.YOU,
        )
    by_name = {member.name: member for member in members}
    for cell in kept:
        _require_cell(cell, by_name, bounds)
    taken = [name for cell in kept for name in cell]
    if len(set(taken)) < len(taken):
        raise ConfigurationError("a site stands in two kept cells", fix="name each site once", who=WhoActs.YOU)
    rest = seats([member for member in members if member.name not in taken])
    found = (*(tuple(sorted(cell)) for cell in kept), *_dealt(rest, bounds, kept))
    at = default_thresholds(len(members), bounds.sites, bounds.organisations, Churn.CELLS, _indices(found))
    return Partition(found, bounds, _roster(members).orgs, at.m_min, _spare(found, at.m_min))


def _dealt(
    rest: tuple[MembershipStatement, ...], bounds: Bounds, kept: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...], ...]:
    if kept and not rest:
        return ()
    try:
        dealt = propose_cells(_roster(rest), bounds.sites, bounds.organisations)
    except ConfigurationError as none:
        beside = f"beside the kept cells {', '.join(member.name for member in rest)} are left: " if kept else ""
        more = (
            "invite further organisations (parley consortium invite NAME --organisation ORGANISATION), or bear fewer "
            "colluders, as far as each site's policy allows: --colluding-sites N --colluding-organisations N"
        )
        join = "; or put them into a kept cell, which each of its sites must then allow: parley site recell"
        raise ConfigurationError(
            f"{beside}{none.problem}", fix=more + (join if kept else ""), who=WhoActs.CONSORTIUM
        ) from none
    return tuple(tuple(rest[idx].name for idx in cell) for cell in dealt)


def _require_cell(cell: tuple[str, ...], members: dict[str, MembershipStatement], bounds: Bounds) -> None:
    unknown = [name for name in cell if name not in members]
    if unknown:
        raise ConfigurationError(
            f"a kept cell names {', '.join(map(repr, unknown))}, which is no site of the job",
            fix="name sites as `parley consortium members` does, with commas between them",
            who=WhoActs.YOU,
        )
    orgs = len({members[name].organisation for name in cell})
    sites, least, most = len(set(cell)), cell_sites(bounds.sites), org_floor(bounds.organisations)
    if sites < least or orgs < most:
        raise ConfigurationError(
            f"the kept cell {','.join(cell)} has {sites} sites of {orgs} organisations, and with {bounds.sites} "
            f"colluding sites of {bounds.organisations} organisations a cell has at least {least} of {most}",
            fix="bear as few colluders as when it was made: --colluding-sites N --colluding-organisations N",
            who=WhoActs.CONSORTIUM,
        )


def _chosen(where: ConsortiumHome, names: list[str]) -> tuple[MembershipStatement, ...]:
    """The sites that are members now, or those of these names.

    Raises:
        IdentityError: One of the names is no such site's.
    """
    revoked, now = set(where.revocations().serials), time.time()
    sites = {
        each.statement.name: each.statement
        for each in where.members()
        if each.statement.role is Role.SITE and each.statement.serial not in revoked and each.statement.not_after > now
    }
    unknown = [name for name in names if name not in sites]
    if unknown:
        raise IdentityError(
            f"{', '.join(map(repr, unknown))} is no site of the consortium now",
            fix="see who is: parley consortium members",
            who=WhoActs.YOU,
        )
    return seats([sites[name] for name in dict.fromkeys(names or sites)])


def _roster(members: Sequence[MembershipStatement]) -> Roster:
    return Roster(_NO_KEY, tuple(Member(each.organisation, each.name, each.protocol_key) for each in members))


def _indices(found: tuple[tuple[str, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Cells of these sizes: of what default thresholds read, the sizes are all."""
    numbers = iter(range(sum(map(len, found))))
    return tuple(tuple(next(numbers) for _ in cell) for cell in found)


def _spare(found: tuple[tuple[str, ...], ...], needed: int) -> int:
    """How many cells may be missing, were they the largest; any that is left has organisations enough."""
    left, spare = sum(map(len, found)), 0
    for size in sorted(map(len, found), reverse=True):
        left -= size
        if left < needed:
            break
        spare += 1
    return spare


# ------------------------------------------------------------------------------------------------------------ in words


def _meaning(found: Partition) -> tuple[str, ...]:
    bounds, count = found.bounds, len(found.cells)
    sizes = ", ".join(str(len(cell)) for cell in found.cells)
    least, orgs = cell_sites(bounds.sites), org_floor(bounds.organisations)
    first = (
        f"{found.sites} sites of {found.organisations} organisations make {count} cell{'s' * (count > 1)} ({sizes} "
        f"sites). All holds while at most {bounds.sites} of the sites, of at most {bounds.organisations} "
        f"organisations, collude with the coordinator; therefore each cell has at least {least} sites of {orgs} "
        "organisations."
    )
    hides = "A site hides among its own cell, not among all: the fewer a cell has, the more a sum says of each."
    if count == 1:
        return (
            first,
            "Price: nobody may be missing from a sum; each round waits for all sites. The line cells may go.",
        )
    missing = (
        f"Price: one missing site keeps its whole cell out. A sum needs {found.needed} sites, so "
        + (f"any {found.spare} of the cells may be missing. " if found.spare else "NONE of the cells may be missing. ")
        + hides
    )
    pinned = (
        "From the first sum on each site's data stay with their cell; another one needs the word of each of its sites' "
        "administrators (parley site recell), and exposes who left or came. Newcomers: cells of their own, by --keep."
    )
    return first, missing, pinned


def _hint(
    found: Partition, members: tuple[MembershipStatement, ...], kept: tuple[tuple[str, ...], ...]
) -> tuple[str, ...]:
    """What to do about cells none of which may be missing."""
    if found.spare or len(found.cells) == 1:
        return ()
    idle = (
        "So these cells let nobody be missing and hide each site among fewer. Without the line cells all sites are one "
        'cell, which is better; keep it only for a strategy that needs groups ("groups = true").'
    )
    for sites in range(found.bounds.sites - 1, 0, -1):
        bounds = Bounds(sites, min(sites, found.bounds.organisations))
        try:
            other = proposed(members, bounds, kept)
        except ConfigurationError:
            continue
        if other.spare:
            count, spare = len(other.cells), other.spare
            return idle, f"With --colluding-sites {sites} there are {count} cells, of which {spare} may be missing."
    return (idle,)

"""`parley consortium cells`: a partition that is proposed is one that a job's terms accept, at the price told."""

import json
import time
import tomllib
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, IdentityError, WhoActs
from federation.messages import MembershipStatement, Role
from parley.commands.cells import Bounds, proposed
from parley.homes import Home
from privacy import identity
from privacy.identity import MemberKeys
from privacy.secure_aggregation.rostersum import rules
from privacy.secure_aggregation.rostersum.plans import seats
from privacy.secure_aggregation.rostersum.rules import Rule
from privacy.secure_aggregation.rostersum.terms import Member, Roster, Terms, cell_sites, org_floor
from tests.parley.commands.calls import refused, run
from tests.parley.commands.conftest import Founded
from tests.privacy.secure_aggregation.rostersum.looped import job

Join = Callable[..., None]

NINE = {"a1": "a", "a2": "a", "b1": "b", "b2": "b", "c1": "c", "c2": "c", "d": "d", "e": "e", "f": "f"}


@pytest.fixture
def join(founded: Founded) -> Join:
    """Makes sites members, `name=organisation`; the coordinator is not asked."""
    consortium = Home(founded.admin).consortium.unlock(None)

    def make(**sites: str) -> None:
        for name, organisation in sites.items():
            now = int(time.time())
            invitation = consortium.invite(name, organisation, Role.SITE, now=now)
            consortium.approve(identity.make_request(invitation, MemberKeys.generate(), "0.1.0"), now=now)

    return make


def told(founded: Founded, *arguments: object) -> Any:
    """What the command says to programs."""
    return json.loads(run("consortium", "cells", *arguments, "--json", "--home", founded.admin).stdout)


def nine(join: Join) -> None:
    """Nine sites of six organisations, three of which have two sites."""
    join(**NINE)


def test_lines_to_paste_and_their_price_are_told(founded: Founded, join: Join) -> None:
    """The lines by themselves on standard output; what they mean beside it."""
    nine(join)
    done = run("consortium", "cells", "--colluding-sites", 1, "--home", founded.admin)
    privacy = tomllib.loads(done.stdout)["privacy"]
    assert (privacy["colluding_sites"], privacy["colluding_organisations"]) == (1, 1)
    assert sorted(name for cell in privacy["cells"] for name in cell) == [
        "a1",
        "a2",
        "b1",
        "b2",
        "c1",
        "c2",
        "d",
        "e",
        "f",
    ]
    assert [len({name[0] for name in cell}) for cell in privacy["cells"]] == [3, 3, 3]
    assert "9 sites of 6 organisations make 3 cells (3, 3, 3 sites)." in done.stderr
    assert "at most 1 of the sites, of at most 1 organisations, collude" in done.stderr
    assert "each cell has at least 3 sites of 3 organisations" in done.stderr
    assert "one missing site keeps its whole cell out. A sum needs 6 sites, so any 1 of the cells" in done.stderr
    assert "parley site recell" in done.stderr


def test_cells_none_of_which_may_be_missing_are_called_useless(founded: Founded, join: Join) -> None:
    """With the number of colluders at which they would not be."""
    nine(join)
    done = run("consortium", "cells", "--home", founded.admin)
    assert "NONE of the cells may be missing" in done.stderr
    assert "Without the line cells all sites are one cell, which is better" in done.stderr
    assert "With --colluding-sites 1 there are 3 cells, of which 1 may be missing." in done.stderr
    found = told(founded)
    assert (len(found["cells"]), found["sites_needed"], found["cells_that_may_be_missing"]) == (2, 7, 0)


def test_one_cell_waits_for_all(founded: Founded, join: Join) -> None:
    """What the job file says without the line."""
    join(a="a", b="b", c="c", d="d")
    done = run("consortium", "cells", "--home", founded.admin)
    assert "make 1 cell (4 sites)" in done.stderr
    assert "nobody may be missing from a sum; each round waits for all sites. The line cells may go." in done.stderr


def test_only_members_of_now_are_dealt(founded: Founded, join: Join) -> None:
    """Neither operators nor who was revoked; names choose among the others, and a wrong one is told."""
    nine(join)
    Home(founded.admin).consortium.unlock(None).revoke("f", now=int(time.time()))
    assert sum(map(len, told(founded, "--colluding-sites", 1)["cells"])) == 8
    assert told(founded, "a1", "b1", "c1", "a1")["cells"] == [["a1", "b1", "c1"]]
    for name in ("f", "admin", "nobody"):
        error = refused("consortium", "cells", "a1", name, "--home", founded.admin)
        assert isinstance(error, IdentityError)
        assert error.problem == f"{name!r} is no site of the consortium now"
        assert "parley consortium members" in error.fix


def test_a_kept_cell_stays_and_newcomers_make_their_own(founded: Founded, join: Join) -> None:
    """So that no site's data change their cell."""
    nine(join)
    options = ("--colluding-sites", 1, "--keep", "e, a1,f")
    first, *others = told(founded, *options)["cells"]
    assert first == ["a1", "e", "f"]
    assert sorted(map(sorted, others)) == [["a2", "b1", "c1"], ["b2", "c2", "d"]]
    kept = ("--keep", "a1,b1,c1", "--keep", "a2,b2,c2", "--keep", "d,e,f")
    assert told(founded, *options[:2], *kept)["cells"] == [["a1", "b1", "c1"], ["a2", "b2", "c2"], ["d", "e", "f"]]


@pytest.mark.parametrize(
    ("options", "problem", "fix", "who"),
    [
        (("a1", "a2", "b1"), "3 sites of 2 organisations make no cell", "parley consortium invite", "CONSORTIUM"),
        (("--colluding-sites", 8), "9 sites of 6 organisations make no cell", "bear fewer colluders", "CONSORTIUM"),
        (
            ("--colluding-sites", 1, "--keep", "a1,b1,c1,d,e,f"),
            "beside the kept cells a2, b2, c2 are left: 3 sites of 3 organisations",
            "",
            "",
        ),
        (
            ("--colluding-sites", 1, "--keep", "a1,b1,c1,d,e,f,a2"),
            "beside the kept cells b2, c2 are left: 2 sites of 2 organisations make no cell",
            "put them into a kept cell, which each of its sites must then allow: parley site recell",
            "CONSORTIUM",
        ),
        (
            ("--colluding-sites", 2, "--keep", "a1,b1,c1"),
            "cell a1,b1,c1 has 3 sites of 3 organisations, and with 2 colluding sites of 2 organisations a cell has at",
            "bear as few colluders as when it was made",
            "CONSORTIUM",
        ),
        (("--keep", "a1,b1,zoe"), "a kept cell names 'zoe', which is no site of the job", "with commas", "YOU"),
        (
            ("--colluding-sites", 1, "--keep", "a1,b1,c1", "--keep", "a1,b2,c2"),
            "a site stands in two kept cells",
            "once",
            "YOU",
        ),
        (
            ("--colluding-sites", 1, "--colluding-organisations", 2),
            "2 organisations cannot be those of 1 colluding sites",
            "--colluding-organisations at most as many",
            "YOU",
        ),
    ],
)
def test_no_partition_is_told_with_who_must_act(
    founded: Founded, join: Join, options: tuple[object, ...], problem: str, fix: str, who: str
) -> None:
    """And how; where the rest do make a cell, nothing is refused."""
    nine(join)
    if not who:
        assert len(told(founded, *options)["cells"]) == 2
        return
    error = refused("consortium", "cells", *options, "--home", founded.admin)
    assert isinstance(error, ConfigurationError)
    assert problem in error.problem
    assert fix in error.fix
    assert error.who is WhoActs[who]


def statements(orgs: list[int]) -> tuple[MembershipStatement, ...]:
    """A site of each of these organisations."""
    return tuple(
        MembershipStatement("c", f"{at:032x}", f"s{at}", f"o{org}", Role.SITE, bytes(32), bytes(32), 1, 9, bytes(64))
        for at, org in enumerate(orgs)
    )


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 8), min_size=3, max_size=16), st.integers(0, 4), st.integers(0, 4))
def test_what_is_proposed_is_what_the_terms_accept(orgs: list[int], sites: int, organisations: int) -> None:
    """Each cell has sites and organisations enough, each site is in one; any of the spare cells may be missing."""
    bounds = Bounds(sites, min(sites, organisations))
    members = statements(orgs)
    try:
        found = proposed(members, bounds)
    except ConfigurationError:
        assert len(orgs) < cell_sites(sites) or len(set(orgs)) < org_floor(bounds.organisations)
        return
    seated = [member.name for member in seats(members)]
    cells = tuple(sorted(tuple(sorted(seated.index(name) for name in cell)) for cell in found.cells))
    roster = Roster(bytes(32), tuple(Member(each.organisation, each.name, bytes(32)) for each in seats(members)))
    terms = Terms(bytes(16), roster, bounds.sites, bounds.organisations, 0, cells, job().plans)
    broken = {each.rule for each in (*rules._partition(terms), *rules._cells(terms))}
    assert broken & {Rule.CELL_PARTITION, Rule.CELL_ORDER, Rule.CELL_SITES, Rule.CELL_ORGS} == set()
    for missing in range(1, len(cells)):
        left = [
            tuple(sorted(idx for cell in cells if cell not in gone for idx in cell))
            for gone in combinations(cells, missing)
        ]
        summed = [
            len(members_) >= found.needed and roster.count_orgs(members_) >= org_floor(bounds.organisations)
            for members_ in left
        ]
        assert all(summed) is (missing <= found.spare)

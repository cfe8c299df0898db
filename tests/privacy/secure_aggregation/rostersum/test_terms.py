from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from privacy.crypto import canonical
from privacy.secure_aggregation.rostersum import rules
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    Member,
    Plan,
    Roster,
    Terms,
    Thresholds,
    cell_sites,
    default_c_max,
    default_g_max,
    default_thresholds,
    explain,
    org_floor,
    propose_cells,
)

Make = Callable[..., Any]


def roster_of(orgs: list[int]) -> Roster:
    """One site for each entry, of the organisation that it names."""
    members = (Member(f"org{org:02}", f"s{idx}", idx.to_bytes(32, "big")) for idx, org in enumerate(orgs))
    return Roster(b"\xff" * 32, tuple(members))


def test_the_digests_are_those_of_annex_b(consortium: Make) -> None:
    """Roster and job of the annex."""
    terms = consortium().terms
    assert terms.roster.hash.hex() == "52e9199d72b2c88a49445d4de48811ec9cbd875aa1d38019a511b8f28b4712a4"
    assert terms.job_hash.hex() == "fb24972f172c5662f432fea2075a6900590670d21dc82c4a5543351891418afc"


def test_the_job_hash_covers_all_terms(consortium: Make, train: Plan) -> None:
    """Whatever is changed gives another job."""
    terms = consortium().terms
    changed = [
        replace(terms, job_id=bytes(16)),
        replace(terms, c_max=0),
        replace(terms, g_max=0),
        replace(terms, pq=1),
        replace(terms, cells=((0, 1), (2,))),
        replace(terms, roster=replace(terms.roster, coordinator_vk=bytes(32))),
        replace(terms, plans=(replace(train, plan_id=2),)),
        replace(terms, plans=(replace(train, codec=replace(train.codec, w_max=2)),)),
    ]
    assert len({terms.job_hash, *(each.job_hash for each in changed)}) == 1 + len(changed)


def test_terms_come_back_from_a_store_as_they_were(consortium: Make, train: Plan, stat: Plan) -> None:
    """With every kind of codec."""
    terms = consortium(5, (train, stat)).terms
    assert Terms.decode(terms.encode()) == terms


@pytest.mark.parametrize("content", [canonical.enc(1), canonical.enc(*range(7))])
def test_bytes_that_are_no_terms_are_refused(content: bytes) -> None:
    """A store that gives other bytes back is a bug of ours."""
    with pytest.raises(LocalProtocolError, match="no terms of a job"):
        Terms.decode(content)


def test_torn_bytes_are_refused(consortium: Make) -> None:
    """They are not even canonical."""
    with pytest.raises(RemoteProtocolError, match="cut short"):
        Terms.decode(consortium().terms.encode()[:-1])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"job_id": bytes(15)}, "Terms.job_id: 16 bytes"),
        ({"c_max": -1}, "Terms.c_max"),
        ({"pq": 2}, "Terms.pq: an unsigned integer of 1 bits"),
        ({"cells": ([0, 1, 2],)}, "Terms.cells"),
    ],
)
def test_terms_cannot_hold_other_types(consortium: Make, change: dict[str, Any], problem: str) -> None:
    """The field is named."""
    with pytest.raises(ConfigurationError, match=problem):
        replace(consortium().terms, **change)


def test_a_plan_is_known_by_all_but_its_number(train: Plan) -> None:
    """Asking the same plan under another number is asking the same plan."""
    assert train.digest == replace(train, plan_id=9).digest
    assert train.digest != replace(train, rows_min=11).digest


def test_a_cell_is_pinned_by_its_names(consortium: Make) -> None:
    """Whoever else joins in other cells, a cell of the same sites has the same pin; one site more has another."""
    six, three = consortium(6, cells=((0, 1, 2), (3, 4, 5))).terms, consortium(3).terms
    assert six.cell_hash(0) == six.cell_hash(2) == three.cell_hash(1)
    assert six.cell_hash(0) != six.cell_hash(3)
    assert consortium(4).terms.cell_hash(0) != three.cell_hash(0)


@pytest.mark.parametrize(
    ("n", "c_max", "expected"),
    [
        (3, 1, Thresholds(3, 3, 0)),
        (4, 1, Thresholds(3, 3, 0)),
        (5, 1, Thresholds(4, 3, 3)),
        (10, 3, Thresholds(8, 5, 6)),
        (100, 33, Thresholds(68, 35, 66)),
    ],
)
def test_the_defaults_are_those_of_the_text(n: int, c_max: int, expected: Thresholds) -> None:
    """m_min = max(3, c_max + 2, ceil((n + c_max)/2) + 1), t = n + c_max + 1 - m_min; below five sites t = 0."""
    assert default_c_max(n) == max(1, (n - 1) // 3) == c_max
    assert default_thresholds(n, c_max, default_g_max(c_max, n), Churn.OPEN, (tuple(range(n)),)) == expected


@settings(deadline=None, max_examples=50)
@given(st.integers(3, 100), st.sampled_from(Churn), st.booleans())
def test_default_thresholds_break_no_rule(make_job: Make, n: int, churn: Churn, group: bool) -> None:  # noqa: FBT001 - drawn
    """From 3 to 100 sites, for every churn, with and without groups."""
    c_max = default_c_max(n)
    g_max = default_g_max(c_max, n)
    terms = make_job(n, c_max=c_max, g_max=g_max)
    cells = propose_cells(terms.roster, c_max, g_max) if group else terms.cells
    chosen = default_thresholds(n, c_max, g_max, Churn.CELLS if group else churn, cells, group=group)
    plan = replace(terms.plans[0], group=int(group), m_min=chosen.m_min, o_min=chosen.o_min, t=chosen.t)
    plan = replace(plan, churn=Churn.CELLS if group or churn is Churn.DP else churn)
    assert rules.broken(replace(terms, cells=cells, plans=(plan,))) == ()


@pytest.fixture(scope="module")
def make_job() -> Make:
    """Terms of n sites of one organisation each, whose keys are drawn once."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from privacy.secure_aggregation.rostersum.terms import Kind, Ring, TrainCodec, Weighting

    seeds = (idx.to_bytes(32, "big") for idx in range(101))
    vks = [Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw() for seed in seeds]
    codec = TrainCodec(0.5, 1.0, 8, Weighting.UNIFORM, 1, 1)

    def make(n: int, c_max: int, g_max: int) -> Terms:
        members = tuple(Member(f"org{idx}", "s", vks[idx]) for idx in range(n))
        plan = Plan(1, Kind.TRAIN, Churn.CELLS, 0, n, 3, 0, Ring.WORD, 12, bytes(32), 10, codec, None)
        return Terms(bytes(16), Roster(vks[100], members), c_max, g_max, 0, (tuple(range(n)),), (plan,))

    return make


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 12), min_size=3, max_size=40), st.integers(0, 4), st.data())
def test_proposed_cells_are_a_partition_each_large_enough(orgs: list[int], c_max: int, data: st.DataObject) -> None:
    """Sorted, of at least max(3, c_max + 2) sites of max(3, g_max + 2) organisations, or none is possible at all."""
    roster, g_max = roster_of(orgs), data.draw(st.integers(0, c_max))
    possible = len(orgs) >= cell_sites(c_max) and len(set(orgs)) >= org_floor(g_max)
    if not possible:
        with pytest.raises(ConfigurationError, match="make no cell of at least"):
            propose_cells(roster, c_max, g_max)
        return
    cells = propose_cells(roster, c_max, g_max)
    assert sorted(idx for cell in cells for idx in cell) == list(range(len(orgs)))
    assert list(cells) == sorted(tuple(sorted(cell)) for cell in cells)
    assert min(len(cell) for cell in cells) >= cell_sites(c_max)
    assert min(roster.count_orgs(cell) for cell in cells) >= org_floor(g_max)


def test_there_are_as_many_cells_as_the_roster_allows() -> None:
    """Nine sites of three organisations are three cells; of one large and two small ones, two."""
    assert len(propose_cells(roster_of([0, 1, 2] * 3), 1, 1)) == 3
    assert len(propose_cells(roster_of([0, 0, 0, 0, 0, 1, 1, 2, 2]), 1, 1)) == 2


def test_a_job_is_explained_with_its_price(consortium: Make, train: Plan) -> None:
    """Who may be missing and what that costs, for each plan, in words without the protocol's letters."""
    escrow = replace(train, t=2)
    plans = [
        replace(escrow, plan_id=1),
        replace(train, plan_id=2, churn=Churn.OPEN),
        replace(train, plan_id=3, churn=Churn.DP),
        replace(train, plan_id=4, group=1),
    ]
    lines = explain(consortium(6, tuple(plans), cells=((0, 1, 2), (3, 4, 5))).terms)
    assert len(lines) == 1 + 2 * len(plans)
    assert "6 sites of 6 organisations; every promise below holds while at most 1 of the sites" in lines[0]
    assert "one missing site keeps its whole cell out" in lines[1]
    assert "costs nothing while 2 others of the round are there" in lines[2]
    assert "subtract them and see that site's update" in lines[3]
    assert "burns the round" in lines[4]
    assert "The price is noise in every sum" in lines[5]
    assert "exactly one cell (3, 3 sites)" in lines[7]
    assert "nobody may be missing: each round waits for all 3 sites" in explain(consortium().terms)[1]

from pathlib import Path

import numpy as np
import pytest

from federation.errors import ConfigurationError, ParleyError
from simulations.peers import secure_aggregation_rostersum
from simulations.peers.secure_aggregation_costs import Updates
from simulations.peers.secure_aggregation_rostersum import measure, room

UPDATES = Updates(6, 3000)
VECTOR = 4 * (3000 + 5)


def test_a_round_is_one_masked_vector_and_little_else(tmp_path: Path) -> None:
    """Without drop-outs a site sends four bytes a parameter and some messages; with them, a second vector."""
    costs = measure(UPDATES, tmp_path)

    assert costs.with_dropouts is not None
    assert VECTOR < costs.round.client_bytes < VECTOR + 1500
    assert 2 * VECTOR < costs.with_dropouts.client_bytes < 2 * VECTOR + 3000
    for cost in (costs.setup, costs.round, costs.with_dropouts):
        assert cost.client_cpu > 0
        assert cost.coordinator_cpu > 0
    assert costs.setup.client_bytes < VECTOR
    assert costs.setup.transport_cpu == 0 < costs.round.transport_cpu


def test_no_round_with_drop_outs_is_run_where_none_is_asked_for(tmp_path: Path) -> None:
    """The rest is measured all the same."""
    costs = measure(Updates(5, 100), tmp_path, dropouts=False)

    assert costs.with_dropouts is None
    assert costs.round.client_bytes > 400


def test_the_files_fit_the_room_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a sum's beginning, when most lies on the disk, it is no more than `room` says."""
    seen: list[int] = []
    perform = secure_aggregation_rostersum.secure_sums.perform

    def weighed(*arguments: object, checked: bool) -> object:
        seen.append(sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))
        return perform(*arguments, checked=checked)  # type: ignore[arg-type] # passed on as they came

    monkeypatch.setattr(secure_aggregation_rostersum.secure_sums, "perform", weighed)
    measure(UPDATES, tmp_path)

    assert 6 * VECTOR < max(seen) <= room(UPDATES)


def test_a_wrong_update_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a sum that is not the mean of the updates are never given."""
    of = Updates.of
    asked: list[int] = []

    def other(updates: Updates, idx: int) -> np.ndarray:
        asked.append(idx)
        return of(updates, idx) if len(asked) != 2 else -of(updates, idx)

    monkeypatch.setattr(Updates, "of", other)
    with pytest.raises(ParleyError, match="parley's sum over 5 sites is off by"):
        measure(Updates(5, 1000), tmp_path)


def test_sizes_of_no_job_are_refused(tmp_path: Path) -> None:
    """Two sites have no secure sum."""
    with pytest.raises(ConfigurationError, match="no job is of 2 sites"):
        measure(Updates(2, 1000), tmp_path)

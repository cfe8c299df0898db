import logging

import numpy as np
import pytest

from federation.errors import ParleyError
from simulations.peers import secure_aggregation_secagg
from simulations.peers.secure_aggregation_costs import Updates
from simulations.peers.secure_aggregation_secagg import measure

pytest.importorskip("flwr")


@pytest.mark.parametrize("dropouts", [False, True])
def test_flowers_own_workflow_gives_the_mean(dropouts: bool) -> None:  # noqa: FBT001 - a table's column
    """Its sum was checked against the updates; each client has sent eight bytes a parameter, and all have worked."""
    cost = measure(Updates(6, 3000), dropouts=dropouts)

    assert 8 * 3000 < cost.client_bytes < 8 * 3000 + 6000
    assert cost.client_cpu > 0
    assert cost.coordinator_cpu > 0
    assert cost.transport_cpu > 0


def test_progress_tells_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """All four stages are told of, and Flower's own lines are not."""
    level = logging.getLogger("flwr").level

    measure(Updates(5, 100), dropouts=True)

    told = capsys.readouterr().err
    assert "flower, 5 sites, 1 drop out: shares for unmasking, site 1" in told
    assert "Secure aggregation" not in told
    assert logging.getLogger("flwr").level == level


def test_a_round_that_flower_gives_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few shares for its threshold: there is no result, and no figures."""
    monkeypatch.setattr(secure_aggregation_secagg, "THRESHOLD", 1.0)

    with pytest.raises(ParleyError, match="gave up on a round of 5 sites"):
        measure(Updates(5, 100), dropouts=True)


def test_a_wrong_mean_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's result is held against the updates, too."""
    of = Updates.of
    asked: list[int] = []

    def other(updates: Updates, idx: int) -> np.ndarray:
        asked.append(idx)
        return of(updates, idx) if len(asked) != 2 else -of(updates, idx)

    monkeypatch.setattr(Updates, "of", other)
    with pytest.raises(ParleyError, match="flower's sum over 5 sites is off by"):
        measure(Updates(5, 1000), dropouts=False)

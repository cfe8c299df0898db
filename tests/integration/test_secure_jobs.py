"""Jobs under secure aggregation between real processes: the coordinator sees sums, and the model is as good."""

import pytest

from tests.integration.alliance import SITES, Alliance, job_file

WHOLE = 'secure_aggregation = "rostersum"'
GROUPS = "groups = true"
OPEN = 'churn = "open"'


def test_a_job_is_summed_securely_and_its_model_is_as_good(alliance: Alliance) -> None:
    """The same job, plain, secure and in groups: metrics agree, all sites are in every step, and the card says so."""
    found = {}
    for privacy in ('secure_aggregation = "plain"', WHOLE, GROUPS):
        job = alliance.submit(job_file(rounds=3, privacy=privacy))
        view = alliance.finished(job)
        assert [each["sites"] for each in view["history"]] == [3, 3, 3]
        found[privacy] = alliance.metrics(view, 3)
        assert alliance.admin_does("model", "show", job, "--json").json["strategy"] == "fedavg"
    plain, *sealed = found.values()
    for secure in sealed:
        assert secure["n"] == plain["n"]
        assert secure["accuracy"] == pytest.approx(plain["accuracy"], abs=0.02)
        assert secure["auc"] == pytest.approx(plain["auc"], abs=0.02)
        assert secure["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert len(SITES) == 3

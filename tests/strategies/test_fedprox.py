from collections.abc import Callable

from strategies import fedavg
from strategies.fedprox import Settings, make

Rounds = list[list[float]]


def test_the_server_is_fedavgs(play: Callable[..., Rounds], rounds: Rounds) -> None:
    """FedProx changes local training alone: from equal updates it makes FedAvg's models."""
    averaged = play(fedavg.Settings(name="fedavg", learning_rate=0.5), rounds)
    assert play(Settings(name="fedprox", mu=1.0, learning_rate=0.5), rounds) == averaged


def test_the_sites_are_told_mu() -> None:
    """The proximal weight goes to the sites as it stands in the job; 0 is allowed and is FedAvg."""
    assert make(Settings(name="fedprox", mu=0.1)).local.proximal == 0.1
    assert make(Settings(name="fedprox", mu=0.0)).local.proximal == 0.0
    assert make(Settings(name="fedprox")).local.proximal == 0.01

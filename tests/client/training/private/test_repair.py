import copy
import sys

import pytest
import torch
from torch import nn

from client.training.private.repair import problems, repaired, require_private
from federation.errors import ConfigurationError


def _recurrent(kind: type[nn.RNNBase], **settings: object) -> nn.Module:
    return nn.ModuleDict({"cell": kind(3, 5, batch_first=True, **settings), "out": nn.Linear(5, 2)})


def test_every_problem_is_told_with_its_dotted_name() -> None:
    """Layers that mix records, keep statistics, or have no per-record gradient are listed; others are not."""
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.InstanceNorm2d(4, affine=True),
        nn.LSTM(3, 3),
        nn.GRU(3, 3),
        nn.MultiheadAttention(4, 2),
    )

    assert [str(each) for each in problems(model)] == [
        "layer '0.1': BatchNorm2d normalises each record by the others of its batch; use GroupNorm or LayerNorm",
        "layer '1': InstanceNorm2d keeps running statistics of the records; set track_running_stats = False",
        "layer '4': no engine finds the per-record gradients of torch's GRU; use LSTM, or Opacus' DPGRU or DPRNN",
    ]
    with pytest.raises(ConfigurationError, match=r"(?s)cannot be trained privately:.*'0\.1'.*'1'.*'4'.*privacy.repair"):
        require_private(model)
    require_private(nn.Linear(2, 2))


def test_batch_norm_becomes_the_group_norm_that_opacus_makes_of_it() -> None:
    """Groups are those of Opacus' ModuleValidator for two and three dimensions, and weight and bias stay."""
    from opacus.validators import ModuleValidator

    for norm in (nn.BatchNorm2d(64), nn.BatchNorm2d(48), nn.BatchNorm2d(8, affine=False), nn.BatchNorm3d(10)):
        if norm.affine:
            nn.init.normal_(norm.weight)
        ours, theirs = repaired(nn.Sequential(nn.Linear(2, 2), norm))[1], ModuleValidator.fix(nn.Sequential(norm))[0]
        if norm.affine:
            assert isinstance(theirs, nn.GroupNorm)
            assert (ours.num_groups, ours.num_channels) == (theirs.num_groups, theirs.num_channels)
            assert torch.equal(ours.weight, norm.weight)
        assert ours.affine == norm.affine
        assert isinstance(ours, nn.GroupNorm)


def test_batch_norm_of_features_becomes_one_group() -> None:
    """On rows of features groups of one channel would all be 0: one group over all of them is what is left."""
    repaired_norm = repaired(nn.BatchNorm1d(4))

    assert isinstance(repaired_norm, nn.GroupNorm)
    assert repaired_norm.num_groups == 1
    assert repaired_norm(torch.randn(2, 4)).abs().min() > 0


def test_the_model_itself_stays_and_copies_are_equal() -> None:
    """A repair is a copy: the model keeps its layers, and every site's copy has the same names and weights."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv1d(2, 6, 1), nn.BatchNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True))
    model.eval()

    one, two = repaired(model), repaired(model)

    assert problems(model)
    assert not problems(one)
    assert isinstance(model[1], nn.BatchNorm1d)
    assert not one[1].training
    assert list(one.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(torch.equal(each, two.state_dict()[name]) for name, each in one.state_dict().items())
    assert one(torch.randn(3, 2, 5)).shape == (3, 6, 5)


@pytest.mark.parametrize(
    "model",
    [
        _recurrent(nn.GRU),
        _recurrent(nn.GRU, num_layers=2, bidirectional=True, bias=False),
        _recurrent(nn.RNN, nonlinearity="relu"),
    ],
)
def test_recurrent_layers_become_opacus_ones_of_the_same_weights(model: nn.ModuleDict) -> None:
    """GRU and RNN are replaced by layers that compute the same, and torch's generator stays as it was."""
    inputs = torch.randn(2, 4, 3)
    state = torch.get_rng_state()

    made = repaired(model)

    assert torch.equal(torch.get_rng_state(), state)
    assert not problems(made)
    assert torch.allclose(made["cell"](inputs)[0], model["cell"](inputs)[0], atol=1e-6)


def test_what_cannot_be_repaired_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent layer of another kind, or Opacus missing, stops the repair with what to do."""

    class Odd(nn.RNNBase):
        def __init__(self) -> None:
            super().__init__("GRU", 3, 3)

    with pytest.raises(ConfigurationError, match=r"layer '0': Odd cannot be repaired.*use LSTM"):
        repaired(nn.Sequential(Odd()))

    monkeypatch.setitem(sys.modules, "opacus.layers", None)
    with pytest.raises(ConfigurationError, match="need Opacus"):
        repaired(copy.deepcopy(_recurrent(nn.GRU)))

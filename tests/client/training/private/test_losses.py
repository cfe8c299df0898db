import pytest
import torch
from torch.nn import functional

from client.training.private.losses import Precision, per_record
from federation.errors import ConfigurationError
from tasks.task import Loss


@pytest.mark.parametrize("loss", list(Loss))
def test_each_records_loss_is_its_own_and_their_mean_the_tasks(loss: Loss) -> None:
    """Losses are one for each row, in float32, and their mean is what ordinary training minimises."""
    torch.manual_seed(1)
    outputs = torch.randn(6, 3 if loss is Loss.CROSS_ENTROPY else 1, dtype=torch.bfloat16)
    labels = torch.randn(6) if loss is Loss.SQUARED else torch.randint(0, 2, (6,))
    whole = {
        Loss.LOGISTIC: lambda: functional.binary_cross_entropy_with_logits(outputs[:, 0].float(), labels.float()),
        Loss.CROSS_ENTROPY: lambda: functional.cross_entropy(outputs.float(), labels),
        Loss.SQUARED: lambda: functional.mse_loss(outputs[:, 0].float(), labels),
    }[loss]()

    found = per_record(loss)(outputs, labels)

    assert found.shape == (6,)
    assert found.dtype == torch.float32
    assert torch.allclose(found.mean(), whole)
    assert torch.equal(found[2:3], per_record(loss)(outputs[2:3], labels[2:3]))


@pytest.mark.parametrize("scale", [0.5, 3.0, float("inf"), float("nan"), -2.0])
def test_a_scale_that_rounds_gradients_is_refused(scale: float) -> None:
    """Only powers of two from 1 on may multiply a loss."""
    with pytest.raises(ConfigurationError, match=r"static loss scale of .* is no power of two.*such as 1 or 1024"):
        Precision(scale=scale)


def test_float16_without_a_static_scale_is_refused() -> None:
    """Half precision needs a scale, and it must be fixed: a dynamic one follows the records' gradients."""
    with pytest.raises(ConfigurationError, match=r"dynamic one is not private.*bfloat16, or a static loss scale"):
        Precision(torch.float16)

    assert Precision(torch.float16, 1024.0).scale == 1024

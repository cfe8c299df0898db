import numpy as np

from tasks.models import model
from tasks.models.logistic_regression import Settings, build


def test_it_is_one_linear_layer_of_zeros() -> None:
    """Every class is equally likely before the first round, whatever the seed."""
    layout, flat = model.state_vector(build(Settings(name="logistic_regression"), 13, 3, seed=5))
    assert [(tensor.name, tensor.shape) for tensor in layout.tensors] == [("weight", (3, 13)), ("bias", (3,))]
    np.testing.assert_array_equal(flat, 0)

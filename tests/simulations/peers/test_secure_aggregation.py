import io
import json

import numpy as np
import pytest
from rich.console import Console

from simulations.peers import secure_aggregation, secure_aggregation_masks
from simulations.peers.secure_aggregation_masks import MaskCost


def test_the_command_prints_the_promised_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Each size has the three costs, in nanoseconds; the table goes to standard error."""
    pytest.importorskip("flwr")

    assert secure_aggregation.main(["--json", "--sizes", "20000,1000"]) == 0

    printed = capsys.readouterr()
    costs = json.loads(printed.out)["mask"]
    assert list(costs) == ["20000", "1000"]
    for cost in costs.values():
        assert list(cost) == ["parley_ns", "floor_ns", "flower_ns"]
        assert all(value > 0 for value in cost.values())
    assert "20,000" in printed.err


def test_flowers_masks_are_flowers_masks() -> None:
    """What is timed masks: without the nine vectors of the seeds the values come back, modulo Flower's 2^32."""
    pytest.importorskip("flwr")
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    values = np.arange(50, dtype=np.int32)
    seeds = [bytes([index]) * 31 + bytes([7 * index]) for index in range(9)]

    (masked,) = secure_aggregation_masks._flower(values, seeds)

    assert (masked != values).any()
    signs = [1, *(1 if index % 2 else -1 for index in range(8))]
    for sign, seed in zip(signs, seeds, strict=True):
        masked = masked - sign * pseudo_rand_gen(seed, 1 << 32, [values.shape])[0]
    assert (masked % (1 << 32) == values).all()


def test_the_table_compares() -> None:
    """A row for each size, with Parley over the floor and Flower over Parley."""
    console = Console(width=160, file=io.StringIO(), record=True)

    console.print(secure_aggregation.mask_table({1_000_000: MaskCost(11.0, 10.0, 220.0)}))

    text = console.export_text()
    assert "1,000,000" in text
    assert "11.00" in text
    assert "1.10 x" in text
    assert "220.0" in text
    assert "20.0 x" in text


@pytest.mark.parametrize("sizes", ["", "many", "999", "1000000,-1", "1e6"])
def test_what_is_no_size_is_refused(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is told, and the exit status is that of a wrong command line."""
    assert secure_aggregation.main(["--sizes", sizes]) == 2
    assert "are not sizes of vectors" in capsys.readouterr().err


def test_flower_that_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured without the side to compare with."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    assert secure_aggregation.main([]) == 2
    assert "pip install 'parley-fl[flower]'" in capsys.readouterr().err

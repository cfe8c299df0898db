import io
import json
import shutil

import numpy as np
import pytest
from rich.console import Console

from simulations.peers import secure_aggregation, secure_aggregation_masks
from simulations.peers.secure_aggregation_costs import Cost
from simulations.peers.secure_aggregation_masks import MaskCost


def test_the_command_prints_the_promised_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Each size has the three costs of masks, each number of sites both sides' rounds; tables go to standard error."""
    pytest.importorskip("flwr")

    sizes = ["--sizes", "20000,1000", "--sites", "5,6", "--parameters", "1000", "--flower-sites", "5"]
    assert secure_aggregation.main(["--json", *sizes]) == 0

    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert list(found["mask"]) == ["20000", "1000"]
    for cost in found["mask"].values():
        assert list(cost) == ["parley_ns", "floor_ns", "flower_ns"]
        assert all(value > 0 for value in cost.values())
    for kind in ("round", "round_with_dropouts"):
        assert {sites: list(sides) for sites, sides in found[kind].items()} == {
            "5": ["parley", "flower"],
            "6": ["parley"],
        }
        for cost in (*found[kind]["5"].values(), *found[kind]["6"].values()):
            assert list(cost) == ["client_cpu", "coordinator_cpu", "client_bytes"]
            assert all(value > 0 for value in cost.values())
    assert list(found["epoch_setup"]["6"]) == ["parley"]
    assert found["round_transport_cpu"]["5"].keys() == {"parley", "flower"}
    assert found["settings"]["dropouts"] == {"5": 1, "6": 1}
    assert "20,000" in printed.err
    assert "A round in which a tenth of the sites drop out" in printed.err


def test_what_is_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A part, a side or the drop-outs that were not asked for are in neither JSON nor tables."""
    pytest.importorskip("flwr")
    rounds = ["--only", "rounds", "--sites", "5", "--parameters", "1000", "--flower-sites", "0", "--without-dropouts"]

    assert secure_aggregation.main(["--json", *rounds]) == 0

    printed = capsys.readouterr()
    assert json.loads(printed.out).keys() == {"round", "epoch_setup", "round_transport_cpu", "settings"}
    assert "flower, 5 sites: skipped (--flower-sites 0)" in printed.err
    assert "drop out" not in printed.err
    assert secure_aggregation.main(["--json", "--only", "masks", "--sizes", "1000"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"mask"}


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


def test_the_rounds_table_compares() -> None:
    """A row for each side, bytes a parameter among them, and Flower in multiples of Parley."""
    console = Console(width=160, file=io.StringIO(), record=True)
    costs = {50: {"parley": Cost(0.1, 0.5, 4_008_000, 0.25), "flower": Cost(1.3, 26.0, 8_034_000, 1.5)}}

    console.print(secure_aggregation.round_table("A round", costs, 1_000_000))

    text = console.export_text()
    for shown in ("0.100 s", "26.000 s", "4,008,000", "4.008", "8.034", "0.25 s", "13.0 x", "52.0 x", "2.0 x"):
        assert shown in text


@pytest.mark.parametrize("sites", ["", "4", "101", "5,x"])
def test_what_is_no_number_of_sites_is_refused(sites: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers that a round can be measured with are told."""
    assert secure_aggregation.main(["--sites", sites]) == 2
    assert "are not numbers of sites. To fix (you): give whole numbers of 5 to 100" in capsys.readouterr().err


def test_a_vector_too_short_to_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """So are lengths of a round's vectors."""
    assert secure_aggregation.main(["--parameters", "999"]) == 2
    assert "999 parameters are too few" in capsys.readouterr().err


def test_a_disk_without_room_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masked vectors lie in a temporary folder: how much they need is known."""
    pytest.importorskip("flwr")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))

    assert secure_aggregation.main(["--only", "rounds", "--sites", "5"]) == 2
    assert "5 sites write up to 0.1 GB" in capsys.readouterr().err


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

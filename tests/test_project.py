import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _pins() -> dict[str, Version]:
    """Each pinned package's version, by its canonical name."""
    lines = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip())
    return {canonicalize_name(name): Version(version) for name, version in lines}


def _requirements() -> list[Requirement]:
    """What pyproject.toml asks for: to build, to run, and in every extra."""
    project = PROJECT["project"]
    texts = [*PROJECT["build-system"]["requires"], *project["dependencies"]]
    texts += [text for extra in project["optional-dependencies"].values() for text in extra]
    asked = [Requirement(text) for text in texts]
    return [requirement for requirement in asked if requirement.name != project["name"]]


@pytest.mark.parametrize("requirement", _requirements(), ids=str)
def test_every_direct_dependency_is_pinned(requirement: Requirement) -> None:
    """constraints.txt pins it, to a version that pyproject.toml allows."""
    pin = _pins().get(canonicalize_name(requirement.name))

    assert pin is not None, f"constraints.txt does not pin {requirement.name}"
    assert requirement.specifier.contains(pin, prereleases=True)


def test_every_list_of_packages_names_the_top_level_packages() -> None:
    """The wheel, mypy, coverage and import-linter all see every package that stands in the root, and no other."""
    tools = PROJECT["tool"]
    packages = sorted(file.parent.name for file in ROOT.glob("*/__init__.py"))

    assert sorted(tools["hatch"]["build"]["targets"]["wheel"]["packages"]) == packages
    assert sorted(tools["mypy"]["packages"]) == packages
    assert sorted(tools["coverage"]["run"]["source"]) == packages
    assert sorted(tools["importlinter"]["root_packages"]) == packages


def test_every_package_is_typed() -> None:
    """Each top-level package carries the marker by which type checkers trust its annotations."""
    assert not [file.parent.name for file in ROOT.glob("*/__init__.py") if not (file.parent / "py.typed").exists()]


def test_the_readme_shows_both_commands_first() -> None:
    """`make demo` and `make test` stand on the README's first screen."""
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])

    assert "make demo" in screen
    assert "make test" in screen


def test_the_changelog_tells_of_this_version() -> None:
    """The version in pyproject.toml has its section."""
    version = PROJECT["project"]["version"]

    assert re.search(rf"^## .*\b{re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_links_between_the_documents_lead_somewhere() -> None:
    """Every relative link in the documents of the root is a file or folder of the project."""
    broken = [
        f"{document.name}: {target}"
        for document in ROOT.glob("*.md")
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", document.read_text())
        if not (ROOT / target).exists()
    ]

    assert broken == []


def test_make_alone_lists_the_targets() -> None:
    """Every target that the documents speak of stands in `make`'s own help."""
    told = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    spoken = {
        target
        for document in ROOT.glob("*.md")
        for target in re.findall(r"(?:`|^|    )make ([a-z][a-z-]*)", document.read_text(), re.MULTILINE)
    }

    assert spoken >= {"setup", "demo", "test", "lint", "proto"}
    assert [target for target in sorted(spoken) if f"make {target} " not in told] == []


def test_the_import_layers_hold() -> None:
    """import-linter finds every contract of pyproject.toml kept."""
    command = Path(sys.executable).parent / "lint-imports"

    linter = subprocess.run([command, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert linter.returncode == 0, linter.stdout + linter.stderr


def _checked(folder: Path, *, tests: str = "true", demo: str = "{}") -> subprocess.CompletedProcess[str]:
    """.ci/run in a project of `folder` whose tests are the command `tests` and whose demo prints `demo`."""
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "python").symlink_to(sys.executable)
    (tools / "parley").write_text(f"#!/bin/sh\necho '{demo}'\n")
    (tools / "parley").chmod(0o755)
    (folder / "Makefile").write_text(f"setup lint:\n\t@true\ntest:\n\t@{tests}\n")
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    return subprocess.run([folder / ".ci" / "run"], cwd="/", capture_output=True, text=True, check=False)


def _demo(**changes: object) -> str:
    """What a good demonstration prints, with some of it changed."""
    score = {"accuracy": 0.8, "auc": 0.88}
    alone = dict.fromkeys(("cleveland", "hungary", "switzerland", "long-beach"), score)
    good = {
        "federated": score,
        "pooled": score,
        "alone": alone,
        "seconds": 30.5,
        "cpu_seconds": 40,
        "bytes": 9,
        "seeds": 1,
    }
    return json.dumps(good | changes)


def test_the_checks_pass_when_every_stage_does(tmp_path: Path) -> None:
    """.ci/run ends with status 0 and has told each stage's seconds."""
    checks = _checked(tmp_path, demo=_demo())

    assert checks.returncode == 0, checks.stderr
    assert re.findall(r"^== ([a-z-]+): \d+ s$", checks.stdout, re.MULTILINE) == ["set-up", "lint", "tests", "demo"]


def test_the_checks_fail_when_no_test_ran(tmp_path: Path) -> None:
    """Pytest's status 5, that it found no test, fails .ci/run, and the demo is not reached."""
    checks = _checked(tmp_path, tests="exit 5", demo=_demo())

    assert checks.returncode != 0
    assert "== tests: FAILED" in checks.stdout
    assert "== demo" not in checks.stdout


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"federated": {"accuracy": 0.5, "auc": 0.88}}, "federated accuracy is 0.5"),
        ({"alone": {}}, "a hospital is missing"),
        ({"bytes": 0}, "bytes is 0"),
    ],
)
def test_the_checks_fail_when_the_demo_shows_less(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    """A model that learned nothing, a hospital left out, or a federation that sent nothing fails .ci/run."""
    checks = _checked(tmp_path, demo=_demo(**changes))

    assert checks.returncode != 0
    assert told in checks.stderr
    assert "== demo: FAILED" in checks.stdout

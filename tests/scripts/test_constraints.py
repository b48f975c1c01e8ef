"""Pins in constraints.txt against the requirements of the project and the installed packages."""

import re
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in entries), (
        entries
    )
    return {
        canonicalize_name(name): Version(version)
        for name, version in (line.split("==") for line in entries)
    }


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for group in project["optional-dependencies"].values() for line in group]
    parsed = [Requirement(line) for line in [*project["dependencies"], *extras]]
    return [requirement for requirement in parsed if requirement.name != "megacore"]


def test_every_requirement_is_pinned_to_an_allowed_version() -> None:
    pinned = pins()
    for requirement in requirements():
        version = pinned[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"{requirement} does not take {version}"


def test_torch_and_fastapi_are_pinned_to_supported_versions_without_apex() -> None:
    pinned = pins()
    assert pinned["torch"] == Version("2.13.0")
    assert pinned["fastapi"] < Version("0.151")
    assert "apex" not in pinned


def test_installed_versions_equal_the_pins() -> None:
    pinned = pins()
    if Path(sys.prefix, "torch-requirement").exists():  # make venv TORCH=…
        del pinned["torch"], pinned["setuptools"]
    differing = {
        name: dist.version
        # sys.path may contain packages that setuptools bundles.
        for dist in distributions(path=[sysconfig.get_path("purelib")])
        if (name := canonicalize_name(dist.metadata["Name"])) in pinned
        and Version(dist.version).public != pinned[name].public
    }
    assert differing == {}

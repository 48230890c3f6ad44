"""Builds of a checkout: an editable install that static tools follow, and a complete source distribution."""

import os
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from processes import ran

build = pytest.importorskip("hatchling.build", reason="hatchling, which builds kltest, is not installed here")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def tracked(*folders):
    listed = ran("git", "ls-files", *folders).stdout.split("\n")
    found = {path for path in listed if path and os.path.exists(path)}
    if not found:
        pytest.skip("not a git checkout")
    return found


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    with zipfile.ZipFile(tmp_path / build.build_editable(str(tmp_path))) as wheel:
        (path,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert wheel.read(path).decode().strip() == str(ROOT)
        assert not [name for name in wheel.namelist() if name.endswith(".py")]


def test_a_source_distribution_holds_what_a_checkout_does(tmp_path):
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() - held == set()


def test_a_wheel_holds_the_package_and_nothing_else(tmp_path):
    with zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path))) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert tracked("kltest") - held == set()
    assert {name.partition("/")[0] for name in held} == {"kltest"}


def test_the_build_is_hatchlings():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["build-system"]["build-backend"] == build.__name__

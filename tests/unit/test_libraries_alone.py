"""Adapters to torchrl, tunix and unsloth-zoo: names, versions, and a change planted in what is installed here.

What each setting follows is held against its derivation in test_libraries_recorded.py.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

import kltest
from kltest.adapters import find


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """unsloth-zoo writes a folder into the current directory when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNSLOTH_ZOO_DISABLE_GPU_INIT", "1")


def needed(library: str) -> None:
    if find_spec(find(library).module.partition(".")[0]) is None:
        pytest.skip(f"{library} is not installed here")


@pytest.mark.parametrize("library", ["torchrl", "tunix", "unsloth-zoo"])
def test_an_adapter_imports_nothing(library):
    module = f"kltest.adapters.{library.replace('-', '_')}"
    code = (
        f"import sys, {module}; found = {{'torch', 'jax', 'torchrl', 'tunix', 'unsloth_zoo'}} & sys.modules.keys(); "
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("library", ["torchrl", "tunix", "unsloth-zoo"])
def test_settings_have_names_of_their_own_defaults_first_and_a_recipe(library):
    settings = find(library).settings
    assert len({setting.name for setting in settings}) == len(settings)
    assert not any(setting.name.isidentifier() for setting in settings)
    assert settings[0].default
    assert [setting.recipe for setting in settings if setting.recipe] == [True]
    assert all(setting.source.startswith("https://") for setting in settings)
    assert all(setting.note for setting in settings if setting.recipe)


@pytest.mark.parametrize(
    ("library", "target", "arguments"),
    [
        ("torchrl", "kltest.adapters.torchrl.calls:grpo", {"loss": "NoSuchLoss"}),
        ("torchrl", "kltest.adapters.torchrl.calls:grpo", {"no_such_option": 1}),
        ("tunix", "kltest.adapters.tunix.calls:grpo", {"no_such_option": 1}),
        ("unsloth-zoo", "kltest.adapters.unsloth_zoo.calls:grpo", {"no_such_option": 1}),
    ],
)
def test_what_a_version_does_not_have_is_said_in_a_sentence(library, target, arguments):
    needed(library)
    report = kltest.grade(target, arguments=arguments, environment="bandit")
    assert report.verdict == "error"
    assert "the installed" in report.error
    assert any(name in report.error for name in ("NoSuchLoss", "no_such_option"))


def test_a_change_of_the_library_is_seen(monkeypatch):
    needed("torchrl")
    from torchrl.objectives.llm.grpo import GRPOLoss

    original = GRPOLoss._kl_to_ref

    def doubled(self, *args, **kwargs):
        loss, value = original(self, *args, **kwargs)
        return 2 * loss, value

    monkeypatch.setattr(GRPOLoss, "_kl_to_ref", doubled)
    report = kltest.grade("torchrl:loss/GRPOLoss", environment="bandit", sampler="current", select="KL1")
    assert report.gradients[0].identified == pytest.approx({"forward_kl": 2.0}, rel=1e-5)

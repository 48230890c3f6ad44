"""Adapters to torchrl, tunix and unsloth-zoo: names, versions, and a change planted in what is installed here.

What each setting follows is held against its derivation in test_libraries_recorded.py.
"""

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


@pytest.mark.parametrize(
    ("library", "target", "arguments"),
    [
        ("torchrl", "kltest.adapters.torchrl:grpo", {"loss": "NoSuchLoss"}),
        ("torchrl", "kltest.adapters.torchrl:grpo", {"no_such_option": 1}),
        ("tunix", "kltest.adapters.tunix:grpo", {"no_such_option": 1}),
        ("unsloth-zoo", "kltest.adapters.unsloth_zoo:grpo", {"no_such_option": 1}),
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

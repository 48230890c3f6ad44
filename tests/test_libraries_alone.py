"""torchrl, tunix and unsloth-zoo through their doors: each is graded where it is installed.

Expected is what follows from their source, by hand. u = log π − log ref, w = e^(−u); k3 per token follows 1 − w, so
forward_kl at one step and local_forward_kl over tokens; k2 follows u, so (local_)reverse_kl; k1 follows 1, so nothing
on-policy and −∇KL(μ‖π) off-policy. A mean over the T = 3 positions of a batch, or over a row's tokens, costs a factor
of 3; the first does so on ragged rows too, the second gives them nothing that has a name, as does k3 off-policy.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

import kltest
from kltest.libraries import door

WORLDS = ("bandit", "sequence", "ragged")


def along(name: str, sequence: float | None = 1.0, ragged: float | None = 1.0) -> list[dict | None]:
    """A gradient at one step, and its next-token part over tokens, times coefficients."""
    return [{name: 1.0}, *(factor and {f"local_{name}": factor} for factor in (sequence, ragged))]


def whole(name: str, factor: float = 1.0) -> list[dict | None]:
    return [{name: factor}] * 3


THIRD = 1 / 3
EVERYWHERE = along("forward_kl", THIRD, THIRD)
BY_LENGTH = along("forward_kl", THIRD, None)
# E_μ[ρ·k3·g + ρ·(1 − w)·g] = E_μ[ρ·u·g], since k3 + 1 − w = u.
CORRECTED = [{"reverse_kl": 1.0}, {"local_reverse_kl@sampler": 1.0}, {"local_reverse_kl@sampler": 1.0}]
CASES = [
    ("torchrl", "loss/GRPOLoss", EVERYWHERE, [None] * 3),
    ("torchrl", "loss/DAPO", EVERYWHERE, None),
    ("torchrl", "loss/CISPOLoss", EVERYWHERE, None),
    ("torchrl", "loss/GRPOLoss,aggregation=prompt_mean", EVERYWHERE, None),
    ("torchrl", "loss/GRPOLoss,masking_strategy=rlhf", EVERYWHERE, None),
    ("torchrl", "kl_in_reward/KLComputation", whole("reverse_kl"), None),
    ("torchrl", "loss/SequenceKLGRPOLoss", whole("reverse_kl"), whole("reverse_kl")),
    ("unsloth-zoo", "grpo_compute_loss/alone", BY_LENGTH, [None] * 3),
    ("unsloth-zoo", "grpo_compute_loss/loss_type=sapo", BY_LENGTH, None),
    ("unsloth-zoo", "grpo_compute_loss/loss_type=luspo", along("forward_kl"), None),
    # Divided by max_completion_length, 8192 unless it is given.
    ("unsloth-zoo", "grpo_compute_loss/loss_type=dr_grpo",
     [{name: 1 / 8192} for name in ("forward_kl", "local_forward_kl", "local_forward_kl")], None),
    ("unsloth-zoo", "grpo_compute_loss/loss_type=dr_grpo,max_completion_length=1", along("forward_kl"), None),
    ("unsloth-zoo", "grpo_compute_loss/use_bias_correction_kl=True,loss_type=luspo", along("reverse_kl"), CORRECTED),
    ("unsloth-zoo", "grpo_compute_loss/charged", whole("reverse_kl"), whole("reverse_kl")),
    ("tunix", "compute_kl_divergence/low_var_kl", along("forward_kl"), None),
    ("tunix", "compute_kl_divergence/kl", whole("zero"), None),
    ("tunix", "compute_kl_divergence/mse_kl", along("reverse_kl"), None),
    ("tunix", "grpo_loss_fn/GRPOConfig", [{"zero": 1.0}, {"zero": 1.0}, None],
     [{"from_sampler_kl": -1.0}, {"from_sampler_kl": -THIRD}, None]),
    ("tunix", "grpo_loss_fn/grpo-sequence-kl", whole("reverse_kl"), whole("reverse_kl")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """unsloth-zoo writes a folder into the current directory when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNSLOTH_ZOO_DISABLE_GPU_INIT", "1")


def needed(library: str) -> None:
    if find_spec(door(library).module.partition(".")[0]) is None:
        pytest.skip(f"{library} is not installed here")


@pytest.mark.parametrize(("library", "name", "current", "stale"), CASES, ids=lambda value: str(value)[:60])
def test_what_a_setting_follows_is_what_its_source_says(library, name, current, stale):
    needed(library)
    sampler = "both" if stale else "current"
    report = kltest.grade(f"{library}:{name}", select="KL1", sampler=sampler, timeout=None)
    assert not report.error
    # Float64 names to 1e-9, float32 to 1e-4: coefficients of what is computed in float32 are exact to about 1e-6.
    tolerance = 1e-9 if report.dtype == "float64" else 1e-5
    for kind, expected in (("current", current), ("stale", stale)):
        rows = {row.environment: row.identified for row in report.gradients if row.sampler == kind}
        for world, named in zip(WORLDS, expected or (), strict=bool(expected)):
            assert rows[world] == (named and pytest.approx(named, rel=tolerance)), (kind, world)
    if door(library).setting(name).recipe:
        assert report.verdict == "confirmed"


@pytest.mark.parametrize("library", ["torchrl", "tunix", "unsloth-zoo"])
def test_a_door_imports_nothing(library):
    module = f"kltest.libraries.{library.replace('-', '_')}"
    code = (
        f"import sys, {module}; found = {{'torch', 'jax', 'torchrl', 'tunix', 'unsloth_zoo'}} & sys.modules.keys(); "
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("library", ["torchrl", "tunix", "unsloth-zoo"])
def test_settings_have_names_of_their_own_defaults_first_and_a_recipe(library):
    settings = door(library).settings
    assert len({setting.name for setting in settings}) == len(settings)
    assert not any(setting.name.isidentifier() for setting in settings)
    assert settings[0].default
    assert [setting.recipe for setting in settings if setting.recipe] == [True]
    assert all(setting.source.startswith("https://") for setting in settings)
    assert all(setting.note for setting in settings if setting.recipe)


@pytest.mark.parametrize(
    ("library", "target", "arguments"),
    [
        ("torchrl", "kltest.libraries.calls.torchrl:grpo", {"loss": "NoSuchLoss"}),
        ("torchrl", "kltest.libraries.calls.torchrl:grpo", {"no_such_option": 1}),
        ("tunix", "kltest.libraries.calls.tunix:grpo", {"no_such_option": 1}),
        ("unsloth-zoo", "kltest.libraries.calls.unsloth_zoo:grpo", {"no_such_option": 1}),
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

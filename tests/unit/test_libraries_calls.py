"""Adapters to verl, OpenRLHF and Liger-Kernel, without the libraries: names, versions, recipes.

What each setting follows is held against its derivation in test_libraries_recorded.py.
"""

import sys

import pytest
import torch
from weekly import first

import kltest
from kltest.adapters import find
from kltest.adapters.installed import called, found, part, taken
from kltest.adapters.liger.recipes import charged
from kltest.adapters.openrlhf.recipes import sequence_kl


def test_what_a_version_does_not_have_is_said_and_not_swallowed():
    def loss(logp, beta=0.1, **anything):
        return logp * beta

    assert taken(loss, {"logp": 1, "mask": 2}, {"beta": 3}) == {"logp": 1, "beta": 3}
    assert called(loss, {"logp": 2, "mask": 2}, {"beta": 3}) == 6
    with pytest.raises(LookupError, match="has no 'use_ratio'"):
        taken(loss, {"logp": 1}, {"use_ratio": True})
    with pytest.raises(LookupError, match="wants 'logp'"):
        taken(loss, {}, {})
    with pytest.raises(LookupError, match="the installed json has no json:nothing"):
        part("json", "nothing")
    with pytest.raises(LookupError, match="No module named"):
        part("kltest_no_such_module", "nothing")


@pytest.mark.parametrize(
    "target", ["verl.calls:kl_loss", "openrlhf:kl_loss", "liger:fused"], ids=lambda target: target.partition(":")[0]
)
def test_a_library_that_is_not_there_is_one_sentence(target):
    """Of a target error, and without a line of ours."""
    library = target.partition(":")[0].removesuffix(".calls")
    if library in sys.modules or __import__("importlib.util").util.find_spec(find(library).module.partition(".")[0]):
        pytest.skip(f"{library} is installed here")
    arguments = {"kl_penalty": "kl", "loss_agg_mode": "token-mean"} if library == "verl" else {}
    report = kltest.grade(f"kltest.adapters.{target}", arguments=arguments)
    assert report.verdict == "error"
    assert "raised LookupError" in report.error
    assert "No module named" in report.error
    assert ".py" not in report.error


def step(logp, mask):
    """Cannot be called with one live token, as whitening cannot."""
    if mask.sum() < 2:
        raise ValueError("fewer than two tokens")
    return (logp * mask).sum() / mask.sum()


def test_a_row_that_fails_alone_sends_the_loss_to_batches():
    """Rollouts of one token fail, longer ones do not: the loss is graded in pairs, where none does."""
    report = kltest.grade(step, environment="ragged", select="KL101")
    assert report.verdict != "error"
    assert {row.batch for row in report.gradients} == {2}


def sequence_loss(logp, ref_logp, old_logp, mask):
    return sequence_kl(logp, ref_logp, old_logp, mask)


def without_ratio(logp, ref_logp, old_logp, mask):
    """The ratio of whole sequences forgotten; the sampler is asked for all the same."""
    return sequence_kl(logp, ref_logp, logp.detach() + 0 * old_logp, mask)


def without_later_tokens(logp, ref_logp, old_logp, mask):
    """Each token with its own log-ratio only."""
    ratio = ((logp - old_logp) * mask).sum(-1, keepdim=True).exp().detach()
    return (ratio * (logp - ref_logp) ** 2 / 2).where(mask != 0, 0.0)


def charged_loss(logp, ref_logp, old_logp, mask, advantage, beta):
    cost = -charged(advantage, logp.detach(), ref_logp, old_logp, mask, beta)
    return cost[:, None] * torch.where(mask != 0, logp, 0.0)


def charged_with_stale_log_probs(logp, ref_logp, old_logp, mask, advantage, beta):
    """The cost taken from the sampler's log-probs: log μ − log ref in place of log π − log ref."""
    ratio = torch.where(mask != 0, logp.detach() - old_logp, 0.0).sum(-1).exp()
    cost = -ratio * charged(advantage, old_logp, ref_logp, old_logp, mask, beta)
    return cost[:, None] * torch.where(mask != 0, logp, 0.0)


@pytest.mark.parametrize("recipe", first(1, [sequence_loss, charged_loss]))
def test_recipes_follow_the_sequence_level_gradient_on_and_off_policy(recipe):
    report = kltest.grade(recipe, sampler="both")
    assert report.verdict == "confirmed", report.to_text() if hasattr(report, "to_text") else report
    assert [row.identified for row in report.gradients] == [{"reverse_kl": pytest.approx(1.0, abs=1e-9)}] * 6


@pytest.mark.parametrize(
    ("planted", "code"),
    first(1, [(without_ratio, "KL301"), (without_later_tokens, "KL201"), (charged_with_stale_log_probs, "KL305")]),
)
def test_a_recipe_copied_wrongly_is_caught(planted, code):
    report = kltest.grade(planted, sampler="both")
    assert report.verdict == "refuted"
    assert code in {check.code for check in report.checks if check.status == "fail"}


def test_a_decorator_of_a_package_that_is_missing_leaves_functions_and_classes(tmp_path, monkeypatch):
    """With arguments and without; a method of such a class is called as the library wrote it."""
    package = tmp_path / "kltest_library_without"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "workers.py").write_text(
        "import kltest_absent\n"
        "@kltest_absent.remote\nclass Plain:\n    def twice(self, number):\n        return 2 * number\n"
        "@kltest_absent.remote(num_cpus=8)\nclass Sized(Plain): pass\n"
        "@kltest_absent.remote(num_cpus=8)\ndef thrice(number):\n    return 3 * number\n"
        "class Actor(kltest_absent.Actor):\n    def twice(self, number):\n        return 2 * number\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "kltest_library_without.workers"
    assert [found(name, each).twice(None, 4) for each in ("Plain", "Sized", "Actor")] == [8, 8, 8]
    assert found(name, "thrice")(4) == 12
    assert found(name, "Actor")().twice(4) == 8
    for each in (name, "kltest_library_without"):
        monkeypatch.delitem(sys.modules, each)

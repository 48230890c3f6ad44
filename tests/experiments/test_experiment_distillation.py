"""The distillation experiment: where losses end and how noisy they are, derived again; its claims able to fail."""

from itertools import product

import numpy as np
import pytest
import torch
from trial import Trial, row_of

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.truth import combine

TRIAL = Trial("distillation")
(RUNS,) = TRIAL.modules("experiment")


@pytest.fixture(scope="module")
def rows():
    return TRIAL.computed(seeds=2)


@pytest.mark.parametrize("form", RUNS.FORMS)
def test_a_push_is_the_named_gradient_over_the_probability(form):
    """In a bandit; beside it a clamped sum is followed where it is positive, and only there."""
    signs = set()
    for kind, sure in product(RUNS.TEACHERS, (False, True)):
        environment, student, teacher = RUNS.drawn(1, kind, 0)
        student = table(2 * teacher) if sure else student  # which has more within the support than the teacher has
        pushed = RUNS.signal(RUNS.FORMS[form], 3, environment, student, teacher)
        chances = np.exp(student)
        found = chances * (pushed - (chances * pushed).sum())
        name = RUNS.FORMS[form].name.replace("K", "3").replace("to-go", "reverse_kl")
        wanted = combine({name: 1.0}, Instance.of(environment, student, teacher))
        if RUNS.FORMS[form].clamped:
            top = np.argsort(-teacher[0])[:3]
            signs.add(bool(((teacher - student) * np.exp(teacher))[0, top].sum() > 0))
            wanted = wanted * (((teacher - student) * np.exp(teacher))[0, top].sum() > 0)
        np.testing.assert_allclose(found, wanted, atol=1e-14)
    assert not RUNS.FORMS[form].clamped or signs == {True, False}


def test_a_truncated_reverse_sum_is_least_at_a_share_of_the_teacher_by_e():
    """Minimised again by autograd over logits of a bandit."""
    _, student, teacher = RUNS.drawn(1, "broad", 0)
    top = torch.tensor(teacher[0]).topk(4).indices
    logits = torch.tensor(student[0], requires_grad=True)
    optimiser = torch.optim.LBFGS([logits], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def closure():
        optimiser.zero_grad()
        logp = logits.log_softmax(0)[top]
        loss = (logp.exp() * (logp - torch.tensor(teacher[0])[top])).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    # The search stops there.
    np.testing.assert_allclose(logits.softmax(0)[top].detach(), np.exp(teacher[0])[top] / np.e, atol=1e-5)


def sampled(logp, ref_logp, reward, mask):
    own = RUNS.NOISE_BETA * (logp - ref_logp).detach() - reward[:, None]
    return (own * logp * mask).sum(-1)


def of_all(logp, logits, ref_logits, reward, mask):
    logits = logits.log_softmax(-1)
    kl = (logits.exp() * (logits - ref_logits.log_softmax(-1))).sum(-1)
    return ((RUNS.NOISE_BETA * kl - reward[:, None] * logp) * mask).sum(-1)


@pytest.mark.scheduled
def test_variances_are_those_of_the_losses_as_graded(rows):
    """By kltest's own enumeration, with the baselines added to the reward."""
    environment, student, teacher = RUNS.drawn(2, "peaked", 1)
    instance = Instance.of(environment, student, teacher)
    weights, paths = instance.rollout_weights("current"), instance.paths
    mean = float(weights @ environment.returns(paths))
    log_ratio = (student - teacher)[paths.contexts, paths.tokens]
    baseline = float((weights @ log_ratio).mean()) * RUNS.NOISE_BETA
    found = row_of(rows, part="noise", environment="sequence", teacher="peaked", rewarded=True, place=0.0, seed=1)
    for name, loss, less in (("sampled token", sampled, mean - baseline), ("reverse", of_all, mean)):

        def centred(reward, *, loss=loss, less=less, **fields):
            return loss(reward=reward - less, **fields)

        def shim(logp, ref_logp, logits, ref_logits, reward, mask, centred=centred, loss=loss):
            given = {"logp": logp, "ref_logp": ref_logp, "logits": logits, "ref_logits": ref_logits, "mask": mask}
            wanted = loss.__code__.co_varnames[: loss.__code__.co_argcount]
            return centred(reward, **{key: one for key, one in given.items() if key in wanted})

        moments = exact(resolve(shim, Call()), instance)
        assert found[f"variance of {name}"] == pytest.approx(moments.variance, rel=1e-9)
        assert found[f"square of {name}"] == pytest.approx(float((moments.gradient**2).sum()), rel=1e-9)


@pytest.mark.scheduled
def test_every_loss_has_a_line_in_the_table(rows):
    (analysis,) = TRIAL.modules("claims")
    lines = analysis.tables(rows)["forms"]
    assert [line["loss"] for line in lines] == [form.words for form in RUNS.FORMS.values()]
    assert all(line["follows"] and line["fixed point"] and line["bytes a token"] for line in lines)
    assert float(lines[0]["variance"]) == 1
    assert lines[9]["mass outside"] >= "0.63"


@pytest.mark.scheduled
def test_claims_agree_and_each_can_fail(rows):
    TRIAL.may_lack_parts(rows)
    TRIAL.claims_can_fail(rows)

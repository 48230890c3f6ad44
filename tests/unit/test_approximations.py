"""KL701 to KL703: heads, temperatures and truncations found by experiments on losses written in many ways."""

import math

import pytest
import torch
from weekly import first

import kltest
from kltest.checks.approximations.heads import Head, head_of
from kltest.grading.grader import Grading
from kltest.grading.options import Options

# The losses here are about what is left out of next-token log-probs, and take them as they are given: normalised.
LOCAL = {"expect": "local_reverse_kl", "ignore": "KL512"}


def failing(loss, **options):
    report = kltest.grade(loss, **{**LOCAL, **options})
    assert report.verdict == "refuted"
    return {check.code: check.message for check in report.failed if not check.code.startswith("KL8")}


def confirmed(loss, **options):
    report = kltest.grade(loss, **{**LOCAL, **options})
    return report.verdict == "confirmed" and not [c for c in report.failed if not c.code.startswith("KL8")]


def chosen(log_probs, tokens):
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


# A loss over a head of the vocabulary, in the ways that libraries write it.


def head_alone(logits, ref_logits, k):
    top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return (top.values.exp() * (top.values - ref_logits.gather(-1, top.indices))).sum(-1)


def head_of_the_reference_renormalised(logits, ref_logits, k):
    top = ref_logits.topk(min(k, logits.shape[-1]), dim=-1)
    p, q = logits.gather(-1, top.indices).log_softmax(-1), top.values.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def rest_lumped_together(logits, ref_logits, k):
    keep = torch.zeros_like(logits).scatter(-1, logits.topk(min(k, logits.shape[-1]), dim=-1).indices, 1.0) > 0
    p, q = (x.exp().where(~keep, 0.0).sum(-1).clamp_min(1e-30) for x in (logits, ref_logits))
    return (logits.exp() * (logits - ref_logits)).where(keep, 0.0).sum(-1) + p * (p / q).log()


def head_and_sampled_tail(logits, ref_logits, logp, ref_logp, tokens, k):
    top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    head = (top.values.exp() * (top.values - ref_logits.gather(-1, top.indices))).sum(-1)
    inside = (top.indices == tokens.unsqueeze(-1)).any(-1)
    return head + ((logp - ref_logp).square() / 2).where(~inside, 0.0)


HEADS = [head_alone, head_of_the_reference_renormalised, rest_lumped_together, head_and_sampled_tail]


@pytest.mark.parametrize("loss", first(1, HEADS), ids=lambda loss: loss.__name__)
def test_a_head_is_found_with_its_size(loss):
    by = "reference" if loss is head_of_the_reference_renormalised else "policy"
    found = failing(loss, arguments={"k": 2}, environment="bandit")
    assert set(found) == {"KL701"}
    assert f"only the 2 likeliest actions under the {by}" in found["KL701"]


@pytest.mark.scheduled
def test_a_head_of_one_action_is_found():
    """A rollout of another action tells it from a loss that sees the drawn token alone."""
    options = Options.of(environment="bandit", expect="local_reverse_kl", arguments={"k": 1})
    assert head_of(Grading.of("", options).measured(rest_lumped_together)) == Head("policy", (1,) * 4, drawn=False)


@pytest.mark.parametrize(("loss", "k"), first(1, list(zip(HEADS, (20, 200, 20, 200), strict=True))))
def test_a_head_larger_than_the_usual_environments_is_found(loss, k):
    """With so few actions as there are the sum is complete and the gradient right; with more than k it is not."""
    found = failing(loss, arguments={"k": k}, environment="bandit")
    assert set(found) == {"KL701"}
    assert f"only the {k} likeliest actions" in found["KL701"]


def nucleus(logits, ref_logits, p):
    ordered = logits.sort(-1, descending=True)
    chances = ordered.values.exp()
    keep = chances.cumsum(-1) - chances < p
    return (chances * (ordered.values - ref_logits.gather(-1, ordered.indices))).where(keep, 0.0).sum(-1)


@pytest.mark.scheduled
def test_a_nucleus_is_found():
    found = failing(nucleus, arguments={"p": 0.8}, environment="bandit,sequence")
    assert set(found) == {"KL701"}
    assert "likeliest actions under the policy, as many as" in found["KL701"]


@pytest.mark.scheduled
def test_a_threshold_on_probabilities_is_a_head_of_varying_size():
    def loss(logits, ref_logits):
        kept = logits >= logits.max(-1, keepdim=True).values + math.log(0.5)
        own, other = (scores.masked_fill(~kept, -1e9).log_softmax(-1) for scores in (logits, ref_logits))
        return exact_kl(own, other)

    found = failing(loss, environment="bandit,sequence")
    assert set(found) - {"KL504"} == {"KL701"}
    assert "likeliest actions under the policy, as many as" in found["KL701"]


@pytest.mark.scheduled
def test_a_head_in_the_reward_shows_in_sequences_only():
    """In a bandit a value that does not depend on the token drawn has no gradient, complete or not."""
    found = failing(head_alone, arguments={"k": 2}, expect="reverse_kl", placement="reward")
    assert set(found) == {"KL101", "KL701"}
    assert "bandit" not in found["KL701"]


@pytest.mark.scheduled
def test_heads_that_do_no_harm_are_let_alone():
    """The head's log-ratio detached and the tail sampled: exactly the local gradient, for any k."""
    for k in (2, 20):
        assert confirmed("top-k-detached", arguments={"k": k})
    report = kltest.grade("top-k-detached")
    assert [check.code for check in report.failed if not check.code.startswith("KL8")] == ["KL201"]

    def over_the_length(logits, ref_logits, logp, ref_logp, tokens, mask):
        top = logits.topk(2, dim=-1)
        head = (top.values.exp() * (top.values - ref_logits.gather(-1, top.indices)).detach()).sum(-1)
        inside = (top.indices == tokens.unsqueeze(-1)).any(-1)
        token = head + ((logp - ref_logp).square() / 2).where(~inside, 0.0)
        return token.where(mask != 0, 0.0).sum(-1) / mask.sum(-1)

    assert "KL701" not in failing(over_the_length)


@pytest.mark.scheduled
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_what_looks_at_everything_has_no_head(precision):
    def exact(logits, ref_logits):
        log_probs = logits.to(precision).log_softmax(-1)
        return (log_probs.exp() * (log_probs - ref_logits.to(precision))).sum(-1)

    def drawn(logits, ref_logits, tokens):
        own, other = (chosen(x.to(precision).log_softmax(-1), tokens) for x in (logits, ref_logits))
        return (own - other).square() / 2

    assert confirmed(exact)
    assert confirmed(drawn)


# The drawn token's log-prob under a truncated distribution.


def policy_truncated(logits, ref_logp, tokens, k):
    kept = logits >= logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    logp = chosen(logits.masked_fill(~kept, float("-inf")).log_softmax(-1), tokens)
    return (torch.where(logp.isfinite(), logp, ref_logp) - ref_logp).square() / 2


def reference_truncated(logp, ref_logits, tokens, k):
    kept = ref_logits >= ref_logits.topk(min(k, ref_logits.shape[-1]), dim=-1).values[..., -1:]
    return (logp - chosen(ref_logits.masked_fill(~kept, -20.0).log_softmax(-1), tokens)).square() / 2


def tail_tokens_dropped(logp, ref_logp, logits, tokens, k):
    kept = logits >= logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return torch.where(chosen(kept, tokens), (logp - ref_logp).square() / 2, 0.0)


@pytest.mark.parametrize(
    ("loss", "k"),
    first(1, [(policy_truncated, 20), (reference_truncated, 2), (tail_tokens_dropped, 2), (tail_tokens_dropped, 20)]),
)
def test_a_truncated_log_prob_is_found_with_its_size(loss, k):
    found = failing(loss, arguments={"k": k}, environment="bandit,sequence" if k == 2 else "bandit")
    # A token that leaves the head loses its gradient, too: a dead zone.
    assert set(found) - {"KL504"} == {"KL703"}
    under = "reference" if loss is reference_truncated else "policy"
    assert f"the {k} likeliest actions under the {under}" in found["KL703"]


@pytest.mark.scheduled
def test_a_truncated_sampler_is_found_behind_a_ratio():
    def loss(logp, ref_logp, old_logits, tokens):
        kept = old_logits >= old_logits.topk(2, dim=-1).values[..., -1:]
        old = chosen(old_logits.masked_fill(~kept, -20.0).log_softmax(-1), tokens)
        return ((logp - old).exp().clamp(max=10).detach() * (logp - ref_logp).square()) / 2

    found = failing(loss, sampler="current")
    assert set(found) == {"KL703"}
    assert "2 likeliest actions under the sampler" in found["KL703"] or "under the policy" in found["KL703"]


# Temperatures.


def exact_kl(p, q):
    return (p.exp() * (p - q)).sum(-1)


def policy_tempered(logits, ref_logits, t):
    return exact_kl((logits / t).log_softmax(-1), ref_logits)


def reference_tempered(logits, ref_logits, t):
    return exact_kl(logits, (ref_logits / t).log_softmax(-1))


def both_tempered(logits, ref_logits, t):
    return exact_kl((logits / t).log_softmax(-1), (ref_logits / t).log_softmax(-1))


def drawn_tempered(logits, ref_logp, tokens, t):
    return (chosen((logits / t).log_softmax(-1), tokens) - ref_logp).square() / 2


def sampler_tempered(logp, ref_logp, old_logits, tokens, t):
    old = chosen((old_logits / t).log_softmax(-1), tokens)
    return (logp - old).exp().detach() * (logp - ref_logp).square() / 2


@pytest.mark.parametrize(
    ("loss", "side"),
    first(
        1,
        [
            (policy_tempered, "the policy's log-probs"),
            (reference_tempered, "the reference's log-probs"),
            (both_tempered, "the policy's and the reference's log-probs"),
            (drawn_tempered, "the policy's log-probs"),
            (sampler_tempered, "the sampler's log-probs"),
        ],
    ),
)
@pytest.mark.parametrize("temperature", first(1, [1.37, 1.0]))
def test_a_temperature_is_found_with_its_side(loss, side, temperature):
    options = {"arguments": {"t": temperature}, "sampler": "current", "environment": "bandit,ragged"}
    if temperature == 1.0:
        assert confirmed(loss, **options)
        return
    found = failing(loss, **options)
    assert set(found) - {"KL503"} == {"KL702"}
    assert f"{side} are divided by a temperature of {temperature}" in found["KL702"]


@pytest.mark.scheduled
@pytest.mark.parametrize("temperature", [0.2, 0.6, 5.5])
def test_a_temperature_far_from_one_is_found(temperature):
    found = failing(policy_tempered, arguments={"t": temperature}, environment="bandit", sampler="current")
    assert f"the policy's log-probs are divided by a temperature of {temperature}" in found["KL702"]

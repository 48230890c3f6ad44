"""Caps and masks of policy losses against a sampler that is not the policy, on tokens and on sequences.

Each is −sg(m)·ρ_t·A: ρ = π/π_old is the trainer's own ratio, w = π_old/μ the weight that makes up for the engine, and m
a cap or a mask of w. A is a given advantage, the reward less its mean. Samplers of the environments are near: neither a
cap of 2 nor a mask acts there, unless the SPEC says so; how far that holds is measured by experiments/off-policy.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from kltest.estimators.advantages import lengths, of_tokens
from kltest.estimators.spec import Row, everywhere, policy_loss

YAO = "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
LIU = "Liu et al. 2025, When Speed Kills Stability: the training-inference mismatch"
SURROGATE = {"bandit": {"expected_reward": 1.0}, "tokens": {"expected_reward@sampler": 1.0}}
ALONE = {"bandit": {"expected_reward": 1.0}, "tokens": None}
WHOLE = everywhere({"expected_reward": 1.0})


def token(old_logp, rollout_logp, mask):
    """(B, T) the engine's weight of each token."""
    return (old_logp - rollout_logp).where(mask != 0, 0.0).exp().detach()


def sequence(old_logp, rollout_logp, mask):
    """(B, 1) the engine's weight of a rollout, the product of those of its tokens."""
    return of_tokens(old_logp - rollout_logp, mask).exp().unsqueeze(1).detach()


def geometric(old_logp, rollout_logp, mask):
    """(B, 1) the geometric mean of the weights of a rollout's tokens."""
    return (of_tokens(old_logp - rollout_logp, mask) / lengths(mask)).exp().unsqueeze(1).detach()


def arithmetic(old_logp, rollout_logp, mask):
    """(B, 1) the arithmetic mean of the weights of a rollout's tokens."""
    return (of_tokens(token(old_logp, rollout_logp, mask), mask) / lengths(mask)).unsqueeze(1)


def truncated(weight, cap):
    """Return weights, those above the cap at the cap."""
    return weight.clamp(max=cap)


def masked(weight, cap):
    """Return weights, those above the cap at 0."""
    return weight.where(weight <= cap, 0.0)


def weighted(weight, logp, old_logp, advantage, mask):
    """(B,) −Σ_t weight·ρ_t·A over live tokens."""
    return -of_tokens(weight * (logp - old_logp).exp() * advantage.unsqueeze(1), mask)


WEIGHTS: dict[str, tuple[Callable[..., Any], str, str, str, Row]] = {
    "token": (
        token,
        "w_t",
        f"{YAO}; IcePop (Ling Team 2025, arXiv 2510.18855); TRL `token_truncate`, `token_mask`",
        "token weights leave the prefixes of the sampler: the surrogate is ascended",
        SURROGATE,
    ),
    "sequence": (
        sequence,
        "Π_s w_s",
        f"{LIU}; TRL `sequence_truncate`, `sequence_mask`, its default",
        "right below the cap where the trainer's own policy is the sampler's (ρ = 1); its noise grows with the length",
        WHOLE,
    ),
    "geometric": (
        geometric,
        "Π_s w_s^(1/L)",
        f"{LIU}; GSPO's ratio (arXiv 2507.18071) as a weight",
        "a mean of ratios is no importance weight: it is right for one token only",
        ALONE,
    ),
    "arithmetic": (
        arithmetic,
        "(1/L)Σ_s w_s",
        "stated here beside the geometric mean; no paper of it is known to us",
        "a mean of ratios is no importance weight: it is right for one token only",
        ALONE,
    ),
}
BOUNDS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "tis": (truncated, "min({w}, C)", "above the cap, not that either"),
    "mis": (masked, "{w}·1{{{w} ≤ C}}", "what the engine makes too rare is lost"),
}


def _bounded(name: str, weight_of: Callable[..., Any], bound: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(logp, old_logp, rollout_logp, advantage, mask, cap=2.0):
        return weighted(bound(weight_of(old_logp, rollout_logp, mask), cap), logp, old_logp, advantage, mask)

    bounded.__name__ = bounded.__qualname__ = name.replace("-", "_")
    bounded.__doc__ = f"−Σ_t sg({bound.__name__} weights by {weight_of.__name__})·ρ_t·A. (B, T) → (B,)."
    return bounded


for (_kind, (_weight, _w, _source, _false, _engine)), (_how, (_bound, _formula, _lost)) in product(
    WEIGHTS.items(), BOUNDS.items()
):
    policy_loss(
        f"{_how}-{_kind}",
        formula=f"−Σ_t sg({_formula.format(w=_w)})·ρ_t·A,  w_t = π_old/μ of the engine, ρ_t = π/π_old, C = 2",
        source=_source,
        claims="the policy gradient, in spite of an engine that differs, with bounded weights",
        known_false=f"{_false}; {_lost}",
        current=WHOLE,
        stale=SURROGATE,
        engine=_engine,
    )(_bounded(f"{_how}-{_kind}", _weight, _bound))


@policy_loss(
    "off-policy-sequence-mask",
    formula="−Σ_t sg(m)·ρ_t·A,  m = 0 if A < 0 and (1/L)Σ_t log μ/π > δ, else 1;  ρ_t = π/π_old, δ = 0.1",
    source="DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv 2512.02556, §3.1), which states no δ",
    claims="failures that the policy would hardly produce any more teach nothing",
    known_false="which rollouts are left depends on the policy and on their rewards: what is lost has a sign",
    current=WHOLE,
    engine={"bandit": {"expected_reward@rollouts": 1.0}, "tokens": {"expected_reward@rollouts": 1.0}},
)
def off_policy_sequence_mask(logp, old_logp, rollout_logp, advantage, mask, delta=0.1):
    """Failures with a mean log-ratio above δ are left out. Ascends on-policy: ∇E[R]. (B, T) → (B,)."""
    far = of_tokens(rollout_logp - logp.detach(), mask) / lengths(mask) > delta
    kept = 1 - ((advantage < 0) & far).to(logp.dtype)
    return weighted(kept.unsqueeze(1), logp, old_logp, advantage, mask)


@policy_loss(
    "divergence-mask",
    formula="−Σ_t sg(m_t)·ρ_t·A,  m_t = 0 if |π − μ| > δ and A·(ρ_t − 1) > 0, else 1;  ρ_t = π/μ, δ = 0.05",
    source="Qi et al. 2026 (DPPO, arXiv 2602.04879), the mask by the total variation of token and rest",
    claims="a trust region in probabilities, not in ratios",
    known_false="the prefixes are the sampler's, and tokens beyond δ lose their gradient on one side alone",
    current=WHOLE,
    engine=SURROGATE,
)
def divergence_mask(logp, rollout_logp, advantage, mask, delta=0.05):
    """Tokens whose probability moved by more than δ, away from μ, are left out. (B, T) → (B,)."""
    away = advantage.unsqueeze(1) * (logp - rollout_logp).detach() > 0
    far = (logp.exp() - rollout_logp.exp()).detach().abs() > delta
    return weighted(1 - (away & far).to(logp.dtype), logp, rollout_logp, advantage, mask)

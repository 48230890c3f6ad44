"""KL703: the drawn token's log-prob under a distribution that was cut to its likeliest actions."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    from kltest.checks.approximations.approximations import accounts_for

    return accounts_for(row, findings, drawn=True) is not None


def tells(row: Row, findings: Findings) -> str:
    from kltest.checks.approximations.approximations import accounts_for

    seen = accounts_for(row, findings, drawn=True)
    return f"no named gradient; log-probs of drawn tokens are taken within {seen.words}" if seen else ""


def examine(findings: Findings) -> Found | None:
    from kltest.checks.approximations.approximations import beyond_the_usual_worlds

    return beyond_the_usual_worlds(findings, drawn=True)


def under_the_truncated_policy(logits, ref_logp, tokens):
    kept = logits >= logits.topk(2, dim=-1).values[..., -1:]
    log_probs = logits.where(kept, float("-inf")).log_softmax(-1)
    logp = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (logp.where(logp.isfinite(), ref_logp) - ref_logp).square() / 2


def under_the_whole_policy(logits, ref_logp, tokens):
    logp = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (logp - ref_logp).square() / 2


WORLD = SmallWorld(policy=[(0.5, 0.3, 0.2)], reference=[(0.3, 0.3, 0.4)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": under_the_truncated_policy, "mended": under_the_whole_policy})


CHECK = Check(
    code="KL703",
    name="truncated-sampler",
    title="The drawn token's log-prob is that of a truncated distribution",
    what=(
        "The policy's, the reference's or the sampler's distribution is cut to its k likeliest actions or to a "
        "nucleus, as an engine does that samples with top-k or top-p, before the drawn token's log-prob is taken; "
        "tokens outside have no say, and the gradient is not the declared one."
    ),
    why=(
        "A truncated log-prob is too large by the log of the mass that was kept, which differs from context to context "
        "and from policy to reference: the log-ratio is off by their difference, and what the policy does outside the "
        "cut is neither penalised nor seen."
    ),
    example=(
        "Three actions, π = (0.5, 0.3, 0.2), ref = (0.3, 0.3, 0.4); derivatives with respect to the logits. The "
        "truth is (0.197021, −0.035035, −0.161986); k2 under the policy cut to its two likeliest actions and "
        "renormalised gives (0.095780, −0.095780, 0)."
    ),
    fix=(
        "Recompute the log-probs of drawn tokens under the whole distribution, for policy, reference and sampler "
        "alike, and sample without top-k and top-p. Where rollouts must be truncated, no loss on drawn tokens can "
        "see what was cut off: apply the same cut to policy and reference, and declare that KL."
    ),
    sources=(
        "DeepSeek-V3.2, arXiv 2512.02556, §3.1",
        "Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, arXiv 1904.09751",
    ),
    wrong=under_the_truncated_policy,
    mended=under_the_whole_policy,
    demonstrate=demonstrate,
    options={"expect": "local_reverse_kl"},
    explains=explains,
    tells=tells,
    examine=examine,
)

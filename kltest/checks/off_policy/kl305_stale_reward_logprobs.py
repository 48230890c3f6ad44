"""KL305: the penalty in the reward was computed with the sampler's log-probs."""

from __future__ import annotations

from kltest.checks.losses import k1_as_reward_with_ratio
from kltest.counterexample.demonstration import Demonstration, of_gradients
from kltest.counterexample.environment import SmallEnvironment
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return row.identified is not None and row.identified.get("to_sampler_kl", 0.0) < 0


def moot(findings: Findings) -> str | None:
    return findings.why_not_stale()


def from_stale_logprobs(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1, keepdim=True).exp()
    return ratio * (old_logp - ref_logp)


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], sampler=[(0.6, 0.4)])


def demonstrate() -> Demonstration:
    return of_gradients(
        ENVIRONMENT,
        {"as written": from_stale_logprobs, "fixed": k1_as_reward_with_ratio},
        sampler="stale",
        call=lambda name: {"placement": "reward"},
    )

"""KL305: the penalty in the reward was computed with the sampler's log-probs."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import k1_as_reward_with_ratio
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return row.identified is not None and row.identified.get("to_sampler_kl", 0.0) < 0


def moot(findings: Findings) -> str | None:
    return findings.why_not_stale()


def from_stale_logprobs(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1, keepdim=True).exp()
    return ratio * (old_logp - ref_logp)


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], sampler=[(0.6, 0.4)])


def demonstrate() -> Demonstration:
    return of_gradients(
        WORLD,
        {"as written": from_stale_logprobs, "mended": k1_as_reward_with_ratio},
        sampler="stale",
        call=lambda name: {"placement": "reward"},
    )


CHECK = Check(
    code="KL305",
    name="stale-reward-logprobs",
    title="The penalty is computed from the sampler's log-probs, not the policy's",
    what=(
        "The expected gradient is the declared one minus ∇KL(π‖sampler): the log-ratio in the reward is log "
        "sampler − log ref."
    ),
    why=(
        "The reward was computed when the rollout was made and not renewed since. The penalty then leaves out "
        "how far the policy has moved away from the sampler, which is exactly what it should restrain."
    ),
    example=(
        "Two actions, sampler (0.6, 0.4), π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the "
        "first probability; the truth is ln 4 = 1.386294. With log sampler − log ref in the reward and the "
        "exact ratio the gradient is 1.386294 − 0.980829 = 0.405465."
    ),
    fix=(
        "Recompute the log-ratio with the current policy in every inner step, (logp − ref_logp).detach(), "
        "before it enters the reward; or penalise the sampler too, with log π − log sampler."
    ),
    sources=("Tang & Munos 2025, arXiv 2506.09477",),
    wrong=from_stale_logprobs,
    mended=k1_as_reward_with_ratio,
    demonstrate=demonstrate,
    options={"sampler": "both", "placement": "reward"},
    explains=explains,
    moot=moot,
)

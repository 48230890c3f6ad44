"""KL303: the token is re-weighted, its prefix is not."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import prefix_ratio
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return row.identified is not None and any(name.endswith("@sampler") for name in row.identified)


def moot(findings: Findings) -> str | None:
    if any(name.endswith("@sampler") for name in findings.expect):
        return "prefixes weighted by the sampler are what was declared"
    return findings.why_not_stale()


def own_ratio_only(logp, ref_logp, old_logp):
    ratio = (logp - old_logp).exp().detach()
    return ratio * (logp - ref_logp).square() / 2


WORLD = SmallWorld(
    policy=[(0.5, 0.5), (0.8, 0.2), (0.5, 0.5)],
    reference=[(0.5, 0.5)] * 3,
    sampler=[(0.8, 0.2), (0.8, 0.2), (0.5, 0.5)],
    length=2,
)


def demonstrate() -> Demonstration:
    return of_gradients(
        WORLD, {"as written": own_ratio_only, "mended": prefix_ratio}, declared="local_reverse_kl", sampler="stale"
    )


CHECK = Check(
    code="KL303",
    name="token-ratio-only",
    title="Only the token's own ratio: prefixes are still weighted by the sampler",
    what=(
        "Each token carries its own importance ratio, but the prefixes at which the divergence is taken are "
        "visited as the sampler visits them."
    ),
    why=(
        "Contexts that the policy now reaches more often than the sampler did are under-weighted, the others "
        "over-weighted, by a factor that grows with the length of the prefix."
    ),
    example=(
        "Two tokens of two actions. Root: π = (0.5, 0.5), sampler (0.8, 0.2). After the first action π = "
        "(0.8, 0.2) against ref = (0.5, 0.5). With respect to the first probability there, the truth is "
        "0.5·1.386294 = 0.693147; with token ratios it is 0.8·1.386294 = 1.109035."
    ),
    fix=(
        "Use the ratio of the whole prefix, detached; or declare what is followed: --expect local_reverse_kl@sampler."
    ),
    sources=(
        "Zhang et al. 2025, RPG, arXiv 2505.17508",
        "Tang & Munos 2025, arXiv 2506.09477",
    ),
    wrong=own_ratio_only,
    mended=prefix_ratio,
    demonstrate=demonstrate,
    options={"sampler": "both", "expect": "local_reverse_kl"},
    explains=explains,
    moot=moot,
)

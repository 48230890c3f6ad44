"""KL202: only the final token is penalised."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return row.identified is not None and set(row.identified) == {"last_token_reverse_kl"}


def moot(findings: Findings) -> str | None:
    if "last_token_reverse_kl" in findings.expect:
        return "the last token is what was declared"
    return "only worlds of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


def at_the_end(logp, ref_logp, mask):
    left = mask.flip(-1).cumsum(-1).flip(-1)
    last = (mask != 0) & (left == 1)
    return (logp - ref_logp).where(last, 0.0).square() / 2


WORLD = SmallWorld(policy=[(0.8, 0.2), (0.5, 0.5), (0.5, 0.5)], reference=[(0.5, 0.5)] * 3, length=2)


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": at_the_end, "mended": squared_sum})


CHECK = Check(
    code="KL202",
    name="last-token-only",
    title="Only the last live token is penalised",
    what="The expected gradient is that of the final live token of each rollout alone.",
    why="All earlier tokens are free: the policy can leave the reference anywhere but at the end.",
    example=(
        "Two tokens of two actions, π = (0.8, 0.2) at the root and equal to ref = (0.5, 0.5) afterwards. With "
        "respect to the root's first probability the truth is ln 4 = 1.386294; a penalty on the last token "
        "gives exactly 0."
    ),
    fix="Sum the log-ratio over all live tokens before it is used.",
    sources=("Tang & Munos 2025, arXiv 2506.09477",),
    wrong=at_the_end,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
    moot=moot,
)

"""KL201: only the token's own KL is differentiated."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row, local_form, proportion, without_sampler


def explains(row: Row, findings: Findings) -> bool:
    partial = local_form(row.expected)
    if partial == row.expected:
        return False
    return proportion(without_sampler(row.identified), partial) is not None


def moot(findings: Findings) -> str | None:
    plain = {name.removesuffix("@sampler"): coefficient for name, coefficient in findings.expect.items()}
    if local_form(plain) == plain:
        return "the declared target holds the prefixes fixed itself"
    return "only worlds of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


def token_by_token(logp, ref_logp):
    return (logp - ref_logp).square() / 2


WORLD = SmallWorld(
    policy=[(0.5, 0.5), (0.8, 0.2), (0.5, 0.5)],
    reference=[(0.5, 0.5)] * 3,
    length=2,
)


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": token_by_token, "mended": squared_sum})


CHECK = Check(
    code="KL201",
    name="partial-gradient",
    title="Only the partial gradient: what a token does to later tokens' KL is missing",
    what=(
        "The expected gradient is the local form of the declared one: each token's own divergence, with the "
        "prefix that led to it held fixed."
    ),
    why=(
        "A token also decides which contexts come next, and so how much divergence there will be. A per-token "
        "loss cannot see that. For more than one token the result is the gradient of no function at all."
    ),
    example=(
        "Two tokens of two actions. At the root π = ref = (0.5, 0.5); after the first action π = (0.8, 0.2) "
        "against ref = (0.5, 0.5), after the second they are equal. With respect to the root's first "
        "probability the truth is the difference in what follows, 0.192745; a token-level loss gives exactly 0."
    ),
    fix=(
        "Credit each token with the later log-ratios too: k1 in the reward with the whole return or the "
        "reward-to-go, or ½(Σ_t (logp − ref_logp))² over the whole sequence. If the token-level gradient is "
        "intended, declare it: --expect local_reverse_kl."
    ),
    sources=("Tang & Munos 2025, arXiv 2506.09477",),
    wrong=token_by_token,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
    moot=moot,
)

"""KL205: later log-ratios are credited with a factor."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    from kltest.checks.sequences.credit import credit

    return credit(row, findings) is not None


def tells(row: Row, findings: Findings) -> str:
    from kltest.checks.sequences.credit import credit

    return credit(row, findings) or ""


def moot(findings: Findings) -> str | None:
    if "reverse_kl" not in findings.expect:
        return "the declared target is not the sum over all later log-ratios"
    return "only worlds of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


def discounted(logp, ref_logp, mask):
    to_go = (logp - ref_logp).detach().where(mask != 0, 0.0)
    for step in reversed(range(to_go.shape[1] - 1)):
        to_go[:, step] += 0.95 * to_go[:, step + 1]
    return (logp * to_go).where(mask != 0, 0.0)


def undiscounted(logp, ref_logp, mask):
    to_go = (logp - ref_logp).detach().where(mask != 0, 0.0)
    for step in reversed(range(to_go.shape[1] - 1)):
        to_go[:, step] += to_go[:, step + 1]
    return (logp * to_go).where(mask != 0, 0.0)


WORLD = SmallWorld(
    policy=[(0.5, 0.5), (0.8, 0.2), (0.5, 0.5)],
    reference=[(0.5, 0.5)] * 3,
    length=2,
)


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": discounted, "mended": undiscounted})


CHECK = Check(
    code="KL205",
    name="discounted-credit",
    title="A token answers for later log-ratios with a factor only",
    what=(
        "The expected gradient is Σ_t g_t Σ_{s≥t} c·u_s with a factor c that is not the same for all later tokens: "
        "a discount γ^(s−t) (γ below 1, or the λ of generalised advantage estimation), a discount from the start "
        "γ^s, or a window after which credit is cut off."
    ),
    why=(
        "The KL of whole rollouts is a plain sum of log-ratios: a discount below 1 penalises what a token leads to "
        "less, the later the less. After 1/(1 − γ) tokens about a third of the credit is left, so that on long "
        "rollouts the gradient is little more than the partial one."
    ),
    example=(
        "Two tokens of two actions. At the root π = ref = (0.5, 0.5); after the first action π = (0.8, 0.2) "
        "against ref = (0.5, 0.5), after the second they are equal. With respect to the root's first "
        "probability the truth is the difference in what follows, 0.192745; discounted with γ = 0.95 it is "
        "0.95·0.192745 = 0.183108."
    ),
    fix=(
        "Take γ = 1 and λ = 1 for the KL term, whatever the task reward's advantages use: the undiscounted "
        "reward-to-go of logp − ref_logp, or ½(Σ_t (logp − ref_logp))²."
    ),
    sources=(
        "Schulman et al. 2016, Generalized Advantage Estimation, arXiv 1506.02438",
        "Tang & Munos 2025, arXiv 2506.09477",
    ),
    wrong=discounted,
    mended=undiscounted,
    demonstrate=demonstrate,
    explains=explains,
    tells=tells,
    moot=moot,
)

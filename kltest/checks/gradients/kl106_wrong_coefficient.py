"""KL106: the right direction with another size."""

from __future__ import annotations

from math import isclose

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row, local_form, proportion, without_sampler
from kltest.truth import render


def explains(row: Row, findings: Findings) -> bool:
    whole = proportion(row.identified, row.expected)
    if whole is not None:
        return whole > 0
    partial = proportion(without_sampler(row.identified), local_form(row.expected))
    return partial is not None and partial > 0 and abs(partial - 1) > 1e-6


def tells(row: Row, findings: Findings) -> str:
    """Of batches, once: how the factor depends on their size, where it does."""
    if (
        row.batch == 1
        or row.environment != findings.environments[0]
        or row.identified is None
        or row.method == "sampled"
    ):
        return ""
    from kltest.checks.groups.groups import share_by_size

    shares = share_by_size(row, findings)
    if not shares or isclose(shares[2], shares[3], rel_tol=1e-3):
        return ""
    sizes = " and ".join(f"{share:.4g} of it in batches of {size}" for size, share in shares.items())
    return f"{render(row.identified)}; in a bandit {sizes}, so that it is no constant but depends on the batch's size"


def without_the_half(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square()


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": without_the_half, "mended": squared_sum})


CHECK = Check(
    code="KL106",
    name="wrong-coefficient",
    title="The gradient is the declared one times a constant",
    what="The expected gradient is a positive multiple, other than 1, of the declared one.",
    why=(
        "The coefficient that is set is not the coefficient that is applied: β sweeps, published settings and "
        "comparisons with other code shift by that factor."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the first probability. "
        "The truth is ln 4 = 1.386294; k2 written without its ½, that is (logp − ref_logp)², gives 2.772589."
    ),
    fix="Divide by the factor that the report names, or declare it: --expect '2*reverse_kl'.",
    sources=("Schulman 2020, Approximating KL Divergence",),
    wrong=without_the_half,
    mended=squared_sum,
    demonstrate=demonstrate,
    explains=explains,
    tells=tells,
)

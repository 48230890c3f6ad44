"""KL603: the logged KL is changed after it was recorded."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.identify.findings import Findings


def moot(findings: Findings) -> str | None:
    from kltest.checks.logged_values import logged

    return logged.no_kl(findings)


def examine(findings: Findings) -> Found | None:
    from kltest.checks.logged_values import stored_metrics as recorded

    found = findings.once(recorded.mutation)
    return Found(found) if found else None


def scales_in_place(logp, ref_logp, mask, beta):
    cost = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).detach()
    metrics = {"kl": cost.detach()}
    cost *= beta
    return cost * logp.where(mask != 0, 0.0).sum(-1), metrics


def scales_a_copy(logp, ref_logp, mask, beta):
    cost = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).detach()
    metrics = {"kl": cost.clone()}
    cost *= beta
    return cost * logp.where(mask != 0, 0.0).sum(-1), metrics


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    from kltest.checks.logged_values import logged

    return logged.demonstrate(WORLD, {"as written": scales_in_place, "mended": scales_a_copy}, beta=0.1)


CHECK = Check(
    code="KL603",
    name="metric-mutated",
    title="The logged KL is changed after it was recorded",
    what=(
        "The tensor that is logged shares its memory with one that is changed in place later: within the loss, by the "
        "backward pass, or by the next call. What is read from it is not what was recorded."
    ),
    why=(
        "`kl.detach()` is no copy: it is a second name for the same numbers. An in-place multiplication by β, a "
        "mask or an advantage afterwards changes the metric without a word, and neither the loss nor its gradient "
        "shows it."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5), β = 0.1. KL(π‖ref) = 0.192745 is what was recorded; after "
        "`cost *= beta` the same tensor reads 0.019274."
    ),
    fix="Record a number or a copy (`kl.detach().clone()`, `kl.mean().item()`), or do not work in place.",
    sources=("slime #2114",),
    wrong=scales_in_place,
    mended=scales_a_copy,
    demonstrate=demonstrate,
    examine=examine,
    moot=moot,
)

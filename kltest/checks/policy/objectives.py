"""What a policy part follows beside ∇E[R]: multiples that move with the success rate, and gradients of no function."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kltest.checks.batches import limit, nearest_multiple, norm
from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.identify.findings import Findings, Row, shared
from kltest.truth import gradient
from kltest.truth.utilities import group_weight

# Step of a difference quotient of the expected gradient at the logits, and directions that are tried.
STEP, PAIRS = 1e-4, 2
# Asymmetry from which on there is no function: differences leave 1e-7.
ASYMMETRIC = 1e-4
# Relative distance to a closed form: a small constant beside a standard deviation is no other form.
CLOSED = 1e-3
FORMS = {
    None: "(n − 1)/n of the plain reward: advantages are centred by a mean that holds the rollout itself",
    0: "the gradient of a utility of the success rate, as advantages over their standard deviation follow it",
    1: "the gradient of a utility of the success rate, as advantages over their standard deviation (n − 1) follow it",
}


def multiples(row: Row, findings: Findings) -> list[tuple[float, float]] | None:
    """Return (success rate, c) for each instance of a row that follows c·∇E[R] there; None if one does not."""
    found = []
    for followed, instance in zip(row.gradients, row.case.instances, strict=bool(row.gradients)):
        wanted = gradient("expected_reward", instance)
        share = nearest_multiple(followed, wanted)
        if norm(followed - share * wanted) > limit(findings) * norm(followed):
            return None
        found.append((_rate(instance), share))
    return found or None


def open_field(row: Row, findings: Findings) -> bool:
    """Return True if a row has no name and is no multiple of ∇E[R] either, so that its Jacobian has to tell."""
    return row.identified is None and row.method == "exact" and multiples(row, findings) is None


def closed_form(row: Row, rates: list[tuple[float, float]]) -> str:
    """Return in words the closed form in the success rate p that the multiples of a group have, or ""."""
    for deviation, words in FORMS.items() if row.batch > 1 else ():
        wanted = [group_weight(rate, row.batch, deviation=deviation) for rate, _ in rates]
        if np.allclose([share for _, share in rates], wanted, rtol=CLOSED):
            return words
    return ""


def asymmetry(findings: Findings, row: Row) -> float:
    """Return about ‖J − Jᵀ‖/‖J‖ of the Jacobian J of what a row follows, 0 for the gradient of a function.

    Two pairs of random directions v, w: E(vᵀJw − wᵀJv)² = ‖J − Jᵀ‖² and E‖Jw‖² = ‖J‖².
    """
    return _asymmetry(findings, row.environment, row.sampler, row.batch)


@shared
def _asymmetry(findings: Findings, environment: str, sampler: str, batch: int) -> float:
    row = next(r for r in findings.rows if (r.environment, r.sampler, r.batch) == (environment, sampler, batch))
    instance, generator = row.case.instances[0], np.random.default_rng(0)
    ways = generator.standard_normal((2 * PAIRS, *instance.policy.shape))
    moved = [instance.policy + sign * STEP * way for way in ways for sign in (1, -1)]
    found = np.array(findings.measure.gradients(row, [replace(instance, policy=table(each)) for each in moved]))
    along = (found[::2] - found[1::2]) / (2 * STEP)
    inner = np.einsum("icv,jcv->ij", ways, along)
    crossed = [inner[one, one + 1] - inner[one + 1, one] for one in range(0, 2 * PAIRS, 2)]
    return float(np.sqrt(np.mean(np.square(crossed)) / max((along**2).sum() / len(along), np.finfo(float).tiny)))


def _rate(instance: Instance) -> float:
    return float(instance.environment.prompts @ instance.environment.expected_returns(instance.policy))


def told(rates: list[tuple[float, float]]) -> Iterator[str]:
    """Yield the multiples in words, by the success rate."""
    for rate, share in sorted(rates):
        yield f"{share:.4g} at E[R] = {rate:.3g}"

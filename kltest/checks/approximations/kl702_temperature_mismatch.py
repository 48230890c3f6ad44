"""KL702: log-probs at a temperature that the tokens were not drawn at."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    from kltest.checks.approximations.temperature import accounts_for

    return accounts_for(row, findings) is not None


def tells(row: Row, findings: Findings) -> str:
    from kltest.checks.approximations.temperature import accounts_for

    found = accounts_for(row, findings)
    return found.words if found else ""


def at_a_temperature(logits, ref_logits):
    log_probs = (logits / 0.5).log_softmax(-1)
    return (log_probs.exp() * (log_probs - ref_logits)).sum(-1)


def as_drawn(logits, ref_logits):
    return (logits.exp() * (logits - ref_logits)).sum(-1)


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": at_a_temperature, "mended": as_drawn})


CHECK = Check(
    code="KL702",
    name="temperature-mismatch",
    title="Log-probs are taken at another temperature than the tokens are drawn at",
    what=(
        "The policy's, the reference's or the sampler's log-probs are divided by a temperature inside the loss; "
        "with the division undone the gradient has a name, or it vanishes where the reference is the policy at "
        "that temperature and not where the two are equal."
    ),
    why=(
        "Tokens and log-probs must belong to one distribution. A temperature on one side only makes the policy's own "
        "tempered version the target, so that the penalty changes the policy's entropy even where it equals the "
        "reference; one on both sides is another divergence at contexts that the policy visits untempered."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the first probability. The truth "
        "is ln 4 = 1.386294. With the policy's logits divided by 0.5 it is compared as (16/17, 1/17), and the gradient "
        "is 2·(16/289)·ln 16/0.16 = 1.918747."
    ),
    fix=(
        "Compute all log-probs at the temperature at which rollouts are drawn, for policy, reference and sampler "
        "alike; if that is not 1, hand the tempered log-probs to the loss and do not divide in it once more."
    ),
    sources=(
        "Tang & Munos 2025, arXiv 2506.09477",
        "Schulman 2020, Approximating KL Divergence",
    ),
    wrong=at_a_temperature,
    mended=as_drawn,
    demonstrate=demonstrate,
    options={"expect": "local_reverse_kl"},
    explains=explains,
    tells=tells,
)

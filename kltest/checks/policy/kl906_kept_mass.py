"""KL906: a ratio to a truncated sampler's renormalised log-probs multiplies the gradient by the kept mass."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kltest.checks.batches import apart, limit
from kltest.checks.demonstrations import Demonstration
from kltest.environments import Instance, bandit
from kltest.environments.samplers import drawn_by, kept_mass
from kltest.identify.findings import Findings, Row
from kltest.identify.parts import ascent
from kltest.loss.calling import bind
from kltest.moments import exact
from kltest.samplers import TRUNCATED
from kltest.truth import gradient

CUT = "truncated:k=2"


def explains(row: Row, findings: Findings) -> str | None:
    """Give the kept mass where a row changes once the engine tells the log-probs from before the cut."""
    if not row.sampler.startswith(TRUNCATED) or row.batch > 1 or not row.gradients:
        return None
    instance = row.case.instances[0]
    uncut = findings.measure.gradient_of(findings.loss, replace(instance, engine=instance.policy), row.sampler)
    if apart(row.gradients[0], uncut) <= limit(findings):
        return None
    token, rollout = kept_mass(instance)
    return (
        f"ratios to renormalised log-probs weigh tokens by a kept mass of {token:.2g} and more ({rollout:.2g} overall)"
    )


def demonstrate(losses: Mapping[str, Callable[..., Any]]) -> Demonstration:
    """One token of three actions, of which the sampler keeps two."""
    policy = np.log([[0.5, 0.3, 0.2]])
    whole = Instance.of(bandit(3, reward=np.array([[1.0, 0.0, 0.0]])), policy, policy)
    (instance,) = drawn_by(CUT, [whole])
    found = [gradient("expected_reward@rollouts", instance)]
    found += [exact(ascent(bind(one), "policy", seed=0), instance, CUT).gradient for one in losses.values()]
    setting = "π = (0.5, 0.3, 0.2), of which the sampler keeps 0.8; reward 1 for the first; derivatives at the logits"
    cells: list[tuple[str | float, ...]] = [
        (f"∂/∂θ({action})", *(float(each[0, action]) for each in found)) for action in range(3)
    ]
    return Demonstration(setting, ("", "without the cut", *losses), cells)


def with_the_ratio(logp, rollout_logp, advantage, mask):
    live = mask != 0
    weight = (logp - rollout_logp).where(live, 0.0).sum(-1).exp()
    return -weight.detach() * advantage * logp.where(live, 0.0).sum(-1)


def without_it(logp, advantage, mask):
    return -advantage * logp.where(mask != 0, 0.0).sum(-1)

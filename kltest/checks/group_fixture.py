"""Group fixture: groups of rollouts with chosen rewards, and the KL part of the gradient that a loss gives them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kltest.checks.check import shared
from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.identify.measure import Measure
from kltest.moments.batch_calls import centred
from kltest.moments.differentiate import RowGradients
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout

SIZES = (4, 3, 2)


@dataclass(frozen=True)
class GroupFixture:
    """Groups of `size` rollouts of one instance, and the service that calls the loss with them."""

    measure: Measure
    instance: Instance
    size: int
    padding: int = 0
    sampler: str = "current"

    @property
    def different(self) -> np.ndarray:
        """(size,) rollouts of one prompt, as different as there are."""
        mine = np.flatnonzero(self.instance.paths.prompt == self.instance.paths.prompt[0])
        return np.resize(np.unique(np.linspace(0, len(mine) - 1, self.size).round().astype(int)), self.size)

    @property
    def untied(self) -> list[float]:
        """Rewards 1 and 0 in turn."""
        return [float(place % 2 == 0) for place in range(self.size)]

    def rollout(
        self, rows: Sequence[int] | np.ndarray, rewards: Sequence[float], groups: Sequence[int] = ()
    ) -> Rollout:
        """Rollouts `rows` with these rewards and centred advantages, in one group or in the given ones."""
        taken = Rollout.of(self.instance, sampler=self.sampler, padding=self.padding).take(rows)
        group = torch.tensor(list(groups) or [0] * len(rewards))
        return with_advantage(taken.replace(reward=torch.tensor(rewards, dtype=torch.float64), group=group))

    def kl_part(self, rollout: Rollout) -> np.ndarray:
        """(B, T, 1 + V) gradient of the KL term at logp and logits.

        For a loss that takes β it is the part that β multiplies. For any other it is the change of the gradient from a
        reference that equals the policy to the actual one.
        """
        own = gradient(self.measure, rollout)
        if self.measure.loss.takes_beta:
            return own
        return own - gradient(self.measure, rollout.near_reference())


def with_advantage(rollout: Rollout) -> Rollout:
    """The rollouts with their reward, centred in each group, as advantage."""
    return rollout.replace(advantage=lambda: centred(rollout))


@shared
def group_fixture(findings: Findings) -> GroupFixture:
    """Fixture of the first graded environment, with groups as large as the loss takes."""
    sizes, failure = findings.measure.sizes, None
    for size in sizes.each if sizes.grouped else SIZES:
        instance = instances(findings.environments[0], findings.seed, size)[0]
        fixture = GroupFixture(findings.measure, instance, size, findings.seed)
        try:
            gradient(findings.measure, fixture.rollout(fixture.different, fixture.untied))
        except KltestError as error:
            failure = failure or error
            continue
        return fixture
    assert failure is not None
    raise failure


def gradient(measure: Measure, rollout: Rollout) -> np.ndarray:
    """(B, T, 1 + V) gradient at logp and logits, zero at padded positions and for leaves that are not used."""
    return as_array(measure.differentiate(rollout), rollout)


def as_array(found: RowGradients, rollout: Rollout) -> np.ndarray:
    """(B, T, 1 + V) gradients at logp and logits in one array."""
    joint = np.zeros((*rollout.peek("mask").shape, 1 + rollout.peek("ref_logits").shape[-1]))
    if found.logp is not None:
        joint[..., 0] = found.logp
    if found.logits is not None:
        joint[..., 1:] = found.logits
    return joint


def sees_rewards(findings: Findings) -> bool:
    """Return True if the loss reads rewards or advantages."""
    return bool(findings.observed.uses & {"reward", "advantage"})


def limit(findings: Findings) -> float:
    """Relative distance up to which gradients count as equal at the loss's precision."""
    return TOLERANCES[findings.observed.dtype].groups


def norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array))

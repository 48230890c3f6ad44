"""What experiments on groups work with: a group of rollouts, its rewards exchanged, and the gradient that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.loss.outcome import Loss
from kltest.moments.batches import centred
from kltest.moments.differentiate import RowGradients, differentiate, live_positions
from kltest.rollout import Rollout

SIZES = (4, 3, 2)
# Two gradients that should be one differ by rounding, relative to the larger; effects are far above it.
SAME = {"float64": 1e-9, "float32": 1e-4}
HALF_PRECISION = 5e-2


@dataclass(frozen=True)
class Bench:
    """Groups of `size` rollouts of one world, as one loss sees them."""

    loss: Loss
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
        """Rewards of 1 and 0 by turns."""
        return [float(place % 2 == 0) for place in range(self.size)]

    def rollout(
        self, rows: Sequence[int] | np.ndarray, rewards: Sequence[float], groups: Sequence[int] = ()
    ) -> Rollout:
        """These rollouts with these rewards, centred as advantages: of one group, or of the groups given."""
        taken = Rollout.of(self.instance, sampler=self.sampler, padding=self.padding).take(rows)
        group = torch.tensor(list(groups) or [0] * len(rewards))
        known = taken.replace(reward=torch.tensor(rewards, dtype=torch.float64), group=group)
        return known.replace(advantage=lambda: centred(known))

    def kl_part(self, rollout: Rollout) -> np.ndarray:
        """(B, T, 1 + V) the gradient that is there because of the KL term, at logp and logits.

        Of a loss that takes β it is what β multiplies; of any other, what changes with the reference, which is compared
        with one that equals the policy.
        """
        own = gradient(self.loss, rollout)
        if self.loss.takes_beta:
            return own
        equal = {f"ref_{name}": rollout.peek(name).detach() for name in ("logp", "logits")}
        return own - gradient(self.loss, rollout.replace(**equal))


def bench(findings: Findings) -> Bench:
    """The bench of the first world that was asked for, with groups as large as the loss takes."""
    return findings.once(_bench)


def _bench(findings: Findings) -> Bench:
    sizes, failure = findings.measure.sizes, None
    for size in sizes.each if sizes.grouped else SIZES:
        place = Bench(findings.loss, instances(findings.environments[0], findings.seed, size)[0], size, findings.seed)
        try:
            gradient(findings.loss, place.rollout(place.different, place.untied))
        except KltestError as error:
            failure = failure or error
            continue
        return place
    assert failure is not None
    raise failure


def called(loss: Loss, rollout: Rollout) -> RowGradients:
    """A loss on a batch, and its gradients."""
    return differentiate(loss, rollout.replace(), live_positions(rollout))


def gradient(loss: Loss, rollout: Rollout) -> np.ndarray:
    """(B, T, 1 + V) the gradient at logp and logits, zero where there is none and where padded."""
    return as_array(called(loss, rollout), rollout)


def as_array(found: RowGradients, rollout: Rollout) -> np.ndarray:
    """(B, T, 1 + V) gradients at logp and logits in one array."""
    joint = np.zeros((*rollout.peek("mask").shape, 1 + rollout.peek("ref_logits").shape[-1]))
    if found.logp is not None:
        joint[..., 0] = found.logp
    if found.logits is not None:
        joint[..., 1:] = found.logits
    return joint


def limit(findings: Findings) -> float:
    """How far equal gradients may be apart, relative to their size, at the loss's precision."""
    return SAME.get(findings.observed.dtype, HALF_PRECISION)


def norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array))

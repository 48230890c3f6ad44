"""Batches on which checks try a loss, and gradients there.

Batches: the usual one, groups with chosen rewards, batches of two and of three, rollouts with chosen log-ratios.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.case import target
from kltest.identify.findings import Findings, Row, shared
from kltest.identify.instances import instances
from kltest.identify.measure import Measure
from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.moments.caller import centred
from kltest.moments.differentiate import RowGradients, differentiate, live_positions
from kltest.moments.tolerances import TOLERANCES, Tolerances
from kltest.rollout import LEAVES, Rollout

# Fields that hold log-probs.
LOG_PROBS = tuple(f"{whose}{what}" for whose in ("", "ref_", "old_") for what in LEAVES)
# Tokens of rollouts with chosen log-ratios, the log-prob of the likelier of policy and reference, and log-ratios of the
# mild rollouts beside them.
LENGTH, LIKELY, MILD = 3, -0.5, (0.3, -0.4, 0.2, -0.1, 0.4, -0.2)
# Rollouts of the usual batch; sizes of groups, tried in this order; sizes at which shares are compared.
ROWS = 12
SIZES = (4, 3, 2)
PAIR_AND_TRIPLE = (2, 3)
ANOTHER = "the gradient is another one"


def no_padding(findings: Findings) -> str | None:
    """Return a reason to skip checks of padding if no graded environment has any, else None."""
    padded = any(instances(environment, findings.seed)[0].paths.padded for environment in findings.environments)
    return None if padded else "only environments without padding were graded"


def usual_batch(findings: Findings, sampler: str = "") -> Rollout:
    """Rollouts of every length with different rewards; groups of two, three, four or six divide their number."""
    return _usual(findings, sampler or sampler_taken(findings), rows_taken(findings))


def _usual(findings: Findings, sampler: str, many: int) -> Rollout:
    instance = instances("ragged", findings.seed)[0]
    rows = np.sort(instance.paths.by_length[:many])
    return Rollout.of(instance, sampler=sampler, padding=findings.seed, centre="batch").take(rows)


@shared
def sampler_taken(findings: Findings) -> str:
    """Sampler of the usual batch: the stale one, unless it was not graded and the loss refuses it."""
    for sampler in ("stale", "current") if "stale" not in findings.samplers else ():
        with suppress(KltestError):
            findings.measure.experiment().call(_usual(findings, sampler, ROWS))
            return sampler
    return "stale"


@shared
def rows_taken(findings: Findings) -> int:
    """Rows of the usual batch: as many as in the graded batches, or fewer, if the loss takes no other."""
    graded = max((row.batch for row in findings.rows), default=1)
    fewer = [graded] if graded > 1 else [ROWS // 2, ROWS // 3, ROWS // 6]
    for many in (ROWS, *fewer):
        with suppress(KltestError):
            findings.measure.experiment().call(_usual(findings, sampler_taken(findings), many))
            return many
    return graded if graded > 1 else ROWS


def single_tokens(findings: Findings) -> Rollout:
    """As many rollouts of one token, in a batch of one column."""
    instance = instances("bandit", findings.seed)[0]
    rows = [row % len(instance.paths.mask) for row in range(ROWS)]
    return of_instance(findings, instance).take(rows)


def of_instance(findings: Findings, instance: Instance) -> Rollout:
    """All rollouts of an instance, with advantages centred by the batch's mean."""
    return Rollout.of(instance, sampler=sampler_taken(findings), padding=findings.seed, centre="batch")


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
    for size in sizes.each if sizes.grouped or sizes.requested else SIZES:
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


def gradient_of(loss: Loss, rollout: Rollout) -> np.ndarray:
    """(B, T, 1 + V) gradient of a variant of the loss."""
    return as_array(differentiate(loss, rollout.replace(), live_positions(rollout)), rollout)


def gradient_given(measure: Measure, name: str, value: object, rollout: Rollout) -> np.ndarray:
    """(B, T, 1 + V) gradient with a value for one of the loss's parameters."""
    return gradient_of(measure.loss.with_value(name, value), rollout)


def gradient_of_times(measure: Measure, factor: float, rollout: Rollout) -> np.ndarray:
    """(B, T, 1 + V) gradient of a multiple of the loss, which reaches its backward pass from above."""
    return _gradient_of_objective(measure, rollout, lambda loss, own: factor * own)


def gradient_beside(measure: Measure, rollout: Rollout, other: Rollout) -> np.ndarray:
    """(B, T, 1 + V) gradient of one call, if the loss of a second one is added before the backward pass."""
    return _gradient_of_objective(measure, rollout, lambda loss, own: own + loss(other).objective)


def _gradient_of_objective(measure: Measure, rollout: Rollout, changed: Callable[[Loss, Tensor], Tensor]) -> np.ndarray:
    """(B, T, 1 + V) gradient of what is made of the objective of one call, and perhaps of further calls."""
    loss = measure.experiment().loss

    def call(one: Rollout) -> Outcome:
        outcome = loss(one)
        return replace(outcome, objective=changed(loss, outcome.objective), rows=None, returned="scalar")

    return gradient_of(loss.changed(instead=call), rollout)


def moves(measure: Measure, one: Rollout, other: Rollout) -> bool:
    """Return True if the gradient of a batch is not that of another, by more than rounding."""
    before, after = measure.differentiate(one), measure.differentiate(other)
    return apart(as_array(after, other), as_array(before, one)) > TOLERANCES[before.dtype].groups


def as_array(found: RowGradients, rollout: Rollout) -> np.ndarray:
    """(B, T, 1 + V) gradients at logp and logits in one array."""
    joint = np.zeros((*rollout.peek("mask").shape, 1 + rollout.peek("ref_logits").shape[-1]))
    if found.logp is not None:
        joint[..., 0] = found.logp
    if found.logits is not None:
        joint[..., 1:] = found.logits
    return joint


def limit(findings: Findings) -> float:
    """Relative distance up to which gradients count as equal at the loss's precision."""
    return TOLERANCES[findings.observed.dtype].groups


def noticeable(findings: Findings) -> float:
    """Relative distance of two gradients that neither rounding nor a small constant in a denominator makes."""
    return max(Tolerances.guard, limit(findings))


def evenly(rows: np.ndarray, many: int) -> np.ndarray:
    """Return some of the rows at equal distances, the first and the last among them."""
    return rows[np.linspace(0, len(rows) - 1, many).round().astype(int)]


def lost_tokens(usual: np.ndarray, changed: np.ndarray) -> str:
    """Say how many tokens fewer than usually have a gradient (B, T, 1 + V); "" if none."""
    before, after = (int(each.any(axis=-1).sum()) for each in (usual, changed))
    return f"{before - after} of {before} tokens have no gradient" if after < before else ""


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """Distance of two gradients, relative to the second."""
    return norm(found - wanted) / (norm(wanted) or 1.0)


def nearest_multiple(found: np.ndarray, wanted: np.ndarray) -> float:
    """The c of the multiple c·wanted that is nearest to a gradient, 0 if that is zero."""
    return float((found * wanted).sum() / ((wanted**2).sum() or 1.0))


def norm(array: np.ndarray) -> float:
    """Euclidean norm over all entries."""
    return float(np.linalg.norm(array))


def share_by_size(row: Row, findings: Findings) -> dict[int, float]:
    """Share of the declared gradient that is left in batches of two and of three, in a bandit.

    A baseline that contains the rollout and a divisor that is taken twice both leave one half of it in batches of two;
    in batches of three the first leaves two thirds and the second one third. Empty if the loss takes no batch of one
    of these sizes.
    """
    shares = {}
    for size in PAIR_AND_TRIPLE:
        instance = instances("bandit", findings.seed, size if findings.measure.sizes.grouped else None)[0]
        wanted = target(findings.expect, instance, row.sampler)
        try:
            found = findings.measure.expected(replace(row, batch=size), instance).gradient
        except KltestError:
            return {}
        if not wanted.any():
            return {}
        shares[size] = nearest_multiple(found, wanted)
    return shares


def companions(findings: Findings) -> int:
    """Number of mild rollouts that, with one more, make two groups of the size that the loss is graded with.

    They make one batch if it takes no other.
    """
    if (taken := rows_taken(findings)) < ROWS:
        return taken - 1
    size = findings.measure.sizes.each[0] if findings.measure.sizes.grouped else 2
    return 2 * size - 1


def batch_of(log_ratios: list[float], companions: int, *, length: int) -> Rollout:
    """One rollout of `length` tokens for each log-ratio, which all its tokens have, then `companions` mild ones.

    Every log-prob is at most 0, rows of logits are normalised, and the sampler is the policy, so that importance ratios
    are 1 and only u = logp − ref_logp is extreme. The mild rollouts are there for losses that couple rollouts.
    """
    live = (np.arange(LENGTH) < length).astype(float)
    u = torch.from_numpy(np.concatenate([np.outer(log_ratios, live), np.resize(MILD, (companions, LENGTH))]))
    mask = torch.ones_like(u)
    mask[: len(log_ratios)] = torch.from_numpy(live)
    # With the likelier of the two at −1/2 the other one's log-prob is legal.
    logp, ref_logp = LIKELY + u.clamp(max=0.0), LIKELY - u.clamp(min=0.0)
    rows = torch.arange(len(u))
    logits = _logits(logp, (0.5, 0.3, 0.2))
    return with_advantage(
        Rollout(
            {
                "logp": logp,
                "ref_logp": ref_logp,
                "old_logp": logp.clone(),
                "mask": mask,
                "tokens": torch.ones(u.shape, dtype=torch.int64),
                "logits": logits,
                "ref_logits": _logits(ref_logp, (0.2, 0.3, 0.5)),
                "old_logits": logits.clone(),
                "reward": (rows % 2).double(),
                "group": rows // ((companions + 1) // 2),
            }
        )
    )


def _logits(logp: Tensor, others: tuple[float, ...]) -> Tensor:
    """(B, T, V) normalised rows in which token 1 has this log-prob and the others share the rest."""
    left = torch.log(-torch.expm1(logp))[..., None] + torch.tensor(others, dtype=torch.float64).log()
    return torch.cat([left[..., :1], logp[..., None], left[..., 1:]], dim=-1)


def with_gradient(loss: Loss, added: Callable[[Rollout], Mapping[str, Tensor]]) -> Loss:
    """Return a loss whose policy gets a further gradient at its leaves."""

    def call(rollout: Rollout) -> Outcome:
        outcome = loss(rollout)
        extra = [(rollout.peek(name) * part).sum() for name, part in added(rollout).items()]
        return replace(outcome, objective=outcome.objective + sum(extra), rows=None, returned="scalar")

    return loss.changed(instead=call)

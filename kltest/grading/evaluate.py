"""One row of a report: the exact expected gradient of a loss in one world, identified and compared with the target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from kltest.environments import Instance
from kltest.errors import KltestError, TargetError, WorldError
from kltest.grading.findings import Combination, Row
from kltest.grading.identify import Identification, identify, tolerance
from kltest.grading.probes import Probes
from kltest.grading.values import value_row
from kltest.grading.worlds import instances
from kltest.moments import BatchOfOneError, Moments, exact, exact_batches
from kltest.rollout import LEAVES, Rollout
from kltest.targets.outcome import Loss
from kltest.truth import ATLAS, combine, gradient, gradient_again

# Without a size that was asked for: the smallest batch that the loss accepts, the largest group up to the usual one.
BATCHES = (2, 4, 8)
GROUPS = (4, 3, 2)
# Batches are called one by one, about half a millisecond each: up to a second an instance, up to a few if that is the
# only size that the loss takes or the one that was asked for.
FEW_BATCHES, MOST_BATCHES = 1_000, 5_000
GROUP_FIELDS = frozenset({"reward", "advantage", "group"})
# Beyond this the last digits are not rounding any more.
ALMOST = 1e-9
# A target that is smaller than this share of its terms is zero up to rounding.
CANCELS = 1e-12
# The two routes to one number differ by rounding only; anything more is a defect of kltest's.
ROUTES_AGREE = 1e-9
LOWEST_FIRST = ("float16", "bfloat16", "float32", "float64")


class DisagreementError(KltestError):
    """Two independent routes to one exact number differ: a defect of kltest, not of the loss."""


class Evaluator:
    """Measures a loss in one world after another; `reduction`, `dtype`, `blocked` and `notes` collect what it saw."""

    def __init__(
        self,
        loss: Loss,
        declared: Combination,
        uses: frozenset[str],
        *,
        seed: int = 0,
        group_size: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.loss = loss
        self.declared = declared
        self.seed = seed
        self.grouped = bool(uses & GROUP_FIELDS) and batch_size is None
        asked = group_size if self.grouped else batch_size
        sizes = (asked,) if asked else GROUPS if self.grouped else BATCHES
        self.plans = [(size, FEW_BATCHES) for size in sizes] * (not asked) + [(sizes[0], MOST_BATCHES)]
        self.reductions: list[str] = []
        self.dtype = "float64"
        self.reached: list[bool] = []
        self.notes: list[str] = []
        self.coupled_in: set[str] = set()
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self._gradients: dict[tuple[str, str, int], list[np.ndarray]] = {}
        self.probes = Probes(loss, lambda environment: instances(environment, seed)[0], self.meets, padding=seed)

    @property
    def reduction(self) -> str:
        """The one reduction that fits all worlds: at a fixed length a token-mean looks like a mean, and is not one."""
        return "coupled" if "coupled" in self.reductions else (self.reductions or ["mean"])[-1]

    @property
    def blocked(self) -> bool:
        """Whether no gradient reached the policy in any world that was measured."""
        return bool(self.reached) and not any(self.reached)

    @property
    def measured(self) -> list[Row]:
        """Every row so far, those that were only looked at for comparison included."""
        return [row for rows in self._rows.values() for row in rows]

    def rows(self, environment: str, sampler: str) -> list[Row]:
        """The row of batches of one; where the loss couples the rows of a batch, that of larger batches as well."""
        key = (environment, sampler)
        if key not in self._rows:
            self._rows[key] = self._measure(environment, sampler)
        return self._rows[key]

    def gradients(self, row: Row) -> list[np.ndarray]:
        """(C, V) the expected gradient of a measured row on each instance of its world; none where there was no row."""
        return self._gradients.get((row.environment, row.sampler, row.batch), [])

    def meets(self, loss: Loss, instance: Instance) -> bool:
        """Whether a loss's expected gradient under the instance's stale sampler is the declared one."""
        found = exact(loss, instance, "stale", padding=self.seed)
        return _bias(found.gradient, _target(self.declared, instance), instance) <= tolerance(found.dtype)

    def _measure(self, environment: str, sampler: str) -> list[Row]:
        drawn = instances(environment, self.seed)
        rows = []
        coupling = ""
        try:
            found = [exact(self.loss, instance, sampler, padding=self.seed) for instance in drawn]
            self._note(found)
            rows.append(self._row(environment, sampler, drawn, found))
            coupling = next((moments.coupling for moments in found if moments.reduction == "coupled"), "")
        except BatchOfOneError as error:
            coupling = str(error)
        if not coupling:
            return rows
        self.coupled_in.add(environment)
        note = f"The loss couples the rows of a batch: {coupling}."
        self.notes += [note] * (note not in self.notes)
        batched = self._batched(environment, sampler, drawn)
        # A baseline taken from the batch itself leaves nothing of a batch of one: that says nothing of larger ones.
        nothing = [row for row in rows if row.identified == {"zero": 1.0} != batched.identified]
        return [row for row in rows if row not in nothing] + [batched]

    def _batched(self, environment: str, sampler: str, drawn: Sequence[Instance]) -> Row:
        failure: KltestError | None = None
        for size, most in self.plans:
            try:
                found = [self._over_batches(instance, sampler, size, most) for instance in drawn]
            except (WorldError, TargetError) as error:
                failure = error
                continue
            self._note(found)
            self.reductions.append("coupled")
            note = "whole groups of one prompt" if self.grouped else ""
            return self._row(environment, sampler, drawn, found, note=note)
        if isinstance(failure, TargetError):
            raise failure
        return self._not_judged(environment, sampler, drawn, self.plans[-1][0], str(failure))

    def _over_batches(self, instance: Instance, sampler: str, size: int, most: int) -> Moments:
        return exact_batches(self.loss, instance, sampler, size, grouped=self.grouped, padding=self.seed, most=most)

    def _note(self, found: list[Moments]) -> None:
        self.reductions += [moments.reduction for moments in found]
        self.dtype = min([self.dtype, *(moments.dtype for moments in found)], key=LOWEST_FIRST.index)
        self.reached += [bool(moments.leaves) for moments in found]

    def _row(
        self, environment: str, sampler: str, drawn: Sequence[Instance], found: list[Moments], *, note: str = ""
    ) -> Row:
        dtype = min((moments.dtype for moments in found), key=LOWEST_FIRST.index)
        gradients = [moments.gradient for moments in found]
        self._gradients[environment, sampler, found[0].batch] = gradients
        targets = [_target(self.declared, instance) for instance in drawn]
        candidates = _candidates(environment, sampler, self.seed)
        magnitudes = [float(np.sqrt(moments.second_moment)) for moments in found]
        identification = identify(
            gradients, candidates, magnitudes=magnitudes, units=[_size(i) for i in drawn], dtype=dtype
        )
        bias = max(_bias(*triple) for triple in zip(gradients, targets, drawn, strict=True))
        agrees: bool | None = bias <= tolerance(dtype)
        if not agrees and found[0].batch == 1:
            self._check_by_second_route(sampler, drawn, found, targets)
        spec = self.loss.spec
        if spec is not None and spec.off_policy_only and sampler == "current":
            agrees, note = None, "means something only when the sampler is not the policy"
        elif agrees and dtype == "float64" and bias > ALMOST:
            note = f"to {bias:.1g} of it only, as with a small constant in a denominator"
        reported = [moments.metric or moments.value for moments in found]
        values = [expectation for expectation in reported if expectation is not None]
        return Row(
            environment,
            sampler,
            identification.combination,
            expected=_spelt(self.declared, environment, sampler, self.seed),
            agrees=agrees,
            relative_bias=bias,
            cosine=_worst_cosine(gradients, targets, identification),
            residual=identification.residual,
            relative_variance=max(m.variance / _size(i) ** 2 for m, i in zip(found, drawn, strict=True)),
            method="exact",
            instances=len(drawn),
            rollouts=found[0].rollouts,
            length=_common_length(drawn[0]),
            batch=found[0].batch,
            note=note,
            value=value_row(environment, sampler, drawn, values, dtype) if len(values) == len(drawn) else None,
        )

    def _not_judged(self, environment: str, sampler: str, drawn: Sequence[Instance], batch: int, note: str) -> Row:
        return Row(
            environment,
            sampler,
            None,
            expected=_spelt(self.declared, environment, sampler, self.seed),
            agrees=None,
            relative_bias=float("nan"),
            cosine=None,
            residual=float("nan"),
            relative_variance=float("nan"),
            method="exact",
            instances=len(drawn),
            rollouts=len(drawn[0].paths),
            length=_common_length(drawn[0]),
            batch=batch,
            note=note,
        )

    def _check_by_second_route(
        self, sampler: str, drawn: Sequence[Instance], found: list[Moments], targets: list[np.ndarray]
    ) -> None:
        """Before a disagreement is reported, both sides of it are computed again in another way."""
        instance, moments, target = drawn[0], found[0], targets[0]
        again = sum(c * gradient_again(name, instance) for name, c in self.declared.items())
        scale = max(float(np.linalg.norm(target)), _size(instance))
        if np.linalg.norm(target - again) > ROUTES_AGREE * scale:
            raise DisagreementError(
                "the declared gradient comes out differently by dynamic programming and by autograd"
            )
        gradient_of_table = _through_table(self.loss, instance, sampler, self.seed)
        scale = max(float(np.sqrt(moments.second_moment)), _size(instance))
        if np.linalg.norm(moments.gradient - gradient_of_table) > max(ROUTES_AGREE, tolerance(moments.dtype)) * scale:
            raise DisagreementError(
                f"the expected gradient of {self.loss.name} comes out differently through a table of logits: does it "
                "give different results for the same input?"
            )


def _through_table(loss: Loss, instance: Instance, sampler: str, padding: int) -> np.ndarray:
    """The expected gradient once more: each rollout's own call, chained to a table of logits by autograd."""
    paths, weights = instance.paths, instance.rollout_weights(sampler)
    table = torch.from_numpy(instance.policy).requires_grad_()
    log_probs = table.log_softmax(dim=1)
    everything = Rollout.of(instance, sampler=sampler, padding=padding)
    total = table.sum() * 0
    for row in range(len(paths)):
        rollout = everything.take([row])
        objective = loss(rollout).objective
        leaves = {name: leaf for name in LEAVES if (leaf := rollout.built(name)) is not None}
        if not leaves or not objective.requires_grad:
            continue
        live = torch.from_numpy(paths.mask[row])
        contexts, tokens = (torch.from_numpy(part[row])[live] for part in (paths.contexts, paths.tokens))
        reached = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
        for name, received in zip(leaves, reached, strict=True):
            if received is not None:
                value = log_probs[contexts, tokens] if name == "logp" else log_probs[contexts]
                total = total + weights[row] * (received[0][live] * value).sum()
    return torch.autograd.grad(total, table)[0].numpy()


@lru_cache(maxsize=64)
def _candidates(environment: str, sampler: str, seed: int) -> dict[str, list[np.ndarray]]:
    names = [name for name, row in ATLAS.items() if name != "zero" and (sampler == "stale" or not row.stale)]
    return {name: [gradient(name, instance) for instance in instances(environment, seed)] for name in names}


def _spelt(declared: Combination, environment: str, sampler: str, seed: int) -> Combination:
    """A combination in the names that are independent in this world: on a bandit there is nothing local."""
    candidates = _candidates(environment, "stale", seed)
    drawn = instances(environment, seed)
    spelt: Combination = {}
    for name, coefficient in declared.items():
        own = identify([gradient(name, i) for i in drawn], candidates).combination or {name: 1.0}
        for term, factor in own.items():
            spelt[term] = spelt.get(term, 0.0) + coefficient * factor
    kept = {name: coefficient for name, coefficient in spelt.items() if name != "zero" and abs(coefficient) > 1e-9}
    return kept or {"zero": 1.0}


def _size(instance: Instance) -> float:
    """‖∇KL(π‖ref)‖, the unit of all relative numbers."""
    return float(np.linalg.norm(gradient("reverse_kl", instance)))


def _target(declared: Combination, instance: Instance) -> np.ndarray:
    """The declared gradient; exactly zero where its terms cancel up to rounding."""
    target = combine(declared, instance)
    terms = sum(abs(c) * float(np.linalg.norm(gradient(name, instance))) for name, c in declared.items())
    return np.zeros_like(target) if np.linalg.norm(target) <= CANCELS * terms else target


def _bias(found: np.ndarray, target: np.ndarray, instance: Instance) -> float:
    norm = float(np.linalg.norm(target))
    return float(np.linalg.norm(found - target)) / (norm if norm > 0 else _size(instance))


def _worst_cosine(
    gradients: list[np.ndarray], targets: list[np.ndarray], identification: Identification
) -> float | None:
    if identification.combination == {"zero": 1.0}:
        return None
    norms = [float(np.linalg.norm(g) * np.linalg.norm(t)) for g, t in zip(gradients, targets, strict=True)]
    if not all(norms):
        return None
    return min(float((g * t).sum()) / norm for g, t, norm in zip(gradients, targets, norms, strict=True))


def _common_length(instance: Instance) -> int | None:
    lengths = instance.paths.mask.sum(axis=1)
    return int(lengths[0]) if (lengths == lengths[0]).all() else None

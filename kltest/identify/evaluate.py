"""One row of a report: the expected gradient of a loss in one world, identified and compared with the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kltest.environments import Instance
from kltest.errors import KltestError, TargetError, WorldError
from kltest.identify import second_route
from kltest.identify.declared import World, relative_bias, size, target, worst_cosine
from kltest.identify.findings import Combination, Row
from kltest.identify.identification import identify, tolerance
from kltest.identify.instances import instances
from kltest.identify.probes import Probes
from kltest.identify.sampling import Sampling, sample, sampled_row
from kltest.identify.values import reported
from kltest.loss.outcome import Loss
from kltest.moments import BatchOfOneError, Moments, NonDeterministicError, Sampled, exact, exact_batches

# Without a size that was asked for: the smallest batch that the loss accepts, the largest group up to the usual one.
BATCHES = (2, 4, 8)
GROUPS = (4, 3, 2)
# Batches are called one by one, about half a millisecond each: up to a second an instance, up to a few if that is the
# only size that the loss takes or the one that was asked for.
FEW_BATCHES, MOST_BATCHES = 1_000, 5_000
# Rollouts in a batch of a loss that draws random numbers of its own: enough to average over most of them.
NOISY_BATCH = 512
GROUP_FIELDS = frozenset({"reward", "advantage", "group"})
# Beyond this the last digits are not rounding any more.
ALMOST = 1e-9
# What rounding may leave of the square of a gradient that is zero: worlds are mild, gradients of size one.
NOTHING = 1e-24
LOWEST_FIRST = ("float16", "bfloat16", "float32", "float64")


class Evaluator:
    """Measures a loss in one world after another.

    `reduction`, `dtype`, `blocked` and `notes` collect what it saw; `nondeterministic` is the message of a loss that
    gave two gradients for one batch.
    """

    def __init__(
        self,
        loss: Loss,
        declared: Combination,
        uses: frozenset[str],
        *,
        seed: int = 0,
        group_size: int | None = None,
        batch_size: int | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self.loss = loss
        self.sampling = sampling or Sampling()
        self.declared = declared
        self.uses = uses
        self.seed = seed
        self.grouped = bool(uses & GROUP_FIELDS) and batch_size is None
        asked = group_size if self.grouped else batch_size
        self.sizes = (asked,) if asked else GROUPS if self.grouped else BATCHES
        self.plans = [(many, FEW_BATCHES) for many in self.sizes] * (not asked) + [(self.sizes[0], MOST_BATCHES)]
        self.reductions: list[str] = []
        self.dtype = "float64"
        self.reached: list[bool] = []
        self.notes: list[str] = []
        self.nondeterministic = ""
        self.coupled_in: set[str] = set()
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self._measured: dict[tuple[str, str, int], tuple[World, list[np.ndarray]]] = {}
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
            self._rows[key] = self._measure(World(environment, sampler, self.seed))
        return self._rows[key]

    def gradients(self, row: Row) -> list[np.ndarray]:
        """(C, V) the expected gradient of a measured row on each instance of its world; none where there was no row."""
        return self._measured.get((row.environment, row.sampler, row.batch), (None, []))[1]

    def world(self, row: Row) -> World:
        """The world of a measured row: groups have worlds of their own."""
        known = self._measured.get((row.environment, row.sampler, row.batch))
        return known[0] if known else World(row.environment, row.sampler, self.seed)

    def expected(self, row: Row, instance: Instance) -> Moments:
        """The moments of a measured row's batches on another instance."""
        if row.batch == 1:
            return exact(self.loss, instance, row.sampler, padding=self.seed)
        return self._over_batches(instance, World(row.environment, row.sampler, self.seed), row.batch, MOST_BATCHES)

    def meets(self, loss: Loss, instance: Instance) -> bool:
        """Whether a loss's expected gradient under the instance's stale sampler is the declared one."""
        found = exact(loss, instance, "stale", padding=self.seed)
        wanted = target(self.declared, instance)
        return relative_bias(found.gradient, wanted, size(instance)) <= tolerance(found.dtype)

    def _measure(self, world: World) -> list[Row]:
        rows = []
        coupling = ""
        try:
            found, row = self._from_samples(world) if self.sampling.asked else self._from_all(world)
            rows.append(row)
            coupling = next((moments.coupling for moments in found if moments.reduction == "coupled"), "")
        except NonDeterministicError as error:
            return [self._gives_two_gradients(world, error)]
        except BatchOfOneError as error:
            coupling = str(error)
        if not coupling:
            return rows
        self.coupled_in.add(world.environment)
        self._remark(f"The loss couples the rows of a batch: {coupling}.")
        batched = self._batched(world)
        if rows and rows[0].reported and rows[0].reported.is_metric:
            # What is logged for one rollout is what it is, whatever the gradient of one is.
            batched = replace(batched, value=rows[0].value, reported=rows[0].reported)
        # A baseline taken from the batch itself leaves nothing of a batch of one, or of its reward: that says nothing
        # of larger ones.
        nothing = [row for row in rows if row.identified == {"zero": 1.0} != batched.identified]
        nothing += [row for row in rows if self.grouped and row.wrong and batched.agrees]
        return [row for row in rows if row not in nothing] + [batched]

    def _from_all(self, world: World) -> tuple[Sequence[Moments | Sampled], Row]:
        found = [exact(self.loss, instance, world.sampler, padding=self.seed) for instance in world.instances]
        self._note(found)
        return found, self._row(world, found)

    def _batched(self, world: World) -> Row:
        """The row of the first size of batches, or groups, that the loss takes and that can be enumerated."""
        failure: KltestError | None = None
        for many, most in self.plans:
            place = World(world.environment, world.sampler, self.seed, many if self.grouped else None)
            try:
                if self.sampling.asked:
                    return self._from_samples(place, many)[1]
                found = [self._over_batches(instance, place, many, most) for instance in place.instances]
            except NonDeterministicError as error:
                return self._gives_two_gradients(place, error)
            except (WorldError, TargetError) as error:
                failure = error
                continue
            self._note(found)
            self.reductions.append("coupled")
            return self._row(place, found, note="whole groups of one prompt" if self.grouped else "")
        if isinstance(failure, TargetError):
            raise failure
        many = self.plans[-1][0]
        place = World(world.environment, world.sampler, self.seed, many if self.grouped else None)
        return self._by_sampling(place, many, str(failure))

    def _over_batches(self, instance: Instance, world: World, many: int, most: int) -> Moments:
        found = exact_batches(
            self.loss, instance, world.sampler, many, grouped=self.grouped, padding=self.seed, most=most
        )
        if not found.added_up:
            return found
        self._remark(f"Its rows are added up, not averaged: its gradient was divided by the {many} rows of a batch.")
        return replace(found, gradient=found.gradient / many, second_moment=found.second_moment / many**2)

    def _gives_two_gradients(self, world: World, error: NonDeterministicError) -> Row:
        """The row of a loss that draws random numbers, which are averaged over in whole batches or groups."""
        self.nondeterministic = str(error)
        self._remark(f"{error}.")
        asked = len(self.sizes) == 1
        many = self.sizes[0] if asked or self.grouped else NOISY_BATCH
        place = replace(world, group=many if self.grouped else None)
        if error.keeps_state:
            return self._not_judged(place, many, "the loss keeps state between calls, so that they are no samples")
        return self._by_sampling(place, many, "the loss gives different gradients for the same batch", noisy=True)

    def _by_sampling(self, world: World, batch: int, why: str, *, noisy: bool = False) -> Row:
        """A row of what cannot be enumerated, and why it cannot; not judged where it cannot be sampled either."""
        try:
            return self._from_samples(world, batch, why, noisy=noisy)[1]
        except WorldError as error:
            return self._not_judged(world, batch, f"{why}; {error}")

    def _from_samples(
        self, world: World, batch: int = 1, why: str = "", *, noisy: bool = False
    ) -> tuple[Sequence[Moments | Sampled], Row]:
        grouped = self.grouped and batch > 1
        found = sample(self.loss, self.declared, world, self.sampling, batch, grouped=grouped, noisy=noisy)
        self._note(found)
        # What checks ask of a row's gradients they ask of exact ones.
        self._measured[world.environment, world.sampler, found[0].batch] = world, []
        return found, sampled_row(self.loss, self.declared, world, self.sampling, found, why)

    def _remark(self, note: str) -> None:
        self.notes += [note] * (note not in self.notes)

    def _note(self, found: Sequence[Moments | Sampled]) -> None:
        self.reductions += [moments.reduction for moments in found]
        self.dtype = min([self.dtype, *(moments.dtype for moments in found)], key=LOWEST_FIRST.index)
        # Where a loss takes β a term without a gradient leaves the difference of two equal gradients.
        least = NOTHING if self.loss.takes_beta else -1.0
        self.reached += [bool(moments.leaves) and moments.second_moment > least for moments in found]

    def _row(self, world: World, found: list[Moments], *, note: str = "") -> Row:
        drawn = world.instances
        dtype = min((moments.dtype for moments in found), key=LOWEST_FIRST.index)
        gradients = [moments.gradient for moments in found]
        self._measured[world.environment, world.sampler, found[0].batch] = world, gradients
        targets = [target(self.declared, instance) for instance in drawn]
        at_parameters = world.at_parameters(gradients), world.at_parameters(targets)
        candidates = world.candidates_at_parameters
        units = [float(np.linalg.norm(one)) for one in candidates["reverse_kl"]]
        # What turns sizes at the logits into sizes at the parameters.
        factors = [unit / size(instance) for unit, instance in zip(units, drawn, strict=True)]
        magnitudes = [f * float(np.sqrt(moments.second_moment)) for f, moments in zip(factors, found, strict=True)]
        identification = identify(
            at_parameters[0], candidates, magnitudes=magnitudes, units=units, dtype=dtype, freedom=world.freedom
        )
        bias = max(relative_bias(*triple) for triple in zip(*at_parameters, units, strict=True))
        agrees: bool | None = bias <= tolerance(dtype)
        if not agrees and found[0].batch == 1:
            second_route.compare(self.loss, drawn[0], world.sampler, found[0], self.declared, targets[0], self.seed)
        spec = self.loss.spec
        if spec is not None and spec.off_policy_only and world.sampler == "current":
            agrees, note = None, "means something only when the sampler is not the policy"
        elif agrees and dtype == "float64" and bias > ALMOST:
            note = f"to {bias:.1g} of it only, as with a small constant in a denominator"
        place = (world.environment, world.sampler)
        shown = reported(self.loss, *place, drawn, found, dtype)
        return Row(
            *place,
            identification.combination,
            expected=world.spelt(self.declared),
            agrees=agrees,
            relative_bias=bias,
            cosine=worst_cosine(*at_parameters, identification),
            residual=identification.residual,
            relative_variance=max(m.variance / size(i) ** 2 for m, i in zip(found, drawn, strict=True)),
            variances=tuple(moments.variance for moments in found),
            method="exact",
            instances=len(drawn),
            rollouts=found[0].rollouts,
            length=world.length,
            batch=found[0].batch,
            note=note,
            value=shown.row if shown else None,
            reported=shown,
        )

    def _not_judged(self, world: World, batch: int, note: str) -> Row:
        return Row(
            world.environment,
            world.sampler,
            None,
            expected=world.spelt(self.declared),
            agrees=None,
            relative_bias=float("nan"),
            cosine=None,
            residual=float("nan"),
            relative_variance=float("nan"),
            method="exact",
            instances=len(world.instances),
            rollouts=len(world.instances[0].paths),
            length=world.length,
            batch=batch,
            note=note,
        )

"""The measuring service: cases of one loss, called and evaluated once each, and one more for a check that asks."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kltest.environments import Instance
from kltest.errors import InvalidEnvironmentError, KltestError, TargetError
from kltest.identify import second_route
from kltest.identify.case import Case, relative_bias, size, target
from kltest.identify.combinations import Combination
from kltest.identify.evaluate import evaluate, lowest_precision, name_of, not_judged
from kltest.identify.histories import histories, rows_after
from kltest.identify.instances import TURNS
from kltest.identify.rows import Observed, Row
from kltest.identify.sampling import Sampling, sample, sampled_row
from kltest.identify.values import reported
from kltest.loss.arguments import SupportOf
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.moments import BatchOfOneError, Moments, NonDeterministicError, exact, exact_batches_each
from kltest.moments.averaged import DTYPE as AVERAGED
from kltest.moments.averaged import averaged
from kltest.moments.caller import Caller
from kltest.moments.differentiate import LossExperiment, RowGradients, differentiate, live_positions
from kltest.moments.moments import Combining, Reduction
from kltest.moments.reduction import probe
from kltest.moments.tolerances import TOLERANCES
from kltest.names import SUPPORT_FIELDS, SUPPORT_SIZE
from kltest.rollout import Rollout
from kltest.samples.blocks import Interval
from kltest.samples.sampled import Sampled, sampled
from kltest.truth import ATLAS, OF_POLICY, is_of_groups, of_group, of_mixtures, of_support

STALE_ONLY = "means something only when the sampler is not the policy"
# Rollouts in a batch of a loss that draws random numbers of its own: enough to average over most of them.
NOISY_BATCH = 512
# Calls of one batch of a loss whose expected gradient comes out differently by two routes.
REPEATED = 500
# The same of a loss that draws random numbers, as of coins that seldom fall on the other side.
DRAWN = 64
# Rounding may leave this much of the square of a zero gradient: environments are mild, gradients of size one.
NOTHING = 1e-24
# Batches of that size at most, unless otherwise asked, if their noise is not averaged by more rows.
NOISY_BATCHES = 1024
# Sizes to try if none was asked for: the smallest batch that the loss accepts, the largest group up to the usual one.
BATCHES = (2, 4, 8)
GROUPS = (4, 3, 2)
# Batches are called one by one, about half a millisecond each: up to a second an instance, up to a few if that is the
# only size that the loss takes or the one that was asked for.
FEW_BATCHES, MOST_BATCHES = 1_000, 5_000
GROUP_FIELDS = frozenset({"reward", "advantage", "group"})


@dataclass(frozen=True)
class Sizes:
    """Batch sizes to try for a loss that couples rows, in rollouts; `grouped` batches are groups of one prompt."""

    each: tuple[int, ...] = BATCHES
    grouped: bool = False
    requested: bool = False

    @classmethod
    def of(cls, uses: frozenset[str], group_size: int | None = None, batch_size: int | None = None) -> "Sizes":
        """Return sizes for a loss that reads these fields: of groups if it reads rewards and no batch size is given."""
        grouped = bool(uses & GROUP_FIELDS) and batch_size is None
        asked = group_size if grouped else batch_size
        return cls((asked,) if asked else GROUPS if grouped else BATCHES, grouped, bool(asked))

    @property
    def attempts(self) -> list[tuple[int, int]]:
        """(size, most batches to enumerate) in the order in which they are tried."""
        first = [] if self.requested else [(many, FEW_BATCHES) for many in self.each]
        return [*first, (self.each[0], MOST_BATCHES)]


class Measure:
    """Measures the expected gradient of one loss in one case after another, and records what it sees in `observed`."""

    def __init__(
        self,
        loss: Loss,
        declared: Combination,
        uses: frozenset[str],
        *,
        seed: int = 0,
        sizes: Sizes | None = None,
        sampling: Sampling | None = None,
        policy: bool = False,
    ) -> None:
        self.loss = loss
        self.policy = policy
        self.declared = declared
        self.seed = seed
        self.sizes = sizes or Sizes.of(uses)
        self.sampling = sampling or Sampling()
        self.observed = Observed(uses)
        # Of a service for means over random numbers the same over more other ones, and over fewer.
        self.further: list[Measure] = []
        self.rough: Measure | None = None
        self._averaged: dict[bool, Measure] = {}
        self._reductions: dict[str, Reduction] = {}
        self._combining: dict[tuple[str, int], Combining | None] = {}
        self._converted: dict[torch.dtype, Loss] = {}

    def case(self, environment: str, sampler: str, group: int | None = None) -> Case:
        """Return a case for the loss: with the names of what it reads, in vocabularies that exceed its support."""
        reads, support = self.loss.takes | self.observed.uses, self.loss.support
        if support is None and not reads.isdisjoint(SUPPORT_FIELDS):  # as `Rollout.support` makes them
            support = SupportOf("topk_ids", SUPPORT_SIZE, "ref_")
        numbers = [one for one in self.loss.arguments.stated.values() if isinstance(one, float)]
        further: tuple[str, ...] = of_mixtures(numbers) if {"logits", "ref_logits"} <= reads else ()
        further += of_support(support.k, support.of) if support else ()
        further += OF_POLICY if self.policy else ()
        further += tuple(name for name in self.declared if "@" not in name and name not in {*ATLAS, *further})
        if support is None:
            return Case(environment, sampler, self.seed, group, further=further)
        return Case(environment, sampler, self.seed, group, min(support.k, SUPPORT_SIZE) + 2, further)

    def rows(self, environment: str, sampler: str) -> list[Row]:
        """Return the row of batches of one; if the loss couples the rows of a batch, that of larger batches as well."""
        known = self.observed.rows
        if (environment, sampler) not in known:
            known[environment, sampler] = self.rows_of(self.case(environment, sampler))
        return known[environment, sampler]

    def alone(self, environment: str, sampler: str, batch: int = 1) -> Row | None:
        """Return the row of batches of this size in an environment; None if it cannot be measured."""
        try:
            rows = self.rows(environment, sampler)
        except KltestError:
            return None
        return next((row for row in rows if row.batch == batch), None)

    def right_when_current(self, row: Row) -> bool:
        """Return True if the row's environment agrees when the sampler is the policy."""
        current = self.alone(row.environment, "current")
        return current is not None and current.agrees is True

    def expected(
        self, row: Row, instance: Instance, floats: torch.dtype | None = None, wanted: np.ndarray | None = None
    ) -> Moments:
        """Return the moments of a measured row's batches on another instance, or given numbers of another precision.

        What is not the `wanted` gradient (None: the declared one) is computed by calls of single rollouts as well,
        unless it is a mean over draws, which others are compared with.
        """
        if row.batch > 1:
            return self.over_batches(row, [instance])[0]
        loss = self.loss if floats is None else self._in_precision(floats)
        found = self._alone(loss, instance, row.sampler)
        once = found.reduction == "coupled" or self.observed.dtype == AVERAGED
        if once or self._follows(found, instance, row.sampler, wanted):
            return found
        return exact(loss, instance, row.sampler, padding=self.seed)

    def gradients(self, row: Row, drawn: Sequence[Instance]) -> list[np.ndarray]:
        """Return the expected gradient (C, V) of a measured row's batches on each of other instances of its kind."""
        if row.batch > 1:
            return [found.gradient for found in self.over_batches(row, drawn)]
        return [self._alone(self.loss, instance, row.sampler).gradient for instance in drawn]

    def over_batches(self, row: Row, drawn: Sequence[Instance]) -> list[Moments]:
        """Return the moments of a row's batches on each of other instances of its kind."""
        place, known = self.case(row.environment, row.sampler), self._combining.get((row.environment, row.batch))
        return self._over_batches(drawn, place, row.batch, most=MOST_BATCHES, logs=False, known=known)

    def _in_precision(self, floats: torch.dtype) -> Loss:
        """Return the loss for numbers of this precision; its first call, which takes longest, is made once."""
        if floats not in self._converted:
            self._converted[floats] = self.loss.for_experiments(floats)
        return self._converted[floats]

    def meets(self, loss: Loss, instance: Instance, sampler: str = "stale") -> bool:
        """Return True if a variant of the loss follows the declared gradient on an instance."""
        return self._follows(self._alone(loss, instance, sampler), instance, sampler)

    def gradient_of(self, loss: Loss, instance: Instance, sampler: str = "stale") -> np.ndarray:
        """Return the expected gradient (C, V) of a variant of the loss on an instance."""
        return self._alone(loss, instance, sampler).gradient

    def second_moment(self, loss: Loss, instance: Instance, sampler: str = "stale") -> float:
        """Return the mean square of one rollout's gradient of a variant of the loss on an instance."""
        return self._alone(loss, instance, sampler).second_moment

    def equal(self, one: Loss, other: Loss, instance: Instance, sampler: str) -> bool:
        """Return True if two variants of the loss have the same expected gradient on an instance."""
        found, again = (self._alone(loss, instance, sampler) for loss in (one, other))
        return relative_bias(again.gradient, found.gradient, size(instance)) <= TOLERANCES[found.dtype].gradient

    def name_of(self, loss: Loss, case: Case, drawn: Sequence[Instance], most: float = math.inf) -> Combination | None:
        """Return what a variant of the loss follows on instances like those of a case; None if that has no name.

        `most` is the largest share of the gradient that the name may leave, below the tolerance of its precision.
        """
        named = name_of(case, drawn, [self._alone(loss, instance, case.sampler) for instance in drawn])
        return named.combination if named.residual <= most else None

    def _alone(self, loss: Loss, instance: Instance, sampler: str) -> Moments:
        """Return the moments of batches of one, called together if rows are apart in that environment."""
        reduction = self._reductions.get(instance.environment.name, self.observed.reduction)
        return exact(loss, instance, sampler, padding=self.seed, known=reduction, logs=False)

    def _follows(self, found: Moments, instance: Instance, sampler: str, wanted: np.ndarray | None = None) -> bool:
        wanted = target(self.declared, instance, sampler) if wanted is None else wanted
        return relative_bias(found.gradient, wanted, size(instance)) <= TOLERANCES[found.dtype].gradient

    def experiment(self, floats: torch.dtype | None = None, *, beta: float | None = None) -> LossExperiment:
        """Return calls of the loss on any input; `floats` is the type of its fields, `beta` its coefficient."""
        loss = self.loss if beta is None else self.loss.at(beta)
        return LossExperiment(loss, floats, comparable=not self.observed.value_moves)

    def differentiate(self, rollout: Rollout, beta: float | None = None) -> RowGradients:
        """Return the gradients of one batch, zero at padded positions; at this coefficient if one is given."""
        loss = self.loss if beta is None else self.loss.at(beta)
        return differentiate(loss, rollout.replace(), live_positions(rollout))

    def averaged(self) -> "Measure":
        """Return the service for the loss as it is on average over the random numbers that it draws.

        TargetError if that cannot be had (kltest.moments.averaged). It is made once for each way of combining rows.
        """
        adds_up = self.observed.reduction == "sum"
        if adds_up not in self._averaged:
            self._averaged[adds_up] = self._average(adds_up)
        return self._averaged[adds_up]

    def _average(self, adds_up: bool) -> "Measure":
        size = self.sizes.each[0] if self.sizes.grouped else None
        case = self.case("ragged", "stale", group=size)
        batch = Rollout.of(case.instances[0], sampler="stale", padding=self.seed, centre="batch")
        if size:
            batch = batch.take(np.flatnonzero(batch.peek("group").numpy() == int(batch.peek("group")[0]))[:size])
        usual, further, fewer = averaged(self.loss, batch, adds_up=adds_up)
        measure = self._over_draws(usual)
        measure.further = [self._over_draws(loss) for loss in further]
        measure.rough = self._over_draws(fewer) if fewer else None
        return measure

    def _over_draws(self, loss: Loss) -> "Measure":
        known = self.observed
        measure = Measure(loss, self.declared, known.uses, seed=self.seed, sizes=self.sizes)
        own = measure.observed
        own.dtype, own.draws, own.keeps_state = AVERAGED, True, known.keeps_state
        return measure

    def rows_of(self, case: Case) -> list[Row]:
        """Measure one case: rows as in `rows`, for a case of any kind; random numbers go on from call to call."""
        measure, past = partial(self._rows_of, case), partial(histories, self.loss, case)
        try:
            return rows_after(self.loss.calls, self.observed, measure, past)
        except NonDeterministicError as error:
            self._remark(f"{error}.")
            return [not_judged(case, self.declared, 1, "it does not repeat itself, so that its calls are no samples")]

    def _rows_of(self, case: Case) -> list[Row]:
        if is_of_groups(self.declared):
            return [self._batched(case)]
        rows = []
        coupling = ""
        try:
            self._check_draws(case)
            found, row = self._from_samples(case) if self.sampling.requested else self._from_all(case)
            rows.append(row)
            coupling = next((moments.coupling for moments in found if moments.reduction == "coupled"), "")
            coupling = coupling or self._coupled_as_asked(case)
        except NonDeterministicError as error:
            return [self._drawn(case, error)]
        except BatchOfOneError as error:
            coupling = str(error)
        if not coupling:
            return rows
        self.observed.coupled_in.add(case.environment)
        self._remark(f"The loss couples the rows of a batch: {coupling}.")
        # The metric of one rollout is an estimate of the KL by itself, whatever its gradient is.
        known = bool(rows and rows[0].reported and rows[0].reported.is_metric)
        batched = self._batched(case, logs=not known)
        if known:
            batched = replace(batched, reported=rows[0].reported)
        # A baseline taken from the batch itself leaves nothing of a batch of one, or of its reward. That says nothing
        # about larger batches, so that the row of one is dropped.
        nothing = [row for row in rows if row.identified == {"zero": 1.0} != batched.identified]
        nothing += [row for row in rows if self.sizes.grouped and row.wrong and batched.agrees]
        return [row for row in rows if row not in nothing] + [batched]

    def _check_draws(self, case: Case) -> None:
        """Raise NonDeterministicError if random numbers change the gradient of all rollouts, however seldom they do."""
        batch = Rollout.of(case.instances[0], sampler=case.sampler, padding=self.seed)
        try:
            with preserved():
                before = self.loss.calls.draws()
                self.differentiate(batch)
                if not before.changed() or self._repeats(batch, DRAWN):
                    return
        except KltestError:  # it takes batches of other sizes
            return
        raise NonDeterministicError.of(self.loss, lambda: self.differentiate(batch))

    def _coupled_as_asked(self, case: Case) -> str:
        """Return how rows are coupled in batches of the size that was asked for, "" if each gives its share there."""
        sizes = self.sizes
        if not sizes.requested or sizes.grouped or self.sampling.requested:
            return ""
        caller = Caller(self.loss, Rollout.of(case.instances[0], sampler=case.sampler, padding=self.seed))
        by_length = np.argsort(caller.base.peek("mask").sum(dim=1).numpy(), kind="stable")
        mixed = np.random.default_rng(self.seed).permutation(by_length)
        for order in (by_length, by_length[::-1], mixed):
            caller.look(np.resize(order, sizes.each[0]).tolist())
        if not caller.coupling:
            self._remark(
                f"In batches of {sizes.each[0]} each row gives its share of what it gives alone: graded one by one."
            )
        return caller.coupling

    def _from_all(self, case: Case) -> tuple[Sequence[Moments | Sampled], Row]:
        found: list[Moments] = []
        # Known from the other sampler, for the same rows, or from the instance before.
        known = self._reductions.get(case.environment)
        known = None if known == "coupled" else known
        for instance in case.instances:
            found.append(exact(self.loss, instance, case.sampler, padding=self.seed, known=known))
            known = found[0].reduction
        self._note(found)
        self._reductions[case.environment] = next((m.reduction for m in found if m.coupling), found[0].reduction)
        return found, self._row(case, found)

    def _batched(self, case: Case, *, logs: bool = True) -> Row:
        """Return the row of the first size of batches, or groups, that the loss takes and that can be enumerated."""
        failure: KltestError | None = None
        too_many: int | None = None
        for many, most in self.sizes.attempts:
            place = self._place(case, many)
            try:
                if self.sampling.requested:
                    return self._from_samples(place, many)[1]
                found = self._over_batches(place.instances, place, many, most=most, logs=logs)
                self._combining[case.environment, many] = found[0].combining
            except NonDeterministicError as error:
                return self._drawn(place, error)
            except (InvalidEnvironmentError, TargetError) as error:
                if isinstance(error, TargetError) and self.sizes == Sizes():
                    # It takes blocks of rows, as groups are, without reading whose they are.
                    self.sizes = Sizes((*GROUPS, BATCHES[-1]), grouped=True)
                    return self._batched(case, logs=logs)
                too_many = many if isinstance(error, InvalidEnvironmentError) else too_many
                failure = failure if isinstance(failure, InvalidEnvironmentError) else error
                continue
            self._note(found)
            self.observed.reductions.append("coupled")
            return self._row(place, found, note="whole groups of one prompt" if self.sizes.grouped else "")
        if isinstance(failure, TargetError):
            raise failure
        return self._by_sampling(case, too_many or self.sizes.each[0], str(failure))

    def _place(self, case: Case, many: int) -> Case:
        """Return the case of batches of this size, with a name of lengths; groups have environments of their own."""
        further = (*case.further, f"inverse_length_of{many}") if many > 1 else case.further
        further += of_group(many) if self.policy and self.sizes.grouped and many > 1 else ()
        # Pairs of rollouts of two turns are many thousands, so that they are those of groups.
        own = self.sizes.grouped or (many > 1 and case.environment == TURNS)
        return replace(case, group=many if own else None, further=further)

    def _over_batches(self, drawn: Sequence[Instance], case: Case, many: int, **options: Any) -> list[Moments]:
        options |= {"grouped": self.sizes.grouped, "padding": self.seed}
        found = exact_batches_each(self.loss, drawn, case.sampler, many, **options)
        if not found[0].added_up:
            return found
        self._remark(f"Its rows are added up, not averaged: its gradient was divided by the {many} rows of a batch.")
        return [replace(one, gradient=one.gradient / many, second_moment=one.second_moment / many**2) for one in found]

    def _drawn(self, case: Case, error: NonDeterministicError) -> Row:
        """Return the row of a loss that draws random numbers; they are averaged over in whole batches or groups."""
        if error.why != "draws":
            raise error
        self.observed.nondeterministic, self.observed.draws = str(error), True
        self._remark(f"{error}.")
        why = "the loss gives different gradients for the same batch"
        options: dict[str, Any] = {}
        if self.sizes.requested or self.sizes.grouped:
            with suppress(KltestError):  # then each batch is called alone
                options["average"] = self.averaged().loss
            return self._by_sampling(case, self.sizes.each[0], why, noisy=True, **options)
        try:
            average = self.averaged().loss
        except KltestError as failure:
            # What thousands of rows do not average takes the limit of time to no avail.
            few = replace(self.sampling, samples=self.sampling.samples or NOISY_BATCHES)
            return self._by_sampling(case, NOISY_BATCH, f"{why}: {failure}", noisy=True, sampling=few)
        apart = self._apart(average, case)
        return self._by_sampling(case, 1 if apart else NOISY_BATCH, why, noisy=True, apart=apart)

    def _apart(self, average: Loss, case: Case) -> Reduction | None:
        """Return how a loss without its noise combines rows if it treats them apart, else None."""
        try:
            rollout = Rollout.of(case.instances[0], sampler=case.sampler, padding=self.seed)
            found = probe(average, rollout, np.random.default_rng(self.seed)).reduction
        except KltestError:
            return None
        return None if found == "coupled" else found

    def distance(self, row: Row, instance: Instance, margin: float) -> Interval:
        """Return how far the expected gradient of a row's batches is from the declared one on an instance, sampled.

        Relative to the declared one, and until it is known to be below a margin, or above it.
        """
        wanted, rate = target(self.declared, instance, row.sampler), self.sampling.error_rate / self.sampling.rows
        found = sampled(
            self.loss,
            instance,
            row.sampler,
            target=wanted,
            margin=margin,
            error_rate=rate,
            padding=self.seed,
            seed=self.seed,
            size=row.batch,
            grouped=self.sizes.grouped,
        )
        return found.distance

    def _by_sampling(self, case: Case, batch: int, why: str, **options: Any) -> Row:
        """Return the row of a case that cannot be enumerated, and why; not judged if it cannot be sampled either."""
        place = self._place(case, batch)
        try:
            return self._from_samples(place, batch, why, **options)[1]
        except InvalidEnvironmentError as error:
            return not_judged(place, self.declared, batch, f"{why}; {error}")

    def _from_samples(
        self, case: Case, batch: int = 1, why: str = "", *, sampling: Sampling | None = None, **noise: Any
    ) -> tuple[Sequence[Moments | Sampled], Row]:
        sampling = sampling or self.sampling
        found = sample(self.loss, self.declared, case, sampling, batch, **noise)
        self._note(found)
        return found, self._judged(sampled_row(case, self.declared, sampling, found, why))

    def _row(self, case: Case, found: list[Moments], *, note: str = "") -> Row:
        row = self._judged(evaluate(case, self.declared, found, note))
        if row.wrong:
            try:
                second_route.compare(self.differentiate, case, found[0], self.declared)
            except second_route.DisagreementError as error:
                batch = Rollout.of(case.instances[0], sampler=case.sampler, padding=self.seed)
                cause = NonDeterministicError.of(self.loss, lambda: self.differentiate(batch))
                known = cause.why != "unknown" or not self._repeats(batch)
                raise (cause if known else error) from None
        return replace(row, reported=reported(case, found, lowest_precision(found), self.loss.__call__))

    def _repeats(self, batch: Rollout, calls: int = REPEATED) -> bool:
        """Return True if a batch has one gradient in many calls."""
        first, *others = (self.differentiate(batch) for _ in range(calls))
        return all(first.close(first.parts, other.parts) for other in others)

    def _judged(self, row: Row) -> Row:
        """Withdraw the judgement of an estimator that means something only with a stale sampler."""
        withdrawn = row.sampler == "current" and self.loss.spec is not None and self.loss.spec.off_policy_only
        return replace(row, agrees=None, note=STALE_ONLY) if withdrawn else row

    def _remark(self, note: str) -> None:
        self.observed.notes += [note] * (note not in self.observed.notes)

    def _note(self, found: Sequence[Moments | Sampled]) -> None:
        seen = self.observed
        seen.reductions += [moments.reduction for moments in found]
        seen.dtype = lowest_precision(found, seen.dtype)
        # For a loss that takes β, a term without a gradient leaves the difference of two equal gradients.
        least = NOTHING if self.loss.takes_beta else -1.0
        seen.reached += [bool(moments.leaves) and moments.second_moment > least for moments in found]

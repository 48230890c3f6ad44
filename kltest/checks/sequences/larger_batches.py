"""Batches of many sizes: a loss that treats rows of small batches apart may trim, drop or weight those of larger ones.

Each row's gradient in a batch is compared with what the row gives alone, up to the reduction. A loss that couples the
rows of a pair is compared with the declared gradient instead, in expectation over the batches of a bandit. Groups are
compared with what each gives alone, if two groups in one call are kept apart.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kltest.checks.batches import GroupFixture, apart, as_array, evenly, limit, nearest_multiple
from kltest.checks.check import Found
from kltest.checks.stress import (
    NARROW,
    REST,
    SAMPLED,
    WHOLE_CHUNKS,
    bias,
    farther,
    long_instance,
    with_larger_numbers,
)
from kltest.environments import Instance, bandit, ragged
from kltest.errors import InvalidEnvironmentError, KltestError
from kltest.identify.findings import Findings, Row, shared
from kltest.identify.instances import instances
from kltest.moments.averaged import DTYPE as AVERAGED
from kltest.moments.caller import Caller
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout

SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 64, 65)
# The largest, for rows that are apart: as many as are trained on at once. Means over draws would take long there. The
# first is a whole number of usual parts, the others of none; a loss may refuse either. Those of a prompt each, which
# are all called alone as well, are fewer. Smaller ones are tried again with log-ratios as large as theirs.
LARGEST, PROMPTS = (256, 257, 1031), 257
SMALLER = (2, 8, 32)
# Log-ratios there, to the reference and to the sampler, are this many times the usual ones: what couples rows may be
# how unlike their ratios are, as where few samples are effective. A rollout's is e⁶ at most, which training reaches.
FAR = (4.0, 12.0)
NEAR = (1.0, 1.0)
# Rows of the batch whose rollouts are as long as those of trainers, and of the largest batch of groups.
MANY = 32
# Sizes of one group. Trainers have 4 to 16 rollouts of a prompt, and fewer where some fail.
GROUPS = (2, 3, 5, 8, 16)
# Sizes that are sampled where lengths differ, since what sorts or matches rows does nothing to those that are alike.
SIZES_IN_SAMPLES = {"batches": (8, 32), "groups": (8,)}
VARYING = "ragged"


@shared
def examine_larger(findings: Findings) -> Found | None:
    """Report the smallest batch whose rows are coupled, if those of smaller ones are not or are coupled rightly.

    Of a loss that draws random numbers also over more draws: the noise of a mean is no coupling.
    """
    found = _larger(findings)
    for measure in findings.measure.further[:1] if found else ():
        found = _larger(replace(findings, measure=measure, _results={}))
    return found


def _larger(findings: Findings) -> Found | None:
    if not findings.agree:
        return None
    # What couples rows may be how far the sampler is from the policy.
    row = max(findings.rows, key=lambda row: (row.batch, row.sampler == "stale"))
    if findings.measure.sizes.grouped and row.batch > 1:
        return _groups(findings, row) or _of_other_groups(findings, row)
    # A size that was asked for is the only one that it has to be right at.
    sizes = findings.measure.sizes.each[:1] if findings.measure.sizes.requested else SIZES
    if row.batch > 1 and (found := _in_expectation(findings, row, sizes)):
        return found
    caller, noisy = _caller(findings, row.sampler), None
    for many in sizes:
        if _apart(findings, caller, many):
            continue
        if many == sizes[0]:
            return None
        found = _coupled(findings, row, many)
        if found.level != "warning":
            return found
        noisy = noisy or found
    return noisy or _long_and_far(findings, row.sampler) or _many_rows(findings, row)


def _many_rows(findings: Findings, row: Row) -> Found | None:
    """Put as many rollouts as are trained on at once into one batch, each of a prompt of its own if groups are read."""
    if findings.measure.sizes.requested:
        return None
    instance = instances(VARYING, findings.seed)[0]
    batch = Rollout.of(farther(instance, *FAR), sampler=row.sampler, padding=findings.seed)
    most = PROMPTS if "group" in findings.observed.uses else max(LARGEST)
    rows = np.resize(np.random.default_rng(findings.seed).permutation(len(batch)), most)
    if "group" in findings.observed.uses:
        batch, rows = batch.take(rows).replace(group=torch.arange(most)), np.arange(most)
    caller = Caller(findings.loss, batch)
    for many in (*SMALLER, *(size for size in LARGEST if size <= most and not findings.loss.instead)):
        with suppress(KltestError):
            caller.look(rows[:many].tolist())
            findings.reach.rows = max(findings.reach.rows, many)
        if caller.reduction == "coupled":
            known = "group" in findings.observed.uses
            return Found(f"{_words(many, FAR)}.") if known else _coupled(findings, row, many, FAR)
    return None


def _long_and_far(findings: Findings, sampler: str) -> Found | None:
    """Put as many rollouts as long as those of trainers into one batch, with tokens that are far from the reference."""
    if findings.loss.instead or findings.measure.sizes.requested:
        return None
    # No token has the same log-prob under policy and reference: where a rollout ends may be read from that. The call is
    # that of `kltest.checks.stress`, which has made the instance before.
    instance = long_instance(1, findings.seed, WHOLE_CHUNKS, NARROW, REST, alike=False)
    batch = Rollout.of(instance, sampler=sampler, padding=findings.seed)
    tokens = MANY * WHOLE_CHUNKS
    # A number that the loss states, as `min_tokens=4096`, may be all that is in the way: `kltest.checks.cuts` tells it.
    others = with_larger_numbers(findings.loss, tokens, 10 * tokens)
    if any(_apart(findings, Caller(loss, batch), MANY) for loss in (findings.loss, *others)):
        return _of_long_lengths(findings, batch)
    return Found(
        f"The rows of smaller batches, of few tokens, are treated apart. In a batch of {MANY} rollouts of "
        f"{WHOLE_CHUNKS} tokens, with log-ratios of a token of up to 4, the gradient of a row is not its share of what "
        "it gives alone."
    )


def _of_long_lengths(findings: Findings, batch: Rollout) -> Found | None:
    """Put rollouts of very different lengths into one batch, if the loss lets lengths differ at all."""
    if VARYING not in {row.environment for row in findings.rows}:
        return None
    lengths = torch.tensor(np.geomspace(1, WHOLE_CHUNKS, MANY).round().astype(int))
    live = torch.arange(WHOLE_CHUNKS) < lengths[torch.arange(len(batch)) % MANY][:, None]
    cut = batch.replace(mask=batch.peek("mask") * live)
    if _apart(findings, Caller(findings.loss, cut), MANY):
        return None
    return Found(
        f"The rows of smaller batches, of few tokens, are treated apart. In a batch of {MANY} rollouts of 1 to "
        f"{WHOLE_CHUNKS} tokens the gradient of a row is not its share of what it gives alone."
    )


def noisier(findings: Findings) -> Found | None:
    """Return a coupling that leaves the expected gradient as it is: KL206, where KL204 reports the others."""
    found = examine_larger(findings)
    return found if found and found.level == "warning" else None


def _caller(findings: Findings, sampler: str, times: tuple[float, float] = NEAR) -> Caller:
    instance = farther(instances(VARYING, findings.seed)[0], *times)
    return Caller(findings.loss, Rollout.of(instance, sampler=sampler, padding=findings.seed))


def _apart(findings: Findings, caller: Caller, many: int) -> bool:
    """True if each row of a batch gives its share of what it gives alone; sizes that the loss refuses are left out.

    Rows are all kinds of rollouts, then all alike but one, as far off the batch's mean as a row can be.
    """
    order = np.random.default_rng(findings.seed).permutation(len(caller.base))
    for rows in (np.resize(order, many), _one_unlike(caller, many)):
        with suppress(KltestError):
            caller.look(rows.tolist())
            findings.reach.rows = max(findings.reach.rows, many)
    return caller.reduction != "coupled"


def _one_unlike(caller: Caller, many: int) -> np.ndarray:
    """Rows of a batch: the rollout whose log-ratio is the largest, and one with a small one again and again."""
    base = caller.base
    log_ratios = (base.peek("logp") - base.peek("ref_logp")).detach() * base.peek("mask")
    order = np.argsort(np.abs(log_ratios.sum(dim=1).numpy()), kind="stable")
    rows = np.full(many, order[len(order) // 4])
    rows[many // 2] = order[-1]
    return rows


def _words(many: int, times: tuple[float, float] = NEAR) -> str:
    which = "smaller batches" if times == NEAR else "smaller batches, or of milder rollouts,"
    where = "" if times == NEAR else f", with log-ratios {times[0]:g} and {times[1]:g} times as large as elsewhere,"
    return (
        f"The rows of {which} are treated apart. In a batch of {many}{where} the gradient of a row is not its share of "
        "what it gives alone"
    )


def _coupled(findings: Findings, row: Row, many: int, times: tuple[float, float] = NEAR) -> Found:
    """Tell whether the expected gradient of a batch of this size, with rows that are coupled, is still right.

    Log-ratios in its environments are as many `times` as large as in the usual ones.
    """
    words = _words(many, times)
    weight = _weight_of_positions(findings, row.sampler, many, times)
    if weight is None:
        try:
            weight = 1.0 - _bias(findings, row, many, VARYING, times)
        except KltestError:
            # There are too many batches to measure. Of fewer rows only if their order counts, as in no right loss.
            with suppress(KltestError):
                if many in LARGEST and _bias(findings, row, many, times=times) <= limit(findings):
                    why = f"{words}; in a bandit the expected gradient is right, and elsewhere it was not measured"
                    return Found(why, "inconclusive", level="error")
            return Found(f"{words}.")
    if abs(weight - 1) <= limit(findings):
        return Found(f"{words}; the expected gradient is the same.", level="warning")
    return Found(f"{words}: the expected gradient is off by {abs(weight - 1):.2g} of it.")


def _weight_of_positions(findings: Findings, sampler: str, many: int, times: tuple[float, float]) -> float | None:
    """Total weight of a row over all places of a batch, 1 if it is right; None if rows have different ones."""
    caller = _caller(findings, sampler, times)
    caller.look([0, 1])
    # From the shortest to the longest, so that a row that is dropped for its length is not one like the others.
    by_length = np.argsort(caller.base.peek("mask").sum(dim=1).numpy(), kind="stable")
    weights = [_weight(findings, caller, rows) for rows in (evenly(by_length, many), _one_unlike(caller, many))]
    known = [weight for weight in weights if weight is not None]
    return max(known, key=lambda weight: abs(weight - 1)) if len(known) == len(weights) else None


def _weight(findings: Findings, caller: Caller, rows: np.ndarray) -> float | None:
    """Total weight of a row of one batch over its places."""
    many = len(rows)
    own = np.concatenate([as_array(caller.single(row), caller.base.take([row])) for row in rows.tolist()])
    total = np.zeros_like(own)
    for shift in range(many):
        shifted = np.roll(rows, shift)
        total += np.roll(as_array(caller.call(shifted), caller.base.take(shifted)), -shift, axis=0)
    weight = nearest_multiple(total, own)
    if apart(total, weight * own) > limit(findings):
        return None
    return weight if "mean" in caller.shares else weight / many


def _bias(
    findings: Findings, row: Row, many: int, environment_name: str = "bandit", times: tuple[float, float] = NEAR
) -> float:
    """Relative bias of the expected gradient over all batches of this size, of the fewest rollouts."""
    generator = np.random.default_rng(findings.seed)
    make, contexts = (partial(ragged, 2, 2), 2) if environment_name == VARYING else (partial(bandit, 2), 1)
    environment = make(reward=generator.standard_normal((contexts, 2)))
    instance = farther(Instance.draw(environment, findings.seed, distance=1.0), *times)
    return bias(findings, replace(row, batch=many), instance)


def _of_other_groups(findings: Findings, row: Row) -> Found | None:
    """Groups of other sizes, unless one was asked for: that is the only one that it has to be right at."""
    return None if findings.measure.sizes.requested else _in_expectation(findings, row, GROUPS, "groups")


def _in_expectation(findings: Findings, row: Row, sizes: Sequence[int], what: str = "batches") -> Found | None:
    """Compare with the declared gradient at each size, if it is the declared one at the size that was graded."""
    allowed = TOLERANCES[findings.observed.dtype].groups
    if _bias(findings, row, row.batch) > allowed:
        return None
    for many in sizes:
        # Too many, since the loss depends on the order of rows; or a size of groups that it does not take.
        with suppress(KltestError if what == "groups" else InvalidEnvironmentError):
            if (off := _bias(findings, row, many)) > allowed:
                return Found(
                    f"In {what} of {many} the expected gradient is off by {off:.2g} of the declared one, in a bandit "
                    f"with two actions; in {what} of {row.batch} it is right."
                )
    return _in_samples(findings, row, what)


def _in_samples(findings: Findings, row: Row, what: str) -> Found | None:
    """Compare with the declared gradient in samples of rollouts of different lengths, if one size was not asked for.

    Noise may grow with the batch: it goes as far as samples decide, and a note says where they do not.
    """
    measure, environments = findings.measure, {each.environment for each in findings.rows}
    if measure.sizes.requested or findings.observed.dtype == AVERAGED or VARYING not in environments:
        return None
    for many in SIZES_IN_SAMPLES[what]:
        instance = instances(VARYING, findings.seed, many if measure.sizes.grouped else None)[0]
        try:
            off = measure.distance(replace(row, batch=many), instance, SAMPLED)
        except KltestError:  # it does not take so many
            continue
        where = f"In samples of {what} of {many} rollouts of different lengths the expected gradient is off by"
        if off.low > SAMPLED:
            return Found(f"{where} about {off.value:.2g} of the declared one; in {what} of {row.batch} it is right.")
        if off.high > SAMPLED:
            findings.notes.append(f"{where} between {off.low:.2g} and {off.high:.2g} of the declared one: undecided.")
            return None
        findings.reach.rows = max(findings.reach.rows, many)
    return None


def _groups(findings: Findings, row: Row) -> Found | None:
    for count in range(2, MANY // row.batch + 1):
        try:
            apart = groups_apart(findings, [row.batch] * count)
        except KltestError:  # it takes one group a call, or as many as it likes
            return None
        if not apart and count > 2:
            return Found(
                f"Two groups in one call are treated apart. In one of {count} groups, {count * row.batch} rows, the "
                "gradient of a group is not its share of what it gives alone."
            )
        if not apart:
            return None
        findings.reach.rows = max(findings.reach.rows, count * row.batch)
    return _unequal_groups(findings, row.batch) if "group" in findings.observed.uses else None


def _unequal_groups(findings: Findings, size: int) -> Found | None:
    """Put a group and one with a rollout more into one call, as filters of rollouts leave them."""
    for sizes in ((size, size + 1), (size + 1, size)):
        with suppress(KltestError):  # it takes groups of one size
            if not groups_apart(findings, sizes):
                return Found(
                    f"Groups of one size in one call are treated apart. In a call of a group of {sizes[0]} and one of "
                    f"{sizes[1]} rollouts the gradient of a group is not its share of what it gives alone."
                )
    return None


def groups_apart(findings: Findings, sizes: Sequence[int]) -> bool:
    """True if each of several groups in one call gives its share of what it gives alone.

    That is its share of the groups or of the rows, of a mean, or all of it, of a sum.
    """
    largest, generator = max(sizes), np.random.default_rng(len(sizes))
    fixture = GroupFixture(findings.measure, instances(VARYING, findings.seed, largest)[0], largest, findings.seed)
    rows = [generator.integers(len(fixture.instance.paths), size=size) for size in sizes]
    rewards = [[float(place <= number % size) for place in range(size)] for number, size in enumerate(sizes)]
    groups = np.arange(len(sizes)).repeat(sizes).tolist()
    whole = fixture.kl_part(fixture.rollout(np.concatenate(rows), [one for paid in rewards for one in paid], groups))
    alone = np.concatenate(
        [fixture.kl_part(fixture.rollout(one, paid)) for one, paid in zip(rows, rewards, strict=True)]
    )
    of_rows = (sum(sizes) / np.repeat(sizes, sizes))[:, None, None]
    return any(apart(share * whole, alone) <= limit(findings) for share in (len(sizes), of_rows, 1))

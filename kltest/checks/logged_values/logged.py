"""Experiments on the KL that a loss logs: what it estimates, and what it depends on besides.

A metric may be any of the three numbers that are called the KL. What moves it, and is neither the policy nor the
reference, is something that it was multiplied by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, Literal

import numpy as np
import torch

from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError, TargetError
from kltest.identify.findings import Findings, Row
from kltest.identify.instances import instances
from kltest.identify.values import NAMES, TOLERANCE, Reported
from kltest.rollout import Rollout
from kltest.truth import VALUES, value

# Rollouts of one call: as many as a usual group, so that losses that want groups take them.
BATCH = 4
ALL = list(range(BATCH))
# A metric that something has no influence on comes out the same to the last bit; room for another order of adding up.
MOVED = 1e-6
SYMBOLS = {"kl": "E[Σu]", "kl_per_token": "E[Σu]/E[L]", "mean_of_token_means": "E[Σu/L]"}

Kind = Literal["sampler", "reward", "coefficient", "constant"]


@dataclass(frozen=True)
class Factor:
    """Something that the metric is multiplied by, in words."""

    kind: Kind
    words: str


def no_kl(findings: Findings) -> str | None:
    """Why there is nothing to look at, where no call leaves a KL of its own."""
    return findings.once(_no_kl) or None


def _no_kl(findings: Findings) -> str:
    for environment in findings.environments:
        base = batch(instances(environment, findings.seed)[0], findings.seed)
        try:
            first, _, again = (findings.loss.returned(base.take(rows)).metric for rows in (ALL, ALL[:-1], ALL))
        except KltestError:  # whatever is wrong with this batch is told where the loss is measured
            continue
        if first is None or again is None:
            return "the loss logs no KL"
        if _moved(first.numpy(), again.numpy()):
            return "the KL that the loss logs depends on earlier calls, so that nothing is known of one"
        return ""
    return "the loss logs no KL"


def batch(instance: Instance, padding: int, sampler: str = "current") -> Rollout:
    """A few rollouts of an instance, the shortest and the longest among them."""
    by_length = np.argsort(instance.paths.lengths, kind="stable")
    spread = np.linspace(0, len(by_length) - 1, BATCH).round().astype(int)
    return Rollout.of(instance, sampler=sampler, padding=padding).take(by_length[spread])


def logged_rows(findings: Findings, sampler: str = "current") -> list[Row]:
    """The row of each world that was asked for in which a metric is known."""
    found = []
    for environment in findings.environments:
        try:
            measured = findings.measure.rows(environment, sampler)
        except KltestError:
            continue
        found += [row for row in measured if row.reported is not None and row.reported.is_metric][-1:]
    return found


def shown(row: Row) -> Reported:
    """What the loss logs in a row of `logged_rows`."""
    assert row.reported is not None
    return row.reported


# --------------------------------------------------------------------------------------------- padding


def only_one_length(findings: Findings) -> str | None:
    """Why padding cannot be seen, where no rollout has any."""
    padded = any(instances(environment, findings.seed)[0].paths.padded for environment in findings.environments)
    return None if padded else "only worlds without padding were graded"


def moves_with_padding(findings: Findings) -> str:
    """A sentence with the numbers, where the metric changes with what stands at padded positions; else nothing."""
    for environment in findings.environments:
        instance = instances(environment, findings.seed)[0]
        if not instance.paths.padded:
            continue
        first, second = (_metric(findings, batch(instance, findings.seed + salt)) for salt in (0, 1))
        if _moved(first, second):
            return (
                f"In {environment} the same {BATCH} rollouts log {_number(first)} with one filling of their padded "
                f"positions and {_number(second)} with another, both finite and legal."
            )
    return ""


# --------------------------------------------------------------------------------------------- factors


def factors(findings: Findings) -> list[Factor]:
    """What the metric is multiplied by."""
    instance = instances(findings.environments[-1], findings.seed)[0]
    base = batch(instance, findings.seed, "stale")
    found = [_by_reward(findings, base), _by_coefficient(findings, base), _by_constant(findings)]
    if not any(found):
        found = [_by_sampler(findings, instance, base)]
    return [factor for factor in found if factor is not None]


def _by_reward(findings: Findings, base: Rollout) -> Factor | None:
    random = torch.Generator().manual_seed(findings.seed)
    other = {name: torch.randn(BATCH, generator=random, dtype=torch.float64) for name in ("reward", "advantage")}
    before, after = _metric(findings, base), _metric(findings, base.replace(**other))
    if not _moved(before, after):
        return None
    words = (
        f"the task's reward: {BATCH} rollouts log {_number(before)} with one reward and {_number(after)} with another"
    )
    return Factor("reward", words)


def _by_coefficient(findings: Findings, base: Rollout) -> Factor | None:
    if not findings.loss.takes_beta:
        return None
    beta = findings.loss.beta(base)
    before, after = _metric(findings, base), _metric(findings, base, 2 * beta)
    if not _moved(before, after):
        return None
    words = (
        f"the coefficient β: {BATCH} rollouts log {_number(before)} at β = {beta:g}, {_number(after)} at {2 * beta:g}"
    )
    return Factor("coefficient", words)


def _by_constant(findings: Findings) -> Factor | None:
    rows = [row for row in logged_rows(findings) if shown(row).row.matches is None]
    known = {row.environment: found for row in rows if (found := shown(row).factors)}
    if not known:
        return None
    # In a world of one length the names are multiples of each other: the factor that fits most worlds is meant.
    candidates = [(name, factor) for found in known.values() for name, factor in found.items()]
    name, factor = max(candidates, key=lambda pair: sum(_has(found, *pair) for found in known.values()))
    fitting = [environment for environment, found in known.items() if _has(found, name, factor)]
    where = ", ".join(fitting)
    if isclose(factor, -1.0, rel_tol=10 * TOLERANCE):
        words = f"−1: it is minus the KL, −{SYMBOLS[name]}, in {where}; the sign of the log-ratio is turned"
    else:
        turned = " that turns its sign" if factor < 0 else ""
        words = f"a constant{turned}: it is {_signed(factor)} · {SYMBOLS[name]} in {where}"
    for environment, found in known.items():
        if environment not in fitting:
            other, times = next(iter(found.items()))
            words += f", and {_signed(times)} · {SYMBOLS[other]} in {environment}"
    return Factor("constant", words)


def _has(found: dict[str, float], name: str, factor: float) -> bool:
    return name in found and isclose(found[name], factor, rel_tol=10 * TOLERANCE)


def _by_sampler(findings: Findings, instance: Instance, base: Rollout) -> Factor | None:
    """A ratio to the sampler: right on-policy, moved by the sampler and by the policy, and wrong off-policy.

    What the policy does not move is the sampler's own KL, a number of its own right; what is right off-policy is
    weighted as it should be.
    """
    if any(shown(row).row.matches is None for row in logged_rows(findings)):
        return None
    noise = np.random.default_rng(findings.seed).standard_normal((2, *instance.policy.shape))
    sampler = replace(instance, sampler=table(instance.sampler + 0.3 * noise[0]))
    policy = replace(instance, policy=table(instance.policy + 0.3 * noise[1]))
    before = _metric(findings, base)
    after = _metric(findings, _with(base, sampler, findings.seed, "old_"))
    if not _moved(before, after) or not _moved(before, _metric(findings, _with(base, policy, findings.seed, ""))):
        return None
    wrong = [row for row in logged_rows(findings, "stale") if shown(row).row.matches is None and shown(row).judged]
    if not wrong:
        return None
    worst = max(wrong, key=lambda row: shown(row).row.relative_bias or 0.0)
    return Factor(
        "sampler",
        f"a ratio to the sampler: {BATCH} rollouts log {_number(before)} and, when nothing but the sampler's log-probs "
        f"changes, {_number(after)}; over rollouts of the sampler's it is no KL either (off by "
        f"{shown(worst).row.relative_bias:.2g} of it in {worst.environment})",
    )


def _with(base: Rollout, instance: Instance, padding: int, prefix: str) -> Rollout:
    """The same batch with the log-probs of one policy taken from another instance."""
    other = batch(instance, padding, "stale")
    return base.replace(**{f"{prefix}{name}": other.peek(f"{prefix}{name}").detach() for name in ("logp", "logits")})


# ------------------------------------------------------------------------------------------- what it is


def unknown(findings: Findings) -> str:
    """Why the metric was compared in no world at all; nothing where it was."""
    if any(shown(row).judged for row in logged_rows(findings)):
        return ""
    return "what it logs for a rollout could not be told: it takes larger batches, or there are too many rollouts"


def no_kl_at_all(findings: Findings) -> list[str]:
    """A sentence for each world in which the metric is no KL under a current sampler, whatever the cause."""
    return [
        _sentence(row, findings.seed)
        for row in logged_rows(findings)
        if shown(row).row.matches is None and shown(row).judged
    ]


def _sentence(row: Row, seed: int) -> str:
    found = shown(row)
    truths = ", ".join(f"{SYMBOLS[name]} = {found.truths[0][name]:.6g}" for name in NAMES)
    bias = found.row.relative_bias or 0.0
    words = f"In {row.environment} it is {found.means[0]:.6g} where {truths} (off by {bias:.2g} of the nearest)"
    name = _named(found, row.environment, seed) if row.batch == 1 else None
    if name is None and (minus := [n for n, factor in found.factors.items() if isclose(factor, -1.0, rel_tol=1e-3)]):
        return f"{words}: it is minus {SYMBOLS[minus[0]]}."
    return words + (f": it is {VALUES[name]}." if name else ".")


def _named(found: Reported, environment: str, seed: int) -> str | None:
    """Another number with a name that the metric is, on every instance."""
    drawn = instances(environment, seed)
    for name in VALUES:
        if name in NAMES or name.endswith("@sampler"):
            continue
        known = [value(name, instance) for instance in drawn]
        if np.allclose(found.means, known, rtol=TOLERANCE, atol=1e-12):
            return name
    return None


def _metric(findings: Findings, rollout: Rollout, beta: float | None = None) -> np.ndarray:
    """What is logged for a batch; a number a token at live positions only. TargetError where nothing is."""
    metric = findings.loss.returned(rollout.replace(), beta).metric
    if metric is None:
        raise TargetError(f"{findings.loss.name} logs a KL in some calls and none in others")
    return np.where(rollout.peek("mask").numpy() != 0, metric.numpy(), 0.0) if metric.dim() == 2 else metric.numpy()


def _moved(one: np.ndarray, other: np.ndarray) -> bool:
    # Of NaN and infinity no size is to be taken: such numbers moved unless they are the same.
    size = float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
    return one.shape != other.shape or not np.allclose(one, other, rtol=0, atol=MOVED * size, equal_nan=True)


def _signed(number: float) -> str:
    return f"{number:.6g}".replace("-", "−")


def _number(metric: np.ndarray) -> str:
    """A metric of several rollouts as one number, as a log would show it."""
    rows = metric.sum(axis=1) if metric.ndim == 2 else metric
    return f"{float(rows.mean()):.4g}"


def demonstrate(
    world: SmallWorld, losses: Mapping[str, Callable[..., Any]], *, sampler: str = "current", **call: Any
) -> Demonstration:
    """What losses log in expectation in a small world, each under its name, beside the KL."""
    from kltest.loss.calling import bind
    from kltest.loss.outcome import Call
    from kltest.moments import exact

    instance = world.instance()
    rows: list[tuple[str | float, ...]] = [("KL(π‖ref)", value("kl", instance), 0.0)]
    for name, function in losses.items():
        found = exact(bind(function, Call(**call), name=name), instance, sampler).metric
        assert found is not None
        rows.append((name, found.mean, found.std))
    return Demonstration(world.words(), ("logged", "expectation", "standard deviation"), tuple(rows))


def demonstrate_padding(
    world: SmallWorld, losses: Mapping[str, Callable[..., Any]], fillings: Sequence[float]
) -> Demonstration:
    """What losses log in expectation for several values of logp − ref_logp at padded positions."""
    from kltest.loss.calling import bind

    instance = world.instance()
    rollout, weights = Rollout.of(instance), instance.rollout_weights("current")
    live, rows = rollout.peek("mask") != 0, range(len(weights))
    table_rows: list[tuple[str | float, ...]] = [("KL(π‖ref)", *[value("kl", instance)] * len(fillings))]
    for name, function in losses.items():
        loss, means = bind(function, name=name), []
        for filling in fillings:
            ref_logp = rollout.peek("ref_logp")
            filled = rollout.replace(logp=rollout.peek("logp").detach().where(live, ref_logp + filling))
            logged = [loss.returned(filled.take([row])).metric for row in rows]
            means.append(sum(w * float(m) for w, m in zip(weights, logged, strict=True) if m is not None))
        table_rows.append((name, *means))
    columns = ("expectation of what is logged", *(f"padding: u = {filling:g}" for filling in fillings))
    return Demonstration(world.words(), columns, tuple(table_rows))

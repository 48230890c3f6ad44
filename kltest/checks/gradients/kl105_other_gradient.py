"""KL105: the gradient is not the declared one, and no other check accounts for it."""

from collections.abc import Sequence
from contextlib import suppress

from kltest.checks.approximations import kl701_top_k_bias, kl703_truncated_sampler
from kltest.checks.approximations.kl702_temperature_mismatch import explains as temperature
from kltest.checks.check import Found
from kltest.checks.cuts import cuts
from kltest.checks.gradients.kl103_wrong_sign import other_reading
from kltest.checks.groups.rewards import rewards
from kltest.checks.hygiene.kl504_dead_zone import examine as dead_zones
from kltest.checks.sequences.lengths import of_lengths_alone
from kltest.checks.stress import cut_off, late, many_in_samples, right_in_long_rollouts, wrong
from kltest.checks.surroundings import elsewhere
from kltest.checks.zeros import zeros
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row, when_current
from kltest.moments.tolerances import Tolerances
from kltest.names import listed

HEADS = (kl701_top_k_bias.examine, kl703_truncated_sampler.examine)


def explains(row: Row, findings: Findings) -> bool:
    """An entropy beside the KL, or a combination from a reward that lacks the declared gradient.

    `verdict` adds the rows that no check explains.
    """
    if row.entropy:
        return not temperature(row, findings)
    if findings.placement == "loss" or row.identified is None or len(row.identified) < 2:
        return False
    plain, expected = when_current(row.identified), when_current(row.expected)
    return any(abs(plain.get(name, 0.0) - factor) > Tolerances.factor for name, factor in expected.items())


def remark(findings: Findings) -> str:
    """Say if another reading is right, or if what has no name is a function of the lengths of rollouts."""
    return " ".join(filter(None, (other_reading(findings), of_lengths_alone(findings))))


def summary(rows: Sequence[Row], findings: Findings) -> str:
    """Say where the gradient is another one, and by how much, and where it is right."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(_kind(row), []).append(row)
    wrong = [
        f"{kind} on {_places(same)}, {max(row.relative_bias for row in same):.2g} off" for kind, same in kinds.items()
    ]
    right = [row for row in findings.rows if row.agrees]
    return f"The gradient is {', and '.join(wrong)}" + (f"; right on {_places(right)}" if right else "")


def _kind(row: Row) -> str:
    if row.identified is None:
        return "unnamed"
    if not row.entropy:
        return "another named one"
    return f"one with an entropy {'bonus' if row.entropy < 0 else 'penalty'}"


def _places(rows: Sequence[Row]) -> str:
    found: dict[str, list[str]] = {}
    for row in rows:
        how = [row.sampler] if row.sampler != "current" else []
        how += [f"batches of {row.batch}"] if row.batch > 1 else []
        how += [row.branch] if row.branch else []
        found.setdefault(", ".join(how), []).append(row.environment)
    return ", ".join(listed(list(dict.fromkeys(names))) + f" ({how})" * bool(how) for how, names in found.items())


def examine(findings: Findings) -> Found | None:
    """A gradient that is the declared one in mild environments, or short rollouts, only.

    KL504 reports a clamp, KL701 and KL703 a loss that distinguishes the likeliest tokens only.
    """
    dead = None
    with suppress(KltestError):
        dead = dead_zones(findings)

    def too_far() -> bool:
        return dead is not None and dead.level == "error"

    def has_head() -> bool:
        return any(head(findings) for head in HEADS)

    experiments = (
        lambda: None if dead else _found(findings, "less far apart"),
        lambda: None if too_far() else _found(findings, "near-deterministic"),
        lambda: None if has_head() else _found(findings, "many tokens"),
        lambda: None if has_head() else many_in_samples(findings),
        lambda: None if too_far() or has_head() else _said(cut_off(findings)),
        lambda: late(findings, "KL105"),
    )
    failure: KltestError | None = None
    for experiment in experiments:
        try:
            if found := experiment():
                return found
        except KltestError as error:
            failure = failure or error
    if failure:
        raise failure
    others = [one for one in (rewards(findings), cuts(findings), elsewhere(findings), zeros(findings)) if one]
    if not others and dead is None and (drifted := _drifted(findings)):
        return drifted
    return min(others, key=lambda one: one.level == "warning", default=None)


def _drifted(findings: Findings) -> Found | None:
    """A warning, and nothing where the loss refuses rollouts that drifted: it was tried as far as it goes."""
    words = ""
    with suppress(KltestError):
        words = wrong(findings, "drifted rollouts") if right_in_long_rollouts(findings) else ""
    return Found(words, level="warning") if words else None


def _found(findings: Findings, name: str) -> Found | None:
    return _said(wrong(findings, name))


def _said(words: str) -> Found | None:
    return Found(words) if words else None


def absolute(logp, ref_logp):
    return (logp - ref_logp).abs()

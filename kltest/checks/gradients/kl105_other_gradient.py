"""KL105: the gradient is not the declared one, and no other check accounts for it."""

from kltest.checks.check import Found
from kltest.checks.far_apart import differs_much
from kltest.checks.hygiene.kl504_dead_zone import examine as dead_zones
from kltest.checks.other_reading import other_reading
from kltest.checks.sequences.long_rollouts import message_of
from kltest.identify.findings import Findings, Row, when_current

remark = other_reading


def explains(row: Row, findings: Findings) -> bool:
    """A combination from a reward that lacks the declared gradient; `verdict` adds the rows that no check explains."""
    if findings.placement == "loss" or row.identified is None or len(row.identified) < 2:
        return False
    plain, expected = when_current(row.identified), when_current(row.expected)
    return any(abs(plain.get(name, 0.0) - factor) > 1e-3 for name, factor in expected.items())


def examine(findings: Findings) -> Found | None:
    """A gradient that is the declared one in mild environments, or short rollouts, only; KL504 reports a clamp."""
    if late := message_of("KL105", findings):
        return Found(late)
    away = differs_much(findings)
    return Found(away) if away and not dead_zones(findings) else None


def absolute(logp, ref_logp):
    return (logp - ref_logp).abs()

"""KL103: the term pushes the policy away from the reference."""

from kltest.checks.other_reading import other_reading
from kltest.identify.findings import Findings, Row, local_form, proportion, when_current

remark = other_reading


def explains(row: Row, findings: Findings) -> bool:
    named = (row.identified, when_current(row.identified))
    meant = [row.expected, local_form(row.expected)]
    if row.expected.keys() & {"reverse_kl", "local_reverse_kl"}:
        meant += [{"forward_kl": 1.0}, {"local_forward_kl": 1.0}]
    return any((proportion(found, target) or 0) < 0 for target in meant for found in named)


def subtracted(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return -log_ratio.square() / 2

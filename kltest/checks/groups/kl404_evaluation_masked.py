"""KL404: in groups of one the term is zero, without an error."""

from kltest.checks.batches import group_fixture, limit, norm
from kltest.checks.check import Found
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.loss.placement import ROW_FIELDS

# Number of rollouts that are tried as groups of their own.
SINGLES = 3


def examine(findings: Findings) -> Found | None:
    """Report what is zero in groups of one rollout but not when the same rollout is repeated as a whole group.

    A baseline taken from the group leaves nothing of a group of equal rollouts either. So their rewards differ, and
    nothing else does: a mask on tied rewards lets such a group through.
    """
    if not (findings.observed.coupled or findings.observed.uses & ROW_FIELDS):
        return None
    fixture, small = group_fixture(findings), limit(findings)
    pairs: dict[str, list[tuple[float, float]]] = {"KL term": [], "logged KL": []}
    for row in fixture.different[:SINGLES]:
        try:
            alone = [fixture.rollout([row], [reward]) for reward in (0.0, 1.0)]
            together = fixture.rollout([row] * fixture.size, fixture.untied)
            pairs["KL term"].append((max(norm(fixture.kl_part(one)) for one in alone), norm(fixture.kl_part(together))))
            metrics = [findings.measure.differentiate(one).outcome.metric for one in (*alone, together)]
        except KltestError:  # a loss that fails on one rollout, or on equal ones, is not silent
            return None
        sizes = [float(metric.abs().max()) for metric in metrics if metric is not None]
        if len(sizes) == len(metrics):
            pairs["logged KL"].append((max(sizes[:2]), sizes[2]))
    silent = [what for what, found in pairs.items() if found and all(b > 0 and a <= small * b for a, b in found)]
    if not silent:
        return None
    return Found(
        f"In a group of one rollout the {' and the '.join(silent)} is zero, for every rollout tried; it is not if the "
        "same rollout is repeated as a group whose rewards differ."
    )

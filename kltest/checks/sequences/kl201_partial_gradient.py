"""KL201: only the token's own KL is differentiated."""

from kltest.checks.sequences.lengths import only_one_token
from kltest.identify.findings import Findings, Row, local_form, proportion, when_current


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a multiple of the declared gradient's local form, prefixes held fixed."""
    partial = local_form(row.expected)
    if partial == row.expected:
        return False
    return proportion(when_current(row.besides_entropy), partial) is not None


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if a local form was declared or rollouts have one token, else None."""
    plain = when_current(findings.expect)
    if local_form(plain) == plain:
        return "the declared target holds the prefixes fixed itself"
    return only_one_token(findings)


def token_by_token(logp, ref_logp):
    return (logp - ref_logp).square() / 2

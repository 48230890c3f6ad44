"""KL201: only the token's own KL is differentiated."""

from kltest.checks.sequences.lengths import only_one_token
from kltest.identify.findings import Findings, Row, local_form, proportion, when_current


def explains(row: Row, findings: Findings) -> bool:
    partial = local_form(row.expected)
    if partial == row.expected:
        return False
    return proportion(when_current(row.identified), partial) is not None


def moot(findings: Findings) -> str | None:
    plain = when_current(findings.expect)
    if local_form(plain) == plain:
        return "the declared target holds the prefixes fixed itself"
    return only_one_token(findings)


def token_by_token(logp, ref_logp):
    return (logp - ref_logp).square() / 2

"""KL201: only the token's own KL is differentiated."""

from kltest.checks.sequences.lengths import only_one_token
from kltest.identify.findings import Findings, Row, local_form, proportion, without_sampler


def explains(row: Row, findings: Findings) -> bool:
    partial = local_form(row.expected)
    if partial == row.expected:
        return False
    return proportion(without_sampler(row.identified), partial) is not None


def moot(findings: Findings) -> str | None:
    plain = {name.removesuffix("@sampler"): coefficient for name, coefficient in findings.expect.items()}
    if local_form(plain) == plain:
        return "the declared target holds the prefixes fixed itself"
    return only_one_token(findings)


def token_by_token(logp, ref_logp):
    return (logp - ref_logp).square() / 2

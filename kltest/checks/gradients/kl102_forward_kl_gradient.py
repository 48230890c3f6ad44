"""KL102: the gradient is the other KL's."""

from kltest.identify.findings import Findings, Row, without_sampler

FORWARD = frozenset({"forward_kl", "local_forward_kl"})


def explains(row: Row, findings: Findings) -> bool:
    plain = without_sampler(row.identified)
    return plain is not None and len(plain) == 1 and set(plain) <= FORWARD


def moot(findings: Findings) -> str | None:
    declared = {name.removesuffix("@sampler") for name in findings.expect}
    return "a forward KL was declared" if declared & FORWARD else None


def k3_as_loss(logp, ref_logp):
    return (ref_logp - logp).exp() - 1 + (logp - ref_logp)

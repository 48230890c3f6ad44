"""KL703: the drawn token's log-prob is taken under a distribution that was cut to its likeliest actions, or the tokens
come from such a distribution, or from an engine whose log-probs are not the policy's."""

from functools import partial

from kltest.checks.approximations.heads import accounts_for, beyond_the_usual_environments
from kltest.identify.case import left_out
from kltest.identify.findings import Findings, Row
from kltest.samplers import ENGINE, TRUNCATED

FROM_ENGINE = "the engine that draws has other log-probs than those that the ratio is taken to"


def explains(row: Row, findings: Findings) -> str | None:
    """Describe what the sampler does to a row that is right where the policy draws; else how its own side is cut."""
    kind = row.sampler.partition(":")[0]
    if kind in (ENGINE, TRUNCATED) and row.wrong and findings.measure.right_when_current(row):
        return "right where the policy draws; " + (left_out(row.case) if kind == TRUNCATED else FROM_ENGINE)
    return accounts_for(row, findings, drawn=True)


examine = partial(beyond_the_usual_environments, drawn=True)


def under_the_truncated_policy(logits, ref_logp, tokens):
    logits = logits.log_softmax(-1)
    kept = logits >= logits.topk(2, dim=-1).values[..., -1:]
    log_probs = logits.where(kept, float("-inf")).log_softmax(-1)
    logp = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (logp.where(logp.isfinite(), ref_logp) - ref_logp).square() / 2


def under_the_whole_policy(logits, ref_logp, tokens, mask):
    live = mask != 0
    log_probs = logits.where(live.unsqueeze(-1), 0.0).log_softmax(-1)
    logp = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    log_ratio = (logp - ref_logp).where(live, 0.0).sum(-1)
    return log_ratio.square() / 2

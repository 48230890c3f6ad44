"""KL703: the drawn token's log-prob is taken under a distribution that was cut to its likeliest actions."""

from functools import partial

from kltest.checks.approximations.heads import accounts_for, beyond_the_usual_environments

explains = partial(accounts_for, drawn=True)
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

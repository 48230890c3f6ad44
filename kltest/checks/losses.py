"""Losses that several checks show. In those that are right padding is cut out before any arithmetic."""

# mypy: disable-error-code="no-untyped-def"


def squared_sum(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


def squared_sum_with_ratio(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1).exp().detach()
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return ratio * log_ratio.square() / 2


def prefix_ratio(logp, ref_logp, old_logp, mask):
    live = mask != 0
    ratio = (logp - old_logp).where(live, 0.0).cumsum(-1).exp().detach()
    cost = ratio * (logp - ref_logp).where(live, 0.0).detach()
    return cost * logp.where(live, 0.0).cumsum(-1)


def rao_blackwell(logp, logits, ref_logits, mask):
    live = mask != 0
    log_pi, log_ref = (part.where(live.unsqueeze(-1), 0.0).log_softmax(-1) for part in (logits, ref_logits))
    next_kl = (log_pi.exp() * (log_pi - log_ref)).sum(-1).where(live, 0.0)
    following = next_kl.detach().flip(-1).cumsum(-1).flip(-1) - next_kl.detach()
    return (next_kl + following * logp.where(live, 0.0)).sum(-1)


def k1(logp, ref_logp):
    return logp - ref_logp


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - 1 + (logp - ref_logp)


def k1_as_reward_with_ratio(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1, keepdim=True).exp()
    return ratio * (logp - ref_logp)


def mean_over_tokens(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (log_ratio.square() / 2).sum() / mask.sum()


def masked_where_tied(logp, ref_logp, mask, rewards, group):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    differs = (rewards[:, None] != rewards) & (group[:, None] == group)
    return (log_ratio.square() / 2).where(differs.any(-1), 0.0)


def kept_where_tied(logp, ref_logp, mask, rewards, group):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


def logs_the_kl(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    penalty = log_ratio.square() / 2
    return penalty, {"kl": log_ratio.mean()}

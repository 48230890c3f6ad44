"""Grade a loss of your own and act on the verdict: `python examples/grade_my_loss.py`."""

import kltest


def penalty(logp, ref_logp, mask):
    """Half the squared log-ratio of the whole rollout: (B,)."""
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


def per_token(logp, ref_logp):
    """The same, token by token: (B, T)."""
    return (logp - ref_logp).square() / 2


for loss in (penalty, per_token):
    report = kltest.grade(loss)
    print(f"{loss.__name__}: {report.verdict}")
    for row in report.gradients:
        print(f"  {row.environment} ({row.sampler}): {row.identified}, relative bias {row.relative_bias:.1e}")

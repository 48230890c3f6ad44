"""Hold losses to their gradients in pytest, an item a check: `python -m pytest examples/test_my_losses.py`."""

import kltest


def sequence_kl(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


def token_kl(logp, ref_logp):
    return (logp - ref_logp).square() / 2


def expected_failed_checks(loss):
    """The token-level loss misses what a token does to later ones, on purpose."""
    return {"KL201": "token-level on purpose"} if loss is token_kl else {}


@kltest.parametrize_with_checks([sequence_kl, token_kl], expected_failed_checks=expected_failed_checks)
def test_kl(loss, check):
    check(loss)

"""Both KL penalties follow the gradients that they are meant to follow."""

import kltest
from tiny_rl.losses import sequence_kl, token_kl


def expected_failed_checks(loss):
    return {"KL201": "token-level on purpose: long answers"} if loss is token_kl else {}


@kltest.parametrize_with_checks([sequence_kl, token_kl], expected_failed_checks=expected_failed_checks)
def test_kl(loss, check):
    check(loss)

"""Parts of a loss beside its KL term: the policy part, and the whole, graded by the direction in which they ascend."""

from dataclasses import replace

from kltest.errors import UsageError
from kltest.identify.graded import fields_used, whole
from kltest.loss.calling import Loss

OF_REFERENCE = frozenset({"ref_logp", "ref_logits", "ref_topk_logp"})
GRADED = {
    "policy": "The policy part was graded, all of the loss but its KL term, by the direction in which it ascends",
    "all": "All of the loss was graded, by the direction in which it ascends",
}


def ascent(loss: Loss, part: str, seed: int) -> Loss:
    """Return the negative of a loss's policy part (it at β = 0), or of all of it (at β as given, else 1).

    Args:
        loss: A whole loss, or a registered policy loss; not a registered KL estimator.
        part: "policy" or "all".
        seed: Seed of the rollouts on which it is seen what the loss reads.

    Raises:
        UsageError: It is a KL term alone, is placed in the reward, or its KL term has no coefficient to take away.
    """
    if loss.spec is not None and loss.spec.part == "kl":
        raise UsageError(f"{loss.name} is a KL term and has no policy part; --part kl grades it")
    if loss.placement != "loss":
        raise UsageError(f"--part {part} grades a loss, and {loss.name} was placed in the {loss.placement}")
    reads = fields_used(loss, seed)
    if part == "policy" and not loss.takes_beta and reads & OF_REFERENCE:
        raise UsageError(
            f"{loss.name} reads {' and '.join(sorted(reads & OF_REFERENCE))} and takes no coefficient, so that its KL "
            "term cannot be taken away: make the coefficient a parameter (beta, kl_coef), or ask for --part all"
        )

    arguments = loss.arguments
    for name in [key for key, field in loss.fields.items() if field == "beta"]:
        arguments = arguments.with_value(name, 0.0 if part == "policy" else loss.fixed_beta or 1.0)
    record = replace(loss.record, reads_beta=False)
    direction = whole(loss, 0.0 if part == "policy" else None, sign=-1)
    return direction.changed(GRADED[part], arguments=arguments, fixed_beta=None, record=record)

"""KL506: the gradient goes to the reference or the sampler."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from kltest.checks.check import Check, Found

if TYPE_CHECKING:
    from kltest.counterexample.demonstration import Demonstration
    from kltest.identify.findings import Findings


def examine(findings: Findings) -> Found | None:
    from kltest.checks.hygiene import inputs

    return inputs.leak(findings)


def wrong_side(logp, ref_logp, mask):
    log_ratio = (logp.detach() - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


def right_side(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp.detach()).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


def demonstrate() -> Demonstration:
    import torch

    from kltest.checks.demonstrations import row
    from kltest.counterexample.demonstration import Demonstration

    columns, found = {"as written": wrong_side, "mended": right_side}, []
    for loss in columns.values():
        logp, ref_logp = (row((log(p),)).requires_grad_() for p in (0.8, 0.5))
        gradients = torch.autograd.grad(loss(logp, ref_logp, row((1.0,))), [logp, ref_logp], allow_unused=True)
        found.append([0.0 if gradient is None else float(gradient) for gradient in gradients])
    policy, reference = zip(*found, strict=True)
    return Demonstration(
        "one token, π = 0.8, ref = 0.5, both of networks that can be trained",
        ("", *columns),
        (("gradient at logp", *policy), ("gradient at ref_logp", *reference)),
    )


CHECK = Check(
    code="KL506",
    name="reference-not-detached",
    title="The gradient goes to the reference or the sampler instead of the policy",
    what=(
        "The loss switches on the gradient of log-probs that it was given as constants, or stops the gradient on the "
        "wrong side of a log-ratio: what the constant would receive is what the policy lacks."
    ),
    why=(
        "The reference is moved towards the policy, or nothing is moved at all. Where the reference is a copy with "
        "gradients, or shares its weights with the policy (adapters), the anchor drags."
    ),
    example=(
        "One token with π = 0.8 and ref = 0.5: the gradient of (ln π/ref)²/2 at the policy's log-prob should be "
        "ln 1.6 = 0.470004. With the policy detached it is 0, and the reference's log-prob gets −0.470004."
    ),
    fix=(
        "Compute the reference's and the sampler's log-probs under torch.no_grad(), and detach them, not the policy's, "
        "where a log-ratio is differentiated."
    ),
    sources=("PyTorch, Autograd mechanics: locally disabling gradient computation",),
    wrong=wrong_side,
    mended=right_side,
    demonstrate=demonstrate,
    examine=examine,
)

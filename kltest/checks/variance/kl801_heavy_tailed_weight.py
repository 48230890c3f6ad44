"""KL801: the weight of a rollout grows exponentially with a log-ratio.

The last token of one rollout is made unlikely under the policy, the reference or the sampler; everything else stays. If
the gradient grows like a power of the log-ratio, the rollout contributes less and less to E‖ĝ‖², since it is drawn less
and less. With e^(r·|log-ratio|) and r > 1/2 it contributes more the rarer it is: then most of the second moment is in
rollouts that are never drawn.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kltest.checks.batches import gradient, norm
from kltest.checks.check import Found
from kltest.checks.demonstrations import Cells, Demonstration, Losses
from kltest.counterexample.environment import SmallEnvironment
from kltest.environments import Instance
from kltest.environments.policies import softmax_gradient
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.identify.measure import Measure
from kltest.loss.calling import bind
from kltest.moments.differentiate import differentiate
from kltest.moments.projection import each_gradient
from kltest.rollout import SAMPLER_FIELDS, Rollout

# Log-ratios of the last token, beyond its own.
DISTANCES = (5.0, 10.0, 20.0)
# Rate r of e^(r·u). Between the two largest distances a power p grows 2^p-fold and e^(u/4) 12-fold, so that a faster
# growth is no power below the fourth.
EXPONENTIAL = 0.25
# Rollouts, as many as in a usual group, so that losses that need groups can be called.
BATCH = 4


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if no gradient reaches the policy, else None."""
    return "no gradient reaches the policy" if findings.observed.blocked else None


# Log-ratios driven to infinity by lowering the log-probs of some policies, given as prefixes of fields. On-policy the
# sampler is lowered with the policy.
DIRECTIONS = {
    "log π/ref → −∞": ("", "old_"),
    "log π/ref → ∞": ("ref_",),
    "log π/μ → ∞": ("old_",),
    "log π/μ → −∞": ("", "ref_"),
}


def examine(findings: Findings) -> Found | None:
    """Report directions in which a rollout's gradient grows exponentially, and faster than the rollout becomes rare."""
    off_policy = bool(findings.observed.uses & SAMPLER_FIELDS) and "stale" in findings.samplers
    rollout = Rollout.of(_instance(findings), padding=findings.seed).take(range(BATCH))
    mild = _size(findings.measure, rollout)
    distances, sentences = ", ".join(f"{distance:g}" for distance in DISTANCES), []
    for direction, prefixes in DIRECTIONS.items():
        if "μ" in direction and not off_policy:
            continue
        moved = [_lowered(rollout, prefixes, distance) for distance in DISTANCES]
        sizes = np.array([_size(findings.measure, one) for one in moved])
        if mild <= 0 or sizes.min() <= 0 or not np.isfinite(sizes).all():
            continue
        rates = np.diff(np.log(sizes)) / np.diff(DISTANCES)
        drawn = [float((one.peek("old_logp") - rollout.peek("old_logp"))[0].sum()) for one in moved]
        parts = np.exp(drawn) * (sizes / mild) ** 2
        if rates.min() > EXPONENTIAL and (np.diff(parts) > 0).all():
            grown, carried = (", ".join(f"{factor:.2g}" for factor in numbers) for numbers in (sizes / mild, parts))
            sentences.append(
                f"With {direction} the gradient of a rollout grows like e^({rates[-1]:.2g}·|log-ratio|): to {grown} "
                f"times its size when the log-ratio of its last token is {distances} further out, and its contribution "
                f"to E‖ĝ‖², its probability included, to {carried} times."
            )
    return Found(" ".join(sentences)) if sentences else None


def _instance(findings: Findings) -> Instance:
    """First instance of the graded environment with the most tokens and no padding, else of the first one."""
    drawn = [instances(environment, findings.seed)[0] for environment in findings.environments]
    whole = [instance for instance in drawn if not instance.paths.padded and len(instance.paths) >= BATCH]
    return max(whole or drawn[:1], key=lambda instance: instance.environment.horizon)


def _lowered(rollout: Rollout, prefixes: Sequence[str], distance: float) -> Rollout:
    """The batch with the last token of its first rollout less likely by e^distance under some of the policies."""
    token = int(rollout.peek("tokens")[0, -1])
    changed: dict[str, Tensor] = {}
    for prefix in prefixes:
        logits, logp = (rollout.peek(f"{prefix}{name}").detach().clone() for name in ("logits", "logp"))
        logits[0, -1, token] -= distance
        logits[0, -1] = logits[0, -1].log_softmax(-1)
        logp[0, -1] = logits[0, -1, token]
        changed |= {f"{prefix}logits": logits, f"{prefix}logp": logp}
    return rollout.replace(**changed)


def _size(measure: Measure, rollout: Rollout) -> float:
    """Norm of the first rollout's gradient with respect to the logits of its tokens."""
    found = gradient(measure, rollout)[0]
    found[np.arange(len(found)), 1 + rollout.peek("tokens").numpy()[0]] += found[:, 0]
    return norm(softmax_gradient(found[:, 1:], rollout.peek("logits").detach().numpy()[0]))


def weighted_by_the_ratio(logp, ref_logp, mask):
    weight = (ref_logp - logp).where(mask != 0, 0.0).clamp(max=50.0).exp().detach()
    return -(weight * logp).where(mask != 0, 0.0).sum(-1)


def exact_forward_kl(logits, ref_logits, mask):
    live = (mask != 0).unsqueeze(-1)
    log_pi, log_ref = (part.where(live, 0.0).log_softmax(-1) for part in (logits, ref_logits))
    return -(log_ref.exp() * log_pi).where(live, 0.0).sum((-1, -2))


ENVIRONMENT = SmallEnvironment(policy=[(0.99, 0.01)], reference=[(0.5, 0.5)])


def demonstrate(losses: Losses) -> Demonstration:
    """E‖ĝ‖², and the share of it that the second action carries, the rarest hundredth of draws."""
    instance = ENVIRONMENT.instance()
    rows: list[Cells] = []
    for name, function in losses.items():
        called = differentiate(bind(function, name=name), Rollout.of(instance), None, factor=2.0)
        each = each_gradient(instance.paths, instance.policy, called.logp, called.logits)
        parts = instance.rollout_weights("current") * (each**2).sum(axis=(1, 2))
        rows.append((name, float(parts.sum()), float(parts[1] / parts.sum())))
    columns = ("gradient of one rollout", "E‖ĝ‖²", "share of the rarest 1%")
    return Demonstration(ENVIRONMENT.words(), columns, rows)

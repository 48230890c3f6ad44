"""KL604: the logged KL counts padding."""

from kltest.checks.batches import no_padding
from kltest.checks.check import Found
from kltest.checks.demonstrations import Cells, Demonstration, Losses
from kltest.checks.logged_values.metrics import BATCH, batch, metric_of, moved, no_kl, number
from kltest.counterexample.environment import SmallEnvironment
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.loss.calling import bind
from kltest.rollout import Rollout
from kltest.truth import value


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check without a logged KL or without padding, else None."""
    return no_kl(findings) or no_padding(findings)


def examine(findings: Findings) -> Found | None:
    """Fill padding in two legal ways and compare the metric."""
    for environment in findings.environments:
        instance = instances(environment, findings.seed)[0]
        if not instance.paths.padded:
            continue
        first, second = (metric_of(findings, batch(instance, findings.seed + salt)) for salt in (0, 1))
        if moved(first, second):
            return Found(
                f"In {environment} the same {BATCH} rollouts log {number(first)} with one filling of their padded "
                f"positions and {number(second)} with another, both finite and legal."
            )
    return None


def logs_all_positions(logp, ref_logp, mask):
    log_ratio = logp - ref_logp
    total = log_ratio.where(mask != 0, 0.0).sum(-1)
    return total.square() / 2, {"kl": log_ratio.sum(-1).mean()}


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2), (0.5, 0.5)], reference=[(0.5, 0.5), (0.5, 0.5)], length=2, ends=True)
# Values of logp − ref_logp at padded positions.
FILLINGS = (0.0, 1.0, -1.0)


def demonstrate(losses: Losses) -> Demonstration:
    """Expectation of what is logged for several fillings of the padding."""
    instance = ENVIRONMENT.instance()
    rollout, weights = Rollout.of(instance), instance.rollout_weights("current")
    live, ref_logp = rollout.peek("mask") != 0, rollout.peek("ref_logp")
    rows: list[Cells] = [("KL(π‖ref)", *[value("kl", instance)] * len(FILLINGS))]
    for name, function in losses.items():
        loss, means = bind(function, name=name), []
        for filling in FILLINGS:
            filled = rollout.replace(logp=rollout.peek("logp").detach().where(live, ref_logp + filling))
            logged = [loss.returned(filled.take([row])).metric for row in range(len(weights))]
            means.append(sum(w * float(m) for w, m in zip(weights, logged, strict=True) if m is not None))
        rows.append((name, *means))
    columns = ("expectation of what is logged", *(f"padding: u = {filling:g}" for filling in FILLINGS))
    return Demonstration(ENVIRONMENT.words(), columns, rows)

"""KL512: what is taken as logits has to be normalised."""

from dataclasses import replace

import torch

from kltest.checks.batches import apart, as_array, limit, usual_batch
from kltest.checks.check import Found
from kltest.checks.demonstrations import Demonstration, Losses
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.identify.case import relative_bias, size, target
from kltest.identify.findings import Findings, Row
from kltest.loss.outcome import Outcome
from kltest.moments.differentiate import leaf_gradients
from kltest.moments.tolerances import TOLERANCES
from kltest.names import LOGITS
from kltest.rollout import Rollout


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check: no parameter is called logits, or calls cannot be compared."""
    return not_comparable(findings) if _fields(findings) else "no parameter is called logits"


def _fields(findings: Findings) -> list[str]:
    return sorted({field for name, field in findings.loss.fields.items() if field in LOGITS and "logits" in name})


def examine(findings: Findings) -> Found | None:
    """Add a constant to all logits of a position, another one for each prefix and policy.

    It may move the gradient of single rollouts: what their prefix fixes is a baseline. The expected gradient counts.
    """
    batch = usual_batch(findings)
    before, after = (as_array(findings.measure.differentiate(one), batch) for one in (batch, _shifted(findings, batch)))
    off = apart(after, before)
    if off <= limit(findings):
        return None
    words = "With a constant added to all logits of a position, another one for each prefix,"
    rows = [row for row in findings.rows if row.agrees is True]
    if len(rows) < len(findings.rows) or any(row.batch > 1 or row.method == "sampled" for row in rows):
        return Found(f"{words} the gradient of a batch differs by {off:.2g} of its size.")
    moved = max(_moved(findings, row) for row in rows)
    if moved <= TOLERANCES[findings.observed.dtype].gradient:
        return None
    return Found(f"{words} the expected gradient is off by {moved:.2g} of the declared one.")


def _moved(findings: Findings, row: Row) -> float:
    """Relative bias of the expected gradient with such constants, on the first instance of a row."""
    instance, loss = row.case.instances[0], findings.measure.experiment().loss

    def call(rollout: Rollout) -> Outcome:
        shifted = _shifted(findings, rollout)
        outcome = loss(shifted)
        rollout.accessed |= shifted.accessed
        towards = leaf_gradients(loss, outcome.objective, shifted)
        # Its value is that of the shifted batch, its gradient too.
        leaves = {name: rollout.peek(name) for name in towards}
        added = [((leaf - leaf.detach()) * towards[name]).sum() for name, leaf in leaves.items()]
        return replace(outcome, objective=outcome.objective.detach() + sum(added), rows=None, returned="scalar")

    found = findings.measure.gradient_of(loss.changed(instead=call), instance, row.sampler)
    return relative_bias(found, target(findings.expect, instance, row.sampler), size(instance))


def _shifted(findings: Findings, batch: Rollout) -> Rollout:
    """Return a batch with a constant added to the logits of each prefix, the same for all rows that begin with it."""
    generator = torch.Generator().manual_seed(findings.seed)
    tokens, vocabulary = batch.peek("tokens"), batch.peek("ref_logits").shape[-1]
    shifted = {}
    for name in _fields(findings):
        each = torch.randn((1 + tokens.shape[1], vocabulary), generator=generator, dtype=torch.float64)
        before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
        added = each[torch.arange(tokens.shape[1]), before].cumsum(dim=1)
        shifted[name] = batch.peek(name).detach() + added[..., None]
    return batch.replace(**shifted)


def of_raw_logits(logits, ref_logits, mask):
    kl = (logits.exp() * (logits - ref_logits)).sum(-1)
    return kl.where(mask != 0, 0.0).sum(-1)


def of_normalised_logits(logits, ref_logits, mask):
    live = mask != 0
    policy, reference = (part.where(live.unsqueeze(-1), 0.0).log_softmax(-1) for part in (logits, ref_logits))
    kl = (policy.exp() * (policy - reference)).sum(-1)
    return kl.where(live, 0.0).sum(-1)


def demonstrate(losses: Losses) -> Demonstration:
    """Value of each loss with normalised logits, and with 1 added to those of the policy."""
    policy, reference = (torch.tensor([[row]], dtype=torch.float64).log() for row in ((0.8, 0.2), (0.5, 0.5)))
    mask = torch.ones(1, 1, dtype=torch.float64)
    added = {"value, normalised": 0.0, "value, 1 added to the policy's": 1.0}
    rows: list[tuple[str | float, ...]] = [
        (name, *(float(loss(policy + number, reference, mask).sum()) for loss in losses.values()))
        for name, number in added.items()
    ]
    return Demonstration("one token, π = (0.8, 0.2), ref = (0.5, 0.5)", ("", *losses), tuple(rows))

"""TRL trainers whose KL term follows the true gradient of KL(π‖ref) over whole sequences, on- and off-policy.

Copy this file: it needs TRL and torch alone. With y ∼ μ, the policy as it was when it generated, and over the live
tokens of a completion

    u = Σ log π − log ref        ρ = exp(Σ log π − log μ)        loss = policy loss + β · mean of sg(ρ) · u²/2,

whose gradient is E_μ[ρ · u · ∇ log π(y)] = ∇ KL(π‖ref): every token is weighted by the whole completion, and stale
completions by the ratio of the whole completion, unclipped. On-policy ρ is 1. The logged "kl" is the mean of ρ · u; its
expectation is KL(π‖ref) in nats a completion.

What it costs: u is a sum over the completion, so the variance of the gradient grows with its length, as that of a
penalty in the reward does; off-policy ρ adds its own, which grows quickly once μ is far from π (fewer updates on a
batch of completions help). Memory and time are those of the trainer with β > 0. β is per completion: if it was tuned
with a loss that divides by lengths, start from β divided by the mean length.
"""

from typing import Any

import torch
from trl import GRPOTrainer, RLOOTrainer


def sequence_kl(logps, ref_logps, mask, old_logps=None):
    """(mean of sg(ρ)·u²/2, mean of ρ·u) for (B, T) log-probs; `old_logps` (B,) those of whole completions under μ."""
    live = mask != 0
    total = logps.where(live, 0.0).sum(dim=1)
    log_ratio = total - ref_logps.where(live, 0.0).sum(dim=1)
    weight = torch.ones_like(total) if old_logps is None else (total.detach() - old_logps).exp()
    return (weight * log_ratio.square() / 2).mean(), (weight * log_ratio.detach()).mean()


class _WithSequenceKL:
    """Keeps the log-probs of the latest forward pass and adds the term to the trainer's loss."""

    beta: float
    model: Any
    accelerator: Any
    _metrics: Any

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        self._latest_logps = scored[0]
        return scored

    def _with_kl(self, loss, inputs, mask, old_logps, beta):
        kl, logged = sequence_kl(self._latest_logps, inputs["ref_per_token_logps"], mask, old_logps)
        self._latest_logps = None
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["kl"].append(self.accelerator.gather(logged).mean().item())
        return loss + beta * kl


class SequenceKLGRPOTrainer(_WithSequenceKL, GRPOTrainer):
    """GRPOTrainer with β times that term in place of its own, and any `loss_type` for the policy part."""

    def _compute_loss(self, model, inputs):
        beta, self.beta = self.beta, 0.0
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
        if beta == 0.0:
            return loss
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        old = inputs.get("old_per_token_logps")
        if old is not None:
            old = old.where(mask != 0, 0.0).sum(dim=1)
        # GRPOTrainer divides its loss by the accumulated steps itself.
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        return self._with_kl(loss, inputs, mask, old, beta / steps)


class SequenceKLRLOOTrainer(_WithSequenceKL, RLOOTrainer):
    """RLOOTrainer without the KL of μ in its rewards, and with β times that term in its loss."""

    def _generate_and_score_completions(self, inputs):
        beta, self.beta = self.beta, 0.0
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self.beta = beta
        if beta == 0.0:
            return output
        if self.ref_model is None:
            raise ValueError("this recipe needs a reference model of its own; with PEFT, merge or load one beside it")
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        sizes = self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size
        with torch.no_grad():
            scored = self._get_per_token_logps_and_entropies(
                self.ref_model,
                ids,
                mask,
                output["completion_ids"].size(1),
                batch_size=sizes[0 if self.model.training else 1],
            )
        output["ref_per_token_logps"] = scored[0]
        return output

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.beta == 0.0:
            return loss
        return self._with_kl(loss, inputs, inputs["completion_mask"], inputs["old_logps"], self.beta)

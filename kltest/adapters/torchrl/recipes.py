"""torchrl: a GRPOLoss whose KL to the reference follows ∇KL(π‖ref) of whole sequences, on- and off-policy.

Use it in place of GRPOLoss, with `kl_to_ref_coeff` as before. The weight on ∇log π of a sequence is ρ·log(π/ref), with
ρ the ratio of policy and sampler over the whole sequence; sequences are averaged whatever their length. The price is
variance: that of k1 over sequences, and off-policy that of an unclipped sequence ratio.
"""

from torchrl.objectives.llm.grpo import GRPOLoss


class SequenceKLGRPOLoss(GRPOLoss):
    """GRPOLoss with E[ρ·Σu·∇log π(y)] as the gradient of its KL term, and E[ρ·Σu] as its value `kl_to_ref`."""

    def _kl_to_ref(self, tensordict, key=("next", "ref_log_probs", "full"), coeff=None, mask=None, **unused):
        new = tensordict.get("_cur_log_prob")

        def read(name, side):
            found = tensordict.get(name, as_padded_tensor=True, padding_side=side, padding_value=0.0)
            return found.squeeze(-1) if found.ndim == new.ndim + 1 else found

        ref = read(key, getattr(self, "ref_log_prob_padding_side", "left"))
        old = read(self.tensor_keys.sample_log_prob, "left")
        log_ratio = (new - ref).where(mask, 0.0).sum(-1)
        weight = (new - old).where(mask, 0.0).sum(-1).exp()
        charge = (weight * log_ratio).detach()
        loss = (charge * new.where(mask, 0.0).sum(-1)).mean()
        return (self.kl_to_ref_coeff if coeff is None else coeff) * loss, charge.mean()

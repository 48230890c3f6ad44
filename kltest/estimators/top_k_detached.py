"""Exact KL over the policy's k likeliest tokens, its log-ratio detached, plus a sampled tail."""

from kltest.estimators.spec import UNNAMED, Spec, register

SPEC = Spec(
    name="top-k-detached",
    aliases=("tt-opd",),
    formula="Σ_t [Σ_(v∈S) π_v sg(u_v) + 1{y_t ∉ S}·sg(u_t)·π_t/sg(π_t)],  S the k likeliest tokens of π",
    source="TT-OPD 2026 (arXiv 2609.34447)",
    placement="loss",
    claims="unbiased value and unbiased gradient of the next-token KL(π‖ref) at any k",
    known_false=(
        "on sequences the gradient leaves out what a token does to the KL of those after it; off-policy the tail needs "
        "the token's ratio"
    ),
    identified={"current": {"bandit": {"reverse_kl": 1.0}, "tokens": {"local_reverse_kl": 1.0}}, "stale": UNNAMED},
    per_token=True,
)


@register(SPEC)
def top_k_detached(logits, ref_logits, logp, ref_logp, tokens, k=2):
    """Σ_head π·sg(u) + 1{token in the tail}·u, per token. Value: KL(π‖ref). Gradient: u·g. (B, T, V) → (B, T).

    The head is the k likeliest tokens under the policy (all of them if k ≥ V), held fixed.
    """
    log_head, top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    head = (log_head.exp() * (log_head - ref_logits.gather(-1, top)).detach()).sum(dim=-1)
    in_head = (top == tokens.unsqueeze(-1)).any(dim=-1)
    tail = (logp - ref_logp).detach() * (logp - logp.detach()).exp()
    return head + tail.where(~in_head, 0.0)

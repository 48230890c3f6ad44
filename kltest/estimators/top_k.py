"""Exact KL over the policy's k likeliest tokens, differentiated, plus a sampled tail."""

from kltest.estimators.spec import UNNAMED, Spec, register

SPEC = Spec(
    name="top-k",
    aliases=("ema-pg",),
    formula="Σ_t [Σ_(v∈S) π_v u_v + 1{y_t ∉ S}·sg(u_t)·π_t/sg(π_t)],  S the k likeliest tokens of π",
    source=(
        "Zhang & Ba 2026 (EMA-PG, arXiv 2602.04417), Top-k KL; their compute_memory_efficient_kl, 'full_reverse' with "
        "tail sampling"
    ),
    placement="loss",
    claims="unbiased value and unbiased gradient of the next-token KL(π‖ref) at any k",
    known_false=(
        "head and tail are differentiated differently, so that ∇π(S) is left over: a push away from the head even at π "
        "= ref; it vanishes only when the head is the whole vocabulary"
    ),
    identified={"current": UNNAMED, "stale": UNNAMED},
    per_token=True,
)


@register(SPEC)
def top_k(logits, ref_logits, logp, ref_logp, tokens, k=2):
    """Σ_head π·u + 1{token in the tail}·u, per token. Value: KL(π‖ref). Gradient: u·g + ∇π(head). (B, T, V) → (B, T).

    The head is the k likeliest tokens under the policy (all of them if k ≥ V), held fixed.
    """
    log_head, top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    head = (log_head.exp() * (log_head - ref_logits.gather(-1, top))).sum(dim=-1)
    in_head = (top == tokens.unsqueeze(-1)).any(dim=-1)
    tail = (logp - ref_logp).detach() * (logp - logp.detach()).exp()
    return head + tail.where(~in_head, 0.0)

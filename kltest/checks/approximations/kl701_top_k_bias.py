"""KL701: the KL of the likeliest actions is taken for the KL of all."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    from kltest.checks.approximations.approximations import accounts_for

    return accounts_for(row, findings, drawn=False) is not None


def tells(row: Row, findings: Findings) -> str:
    from kltest.checks.approximations.approximations import accounts_for

    seen = accounts_for(row, findings, drawn=False)
    return f"no named gradient; the loss tells apart only {seen.words}" if seen else ""


def examine(findings: Findings) -> Found | None:
    from kltest.checks.approximations.approximations import beyond_the_usual_worlds

    return beyond_the_usual_worlds(findings, drawn=False)


def over_the_head(logits, ref_logits):
    log_probs, head = logits.topk(2, dim=-1)
    ref_log_probs = ref_logits.gather(-1, head)
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)


def over_all(logits, ref_logits):
    return (logits.exp() * (logits - ref_logits)).sum(-1)


WORLD = SmallWorld(policy=[(0.5, 0.3, 0.2)], reference=[(0.3, 0.3, 0.4)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": over_the_head, "mended": over_all})


CHECK = Check(
    code="KL701",
    name="top-k-bias",
    title="Only the likeliest actions are told apart, and the gradient is biased",
    what=(
        "The term sums over the k likeliest actions (or a nucleus of them) of the policy or of the reference, alone, "
        "renormalised, with the rest lumped together, or with a sampled tail that is differentiated in another way; "
        "exchanging the log-probs of the others changes nothing, and the gradient is not the declared one."
    ),
    why=(
        "What the tail adds is small for the value and not for the gradient: a head alone has a derivative by its "
        "own probability, which pushes mass into or out of the head, even where policy and reference are equal. "
        "Inside the tail nothing holds the policy."
    ),
    example=(
        "Three actions, π = (0.5, 0.3, 0.2), ref = (0.3, 0.3, 0.4); derivatives with respect to the logits. The "
        "truth is (0.197021, −0.035035, −0.161986); the sum over the two likeliest gives (0.227706, −0.016624, "
        "−0.211083)."
    ),
    fix=(
        "Sum over all actions; or keep the head and add the tail's log-ratio at the sampled token, with the head's "
        "log-ratio detached, so that head and tail are both differentiated through the probabilities alone."
    ),
    sources=(
        "TT-OPD 2026, arXiv 2609.34447",
        "Zhang & Ba 2026, EMA-PG, arXiv 2602.04417",
    ),
    wrong=over_the_head,
    mended=over_all,
    demonstrate=demonstrate,
    options={"expect": "local_reverse_kl"},
    explains=explains,
    tells=tells,
    examine=examine,
)

"""The atlas: all named gradients, in the order in which identification prefers them.

Notation: u_t = log π − log ref of the token at position t, g_t its score ∇log π, E_t the expectation over the next
token given the prefix, KL_t a divergence between next-token distributions. A gradient is *local* when the prefixes are
held fixed; `…@sampler` weights the prefixes by the sampler μ instead of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from kltest.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class NamedGradient:
    """One row of the atlas.

    Attributes:
        name: Name, as used in `--expect`.
        formula: Formula in unicode mathematics.
        meaning: Meaning in one line.
        stale: It differs from the other rows only if the sampler is not the policy.
        local: Prefixes are held fixed.
        field: It is the gradient of a function: its Jacobian is symmetric in every environment.
    """

    name: str
    formula: str
    meaning: str
    stale: bool = False
    local: bool = False
    field: bool = True


_WHOLE = (
    NamedGradient(
        "reverse_kl", "∇KL(π‖ref)", "the reverse KL over whole rollouts: what a KL penalty is meant to follow"
    ),
    NamedGradient(
        "local_reverse_kl",
        "E_π[Σ_t ∇KL_t(π‖ref)]",
        "the reverse KL of each next token, prefixes held fixed: no future credit, and for T > 1 no objective",
        local=True,
        field=False,
    ),
    NamedGradient(
        "future_reverse_kl",
        "E_π[Σ_t g_t Σ_{s>t} u_s]",
        "the part of ∇KL(π‖ref) that a local gradient misses: the effect of a token on later prefixes",
        field=False,
    ),
    NamedGradient(
        "last_token_reverse_kl",
        "E_π[g_L u_L]",
        "the local reverse KL at the last live token of each rollout only",
        field=False,
    ),
    NamedGradient(
        "forward_kl", "∇KL(ref‖π)", "the forward KL over whole rollouts: cross-entropy towards the reference"
    ),
    NamedGradient(
        "local_forward_kl",
        "E_π[Σ_t ∇KL_t(ref‖π)]",
        "the forward KL of each next token, at prefixes of the policy, held fixed",
        local=True,
        field=False,
    ),
    NamedGradient("squared_log_ratio", "∇E_π[½(Σ_t u_t)²]", "half the mean squared log-ratio of whole rollouts"),
    NamedGradient("squared_log_ratio_sum", "∇E_π[Σ_t ½u_t²]", "the summed half squared log-ratios of tokens"),
    NamedGradient(
        "local_squared_log_ratio",
        "E_π[Σ_t ∇E_t[½u_t²]]",
        "half the mean squared log-ratio of each next token, prefixes held fixed",
        local=True,
        field=False,
    ),
    NamedGradient("chi_square", "∇½χ²(π‖ref)", "half the χ² divergence of whole rollouts: a k3 upside down follows it"),
    NamedGradient(
        "local_chi_square",
        "E_π[Σ_t ∇½χ²_t(π‖ref)]",
        "half the χ² divergence of each next token, prefixes held fixed",
        local=True,
        field=False,
    ),
    NamedGradient("total_variation", "∇TV(π, ref)", "the total variation distance of whole rollouts"),
    NamedGradient(
        "local_total_variation",
        "E_π[Σ_t ∇TV_t(π, ref)]",
        "the total variation distance of each next token, prefixes held fixed",
        local=True,
        field=False,
    ),
)

_AT_SAMPLER = tuple(
    NamedGradient(
        f"{row.name}@sampler",
        row.formula.replace("E_π[Σ_t", "E_μ[Σ_t"),
        f"{row.name} with the prefixes weighted by the sampler",
        stale=True,
        local=True,
    )
    for row in _WHOLE
    if row.local
)

_OTHERS = (
    NamedGradient("from_sampler_kl", "∇KL(μ‖π)", "the pull towards the sampler, seen from its rollouts", stale=True),
    NamedGradient("to_sampler_kl", "∇KL(π‖μ)", "the reverse KL to the sampler over whole rollouts", stale=True),
    NamedGradient("expected_reward", "∇E_π[R]", "the policy gradient of the task reward"),
    NamedGradient("entropy", "∇H(π)", "the entropy of the policy's choices over whole rollouts: −E_π[Σ_t log π]"),
    NamedGradient("zero", "0", "no gradient at all"),
)

ATLAS: dict[str, NamedGradient] = {row.name: row for row in (*_WHOLE, *_AT_SAMPLER, *_OTHERS)}


def named(name: str) -> NamedGradient:
    """Return the row of a name. Raises UsageError, with the nearest names, if there is none."""
    if name not in ATLAS:
        hint = did_you_mean(name, ATLAS) or f"the named gradients are {', '.join(ATLAS)}"
        raise UsageError(f"there is no named gradient {name!r}; {hint.strip()}")
    return ATLAS[name]

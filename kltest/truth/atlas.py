"""The atlas: all named gradients, in the order in which identification prefers them, and combinations of them.

Notation: u_t = log π − log ref of the token at position t, g_t its score ∇log π, E_t the expectation over the next
token given the prefix, KL_t a divergence between next-token distributions. A gradient is *local* when the prefixes are
held fixed; `…@sampler` weights the prefixes by the sampler μ instead of the policy.
"""

import math
import re
from collections.abc import Mapping
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


_TERM = re.compile(
    r"\s*(?P<sign>[+−-]?)\s*"
    r"(?:(?P<coefficient>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|nan|inf)\s*\*\s*)?"
    r"(?P<name>[A-Za-z_][\w@]*)\s*"
)
_FORM = "write [c*]NAME[±[c*]NAME]…, as in reverse_kl-0.5*forward_kl"


def parse(text: str) -> dict[str, float]:
    """Parse a combination: `reverse_kl-0.5*forward_kl` → {"reverse_kl": 1.0, "forward_kl": -0.5}.

    Returns:
        Coefficients by name, in the order of the atlas. Terms of one name are added; an empty sum is {"zero": 1.0}.

    Raises:
        UsageError: The text is not a combination, or a name is unknown; the message proposes the nearest names.
    """
    terms: dict[str, float] = {}
    position = 0
    while position < len(text) or not terms:
        match = _TERM.match(text, position)
        if match is None or (terms and not match["sign"]):
            where = repr(text[position:]) if text[position:].strip() else "its end"
            raise UsageError(f"{text!r} is not a combination of named gradients (at {where}); {_FORM}")
        name = named(match["name"]).name
        coefficient = float(match["coefficient"] or 1.0)
        if not math.isfinite(coefficient):
            raise UsageError(f"{text!r}: the coefficient {match['coefficient']} of {name} is not finite")
        terms[name] = terms.get(name, 0.0) + (-coefficient if match["sign"] in ("-", "−") else coefficient)
        position = match.end()
    return canonical(terms)


def canonical(combination: Mapping[str, float]) -> dict[str, float]:
    """Return the non-zero terms in the order of the atlas, {"zero": 1.0} if there are none.

    Raises:
        UsageError: A name is unknown or a coefficient is not finite.
    """
    for name, coefficient in combination.items():
        named(name)
        if not math.isfinite(coefficient):
            raise UsageError(f"the coefficient {coefficient} of {name} is not finite")
    kept = {name: float(combination[name]) for name in ATLAS if name != "zero" and combination.get(name, 0.0) != 0}
    return kept or {"zero": 1.0}


def render(combination: Mapping[str, float]) -> str:
    """Render as a formula: {"reverse_kl": 1, "forward_kl": -1} → ∇KL(π‖ref) − ∇KL(ref‖π)."""
    return _join([(coefficient, ATLAS[name].formula) for name, coefficient in canonical(combination).items()], "·", "−")


def plain(combination: Mapping[str, float]) -> str:
    """Render as names, the inverse of `parse`: {"reverse_kl": 1, "forward_kl": -0.5} → reverse_kl - 0.5*forward_kl."""
    return _join([(coefficient, name) for name, coefficient in canonical(combination).items()], "*", "-", exact=True)


def _join(terms: list[tuple[float, str]], times: str, minus: str, *, exact: bool = False) -> str:
    """Join terms; coefficients have 4 significant digits, or as many as needed if `exact`, and 1 is omitted."""
    words = ""
    for coefficient, what in terms:
        size = f"{abs(coefficient):.4g}"
        if exact and float(size) != abs(coefficient):
            size = repr(abs(coefficient))
        sign = minus if coefficient < 0 else "+"
        lead = f" {sign} " if words else minus * (coefficient < 0)
        words += f"{lead}{what if size == '1' else f'{size}{times}{what}'}"
    return words

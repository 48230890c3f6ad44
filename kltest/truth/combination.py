"""Combinations of named gradients: parsing, rendering as names or formulas, and evaluation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kltest.errors import UsageError
from kltest.truth.atlas import ATLAS, named

if TYPE_CHECKING:
    import numpy as np

    from kltest.environments import Instance

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


def combine(combination: Mapping[str, float], instance: Instance) -> np.ndarray:
    """Return Σ c·gradient(name, instance) (C, V) with respect to the policy's logits.

    Raises:
        UsageError: A name is unknown or a coefficient is not finite.
        InvalidEnvironmentError: As `gradient`.
    """
    from kltest.truth.gradients import gradient

    return sum(coefficient * gradient(name, instance) for name, coefficient in canonical(combination).items())  # type: ignore[return-value]


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

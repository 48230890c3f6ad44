"""Combinations of named gradients: multiples, local forms, and what they are if the sampler is the policy."""

from collections.abc import Callable, Mapping
from math import isclose

from kltest.truth import ATLAS

Combination = dict[str, float]


def proportion(identified: Combination | None, expected: Combination) -> float | None:
    """Return the c with identified = c·expected, or None if there is none."""
    from kltest.moments.tolerances import Tolerances  # imports torch

    if not identified or set(identified) != set(expected) or "zero" in identified:
        return None
    ratios = [identified[name] / expected[name] for name in expected]
    return ratios[0] if all(isclose(ratio, ratios[0], rel_tol=Tolerances.factor) for ratio in ratios) else None


def local_form(combination: Combination) -> Combination:
    """Return the same combination with every term's prefixes held fixed."""
    return replaced(combination, lambda name: {LOCAL_FORMS.get(name, name): 1.0})


def when_current(combination: Combination | None) -> Combination:
    """Return what the combination is if the sampler is the policy, in names without one; {} for None."""
    return {} if combination is None else replaced(combination, lambda name: ATLAS[name].on_policy or {name: 1.0})


def has_entropy(combination: Combination | None) -> bool:
    """Return True if the policy's entropy is one of its terms."""
    return any(name.partition("@")[0] in ("entropy", "local_entropy") for name in combination or ())


def replaced(combination: Combination, terms: Callable[[str], Mapping[str, float]]) -> Combination:
    """Replace each name by a combination; coefficients of terms that get the same name are added up."""
    found: Combination = {}
    for name, coefficient in combination.items():
        for term, factor in terms(name).items():
            found[term] = found.get(term, 0.0) + coefficient * factor
    kept = {name: coefficient for name, coefficient in found.items() if name != "zero" and abs(coefficient) > 1e-9}
    return kept or {"zero": 1.0}


LOCAL_FORMS = {
    "reverse_kl": "local_reverse_kl",
    "forward_kl": "local_forward_kl",
    "squared_log_ratio": "local_squared_log_ratio",
    "squared_log_ratio_sum": "local_squared_log_ratio",
    "chi_square": "local_chi_square",
    "total_variation": "local_total_variation",
    "entropy": "local_entropy",
}

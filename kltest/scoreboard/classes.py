"""Classes of settings by the gradient that they follow: every row has exactly one.

A loss that couples the rows of a batch is classed by the gradient that it comes to as batches grow, where that was
measured (kltest.scoreboard.limits); `finite_class` is that of the small batches that were enumerated. Groups stay small
in practice, so that a loss which couples the rows of a group keeps the class of small ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kltest.scoreboard.rows import BATCH, MARGIN, PROPORTION, REWARDED, part_of
from kltest.truth import is_of_groups, is_of_lengths

WHOLE, PART = "reverse_kl", "local_reverse_kl"
OTHERS = frozenset({"forward_kl", "local_forward_kl"})
# Relative distance from one of a coefficient that counts as one: float32 is identified up to 1e-4 of the gradient.
ONE = {"float64": 1e-5}
ROUGH = 1e-3


@dataclass(frozen=True)
class Class:
    """A class: its few words for a table, and its sentence, which is true of each of its rows."""

    words: str
    sentence: str


# In the order in which a table sorts them.
CLASSES = {
    "whole": Class(
        "∇KL(π‖ref), on- and off-policy",
        "The gradient of KL(π‖ref) of whole sequences, whether the policy or another one drew the rollouts.",
    ),
    "on-policy": Class(
        "∇KL(π‖ref), on-policy only",
        "The gradient of KL(π‖ref) of whole sequences if the policy itself drew the rollouts; not shown for others.",
    ),
    "scaled": Class(
        "∇KL(π‖ref) up to scale",
        "On-policy, the gradient of KL(π‖ref) of whole sequences times a positive factor.",
    ),
    "part": Class(
        "next-token part of ∇KL(π‖ref)",
        "On-policy, the next-token part of the gradient of KL(π‖ref), times a positive factor.",
    ),
    "other": Class(
        "the other KL, ∇KL(ref‖π)",
        "On-policy, the gradient of KL(ref‖π) or its next-token part, times a positive factor.",
    ),
    "none": Class("no gradient", "On-policy, no gradient in expectation, only noise."),
    "length": Class(
        "∇E_π[1/L], a bonus for length",
        "On-policy, no gradient where rollouts have one length, and that of the mean inverse of their length, or of a "
        "batch's lengths together, where they differ: the reference does not occur, and descending it makes rollouts "
        "longer.",
    ),
    "mixed": Class(
        "∇KL(π‖ref) and something else",
        "On-policy, in at least one environment the gradient of KL(π‖ref) or its next-token part plus something else.",
    ),
    "reward": Class(
        "∇E[R]", "Of the policy part, ascended: on-policy, the gradient of the expected reward times a positive factor."
    ),
    "utility": Class(
        "∇U_G, a utility of the success rate",
        "Of the policy part, ascended: on-policy, in groups of G with rewards of 0 and 1, the gradient of an expected "
        "utility of each prompt's success rate: U_G, of advantages over a group's deviation, times a positive factor, "
        "or a combination with ∇E[R].",
    ),
    "another": Class(
        "another named gradient",
        "On-policy, named gradients everywhere, but none of the above in all environments alike.",
    ),
    "unnamed": Class("unnamed", "On-policy, a gradient without a name even where all rollouts have one length."),
    "open": Class("not graded", "No gradient was graded on sequences."),
}
EQUAL_LENGTHS = "at equal lengths"
# The sampler's part in it, in the same words for every library.
NO_RATIO = "no ratio"
RATIOS = {"sampler": "ratios of single tokens", "mean_ratio": "the mean of the tokens' ratios"}


def class_of(row: Mapping[str, Any]) -> str:
    """Return the class of a row, a key of CLASSES: that of large batches if it is known, else of small ones."""
    limit = limit_class(row)
    return finite_class(row) if limit is None or row["limits"][0]["of"] != BATCH else limit


def limit_class(row: Mapping[str, Any]) -> str | None:
    """Return the class of what the gradient comes to as batches, or groups, grow; None if that is not known."""
    limits = row.get("limits", ())
    measured = {each["environment"] for each in limits if each["rate"] is not None}
    if not measured or measured < {each["environment"] for each in _current(row)} - {"bandit"}:
        return None
    # Coefficients are those of the largest batches.
    return _class({_kind(terms, MARGIN) for each in limits for terms in _limit_terms(each)}, row)


def _limit_terms(limit: Mapping[str, Any]) -> list[dict[str, float]]:
    """A limit's terms in each instance; a reward's part that the whole loss has in proportion is not the KL's."""
    names = limit_names(limit)
    ends: list[list[Sequence[float]]] = [limit["terms"][name] for name in names]
    return [
        {name: sum(each) / 2 for name, each in zip(names, one, strict=True)} for one in zip(*ends, strict=True)
    ] or [{"zero": 1.0}]


def limit_names(limit: Mapping[str, Any]) -> list[str]:
    """Return the names of a limit, without that of a reward whose part keeps its proportion to the KL's."""
    beside = limit["beside_reward"]
    kept = beside is not None and max(abs(end - 1) for end in beside[1:]) <= PROPORTION
    return [name for name in limit["terms"] if not (kept and name == REWARDED[1])]


def finite_class(row: Mapping[str, Any]) -> str:
    """Return the class of a row in batches that were enumerated, a key of CLASSES."""
    near = ONE.get(row["dtype"], ROUGH) if row["gradients"] else ROUGH
    fixed_only = names_one_length_only(row)
    named = [each for each in _current(row) if not (fixed_only and each["environment"] == "ragged")]
    one = {_kind(each["identified"], near) for each in named if each["environment"] == "bandit"}
    several = {_kind(each["identified"], near) for each in named if each["environment"] != "bandit"}
    if part_of(row) != "kl" and several:
        ascended = {_ascended(each["identified"]) for each in named}
        return ascended.pop() if len(ascended) == 1 else "unnamed" if "unnamed" in ascended else "another"
    return _class(several, row, one, fixed_only) if several else "open"


def _class(several: set[str], row: Mapping[str, Any], one: set[str] = frozenset(), fixed_only: bool = False) -> str:  # type: ignore[assignment]
    """The class of gradients of these classes, of one token and of several."""
    everything = one | several
    if "unnamed" in everything:
        return "unnamed"
    if everything <= {"whole", "scaled"}:
        if everything == {"scaled"} or len(everything) > 1 or fixed_only:
            return "scaled"
        near = ONE.get(row["dtype"], ROUGH)
        stale = [_kind(each["identified"], near) for each in row["gradients"] if each["sampler"] == "stale"]
        return "whole" if stale and set(stale) == {"whole"} else "on-policy"
    if several == {"part"} and one <= {"whole", "scaled", "part"}:
        return "part"
    for kind in ("other", "none"):
        if everything == {kind}:
            return kind
    if "length" in everything <= {"none", "length"}:
        return "length"
    return "mixed" if "mixed" in everything else "another"


def names_one_length_only(row: Mapping[str, Any]) -> bool:
    """Return True if the gradient has a name in enumerated batches of rollouts of one length alone."""
    return any(_of_unequal_lengths(each, row) for each in _current(row))


def off_policy(row: Mapping[str, Any]) -> str:
    """Return what becomes of the gradient if another policy drew the rollouts, in a few words."""
    stale = [each["identified"] for each in row["gradients"] if each["sampler"] == "stale"]
    if not stale:
        return "not graded"
    near = ONE.get(row["dtype"], ROUGH)
    if all(_kind(identified, near) == "whole" for identified in stale):
        return "∇KL(π‖ref) too"
    at = {name.partition("@")[2] for identified in stale for name in identified or ()} - {""}
    if not row["reads_sampler"] or at == {"rollouts"}:
        return NO_RATIO
    if len(at) == 1:
        return RATIOS[at.pop()]
    return "another gradient" if all(stale) else "unnamed"


def _current(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in row["gradients"] if each["sampler"] == "current"]


def _of_unequal_lengths(each: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """True for an unnamed gradient of rollouts of several lengths if that of rollouts of one length has a name."""
    fixed = [other["identified"] for other in _current(row) if other["environment"] == "sequence"]
    return each["environment"] == "ragged" and each["identified"] is None and bool(fixed) and None not in fixed


def _ascended(identified: Mapping[str, float] | None) -> str:
    """The class of one gradient of a policy part."""
    if identified is None:
        return "unnamed"
    rest = [name for name in identified if name != REWARDED[1]]
    if rest == ["zero"]:
        return "none"
    if max(identified.values()) < 0 or not all(is_of_groups([name]) for name in rest):
        return "another"
    return "utility" if rest else "reward"


def _kind(identified: Mapping[str, float] | None, near: float) -> str:
    """The class of one gradient; on a bandit that of whole sequences is its next-token part as well."""
    if identified is None:
        return "unnamed"
    names = set(identified)
    if names == {"zero"}:
        return "none"
    positive = all(coefficient > 0 for coefficient in identified.values())
    if names == {WHOLE} and positive:
        return "whole" if abs(identified[WHOLE] - 1) <= near else "scaled"
    if names == {PART} and positive:
        return "part"
    if len(names) == 1 and names <= OTHERS and positive:
        return "other"
    if all(map(is_of_lengths, names)) and positive:
        return "length"
    return "mixed" if len(names) > 1 and any(identified.get(name, 0) > 0 for name in (WHOLE, PART)) else "another"

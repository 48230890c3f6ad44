"""Propose a field for a parameter by the words of its name. A wrong proposal, if followed, is graded in silence.

Whose log-probs they are is told by the role words of a name; names that differ there are never proposed for each other.
"""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

from kltest.rollout import FIELDS

# Words that say whose log-probs, by the prefix of the field.
_ROLES = {
    "": ("current", "curr", "cur", "new", "trainer", "learner", "student"),
    "ref_": ("reference", "ref", "refs", "base", "teacher"),
    "old_": (
        *("old", "previous", "prev", "behaviour", "behavior", "sampler", "sampling", "rollout", "mu"),
        *("inference", "generation", "generator", "gen", "vllm", "sglang"),
    ),
}
_PREFIX = {word: prefix for prefix, words in _ROLES.items() for word in words}
# Words of the current policy, unless a word of _ROLES stands beside them: old_policy_logps.
_ANY_POLICY = frozenset({"policy", "actor", "pi", "theta"})
_NEUTRAL = frozenset({"per", "token", "action", "sequence", "seq", "model", "p", "prob", "probs"})
_COEFFICIENTS = frozenset({"coef", "coeff", "coefficient", "weight", "scale", "lambda", "alpha", "beta", "tau"})
_LONGEST_FIRST = sorted({*_PREFIX, *_ANY_POLICY, *_NEUTRAL}, key=len, reverse=True)
# Known words; names run them together: oldlogprobs, logpi.
_KNOWN = re.compile("|".join(["log(?:its?|probs?|ps?(?!i))?", *_LONGEST_FIRST]))
_NEAR = 0.75


def suggested_field(name: str) -> str | None:
    """Return the field whose role and quantity a name states (`prev_logprobs`: old_logp), or that of a near spelling;
    None if neither is clear."""
    stated = _stated(name)
    if stated in FIELDS:
        return stated
    words = _words(name)
    if words[0] == "kl" and words[-1] in _COEFFICIENTS:
        return "beta"
    fields = {spelling: field for field, entry in FIELDS.items() for spelling in (field, *entry.aliases)}
    near = near_spelling(name, fields)
    return fields[near] if near else None


def near_spelling(name: str, known: Iterable[str]) -> str | None:
    """Return the nearest of the names whose words are, one by one, near to those of `name`."""
    words = _words(name)

    def is_near(other: str) -> bool:
        theirs = _words(other)
        return len(theirs) == len(words) and all(map(_near, words, theirs))

    return max(filter(is_near, known), key=lambda other: SequenceMatcher(None, name, other).ratio(), default=None)


def _stated(name: str) -> str | None:
    text = " ".join(_words(name))
    words = _KNOWN.findall(text)
    prefixes = {_PREFIX[word] for word in words if word in _PREFIX}
    quantities = {"logits" if word.startswith("logit") else "logp" for word in words if word.startswith("log")}
    unknown = _KNOWN.sub("", text).strip()
    if unknown or len(quantities) != 1 or len(prefixes) > 1 or not (prefixes or _ANY_POLICY & set(words)):
        return None
    return "".join(prefixes) + quantities.pop()


def _words(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("_", " ").split()


def _near(word: str, other: str) -> bool:
    return SequenceMatcher(None, word, other).ratio() >= _NEAR

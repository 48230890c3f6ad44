"""Sides that names state: probabilities of the policy, of a reference or of a sampler, and in which quantity."""

import re
from dataclasses import dataclass
from functools import lru_cache

from kltest import names
from kltest.scanning.vocabulary import WORDS
from kltest.symbolic.words import METRICS, is_preference, says, says_kl, words

POLICY, REFERENCE, SAMPLER, MIXED = "", "ref_", "old_", "mixed_"
WHOSE = {POLICY: "policy", REFERENCE: "reference", SAMPLER: "sampler", MIXED: "mixture"}
_WHO = {word: who for who, name in WHOSE.items() for word in (*names.WHOSE.get(who, ()), *WORDS.get(name, ()))}
_LOGP = re.compile(
    r"log ?probs?|\bl ?probs?\b|log ?ps?\b|\blps?\b|log ?probabilit\w*|log ?pi\b|log ?likelihoods?|log ?dist\w*"
)
_LOGITS = re.compile(r"\blogits?\b")
_PROB = re.compile(r"\bprobs?\b|\bprobabilit\w*")
_NOT = WORDS["not_sides"]
LOSS = ("loss", "objective")
REWARD = ("reward", "advantage", "return", "score", "adv")
"""Beginnings of the words of losses and of rewards, and of what is made of them."""


@dataclass(frozen=True, order=True)
class Side:
    """`quantity` is logp, logits or prob; `who` the prefix of the rollout's field, or MIXED for a mixture of
    two; `sure` if a word states who."""

    quantity: str
    who: str
    sure: bool = True


@lru_cache(maxsize=100_000)
def side(name: str) -> Side | None:
    """Return what a name states, None unless it names log-probs, logits or probabilities."""
    found = words(name)
    if name.endswith("log1p") or not found or _NOT.intersection(found) or is_preference(name):
        return None
    text = " ".join(found)
    # Words that run together: oldlogprobs, reflogits, pilogps.
    text = re.sub(r"\b(ref|old|base|pi|new|teacher|student)(?=log|prob)", r"\1 ", text)
    if _LOGP.search(text):
        quantity = "logp"
    elif _LOGITS.search(text):
        quantity = "logits"
    elif _PROB.search(text):
        quantity = "prob"
    else:
        return None
    who = who_of(text)
    return Side(quantity, who or POLICY, who is not None)


def who_of(text: str) -> str | None:
    """Return whose a text says it is: a word for reference or sampler wins over one for the policy."""
    stated = {_WHO[word] for word in text.split() if word in _WHO}
    return next((who for who in (REFERENCE, SAMPLER, POLICY) if who in stated), None)


def is_number(name: str) -> bool:
    """Return True for names of temperatures and coefficients."""
    return any(word.startswith(("temp", "tau", "lam", "alpha", "beta", "coef")) for word in words(name))


def is_ratio(name: str) -> bool:
    """Return True for names of the importance ratio between policy and sampler: importance_ratio, is_ratios."""
    found = set(words(name))
    return bool({"ratio", "ratios"} & found) and found <= {
        "ratio",
        "ratios",
        "importance",
        "sampling",
        "is",
        "token",
        "policy",
    }


def kind_of(name: str, function: str = "") -> str:
    """Return what becomes of what a name holds: logged, loss or reward; the empty string if it does not say.

    In a function that is called a KL, a score is one of its estimates.
    """
    if METRICS.intersection(words(name)):
        return "logged"
    if says(name, *LOSS):
        return "loss"
    others = [word for word in REWARD if word != "score"]
    reward = says(name, *(others if says_kl(function) else REWARD))
    return "reward" if reward and ("with" in words(name) or not says_kl(re.split(r"[._]", name)[-1])) else ""

"""Words of names: whose log-probs they mean and in which quantity, masks, losses, rewards, logs, and KL."""

import re
from dataclasses import dataclass
from functools import lru_cache

from kltest import names
from kltest.symbolic.operations import words_of

POLICY, REFERENCE, SAMPLER = "", "ref_", "old_"
PREFIXES = (REFERENCE, SAMPLER, POLICY)


_WHO = {
    **{word: prefix for prefix, known in names.WHOSE.items() for word in known},
    **dict.fromkeys(("policy", "actor", "pi", "theta", "active"), POLICY),
    **dict.fromkeys(("frozen", "init", "initial", "anchor", "sft", "prior", "pretrained", "adapter"), REFERENCE),
    **dict.fromkeys(("behav", "prox", "proximal", "infer", "backend"), SAMPLER),
}
# Words of names that are no probabilities, though they may name some.
_NO_SIDE = words_of(
    """
    average clamp clip coef count diff difference dtype entropies entropy eps epsilon fn func interpolated invalid kl
    kld kls length lengths loss keep losses mask masks max min mix mixed mixture num ratio ratios scale scales scaling
    size sizes sum temp temperature threshold total value values processor config
    """
)
METRICS = words_of(
    "eval evaluation info infos log logged logs metric metrics monitor report reported stat statistics stats summary "
    "validation wandb"
)
# Of preference pairs, and of rewards that a model is trained to give, whose log-ratios are no penalties.
_PREFERENCE = words_of("chosen rejected preferred dispreferred win lose winner loser implicit")
LOSS = ("loss", "objective")
# Of what a loss is given, which is none itself.
_GIVEN = words_of("arg args config input inputs kwarg kwargs mask masks")
_RATIO = words_of("ratio ratios importance sampling is token policy coef weight weights")
_KL = words_of("kl kls kld klds jsd divergence kullback")
_LOGP = re.compile(
    r"log ?probs?|\bl ?probs?\b|log ?ps?\b|\blps?\b|log ?probabilit\w*|log ?pi\b|log ?likelihoods?|log ?dist\w*"
)
_LOGITS = re.compile(r"\blogits?\b")
_PROB = re.compile(r"\bprobs?\b|\bprobabilit\w*")
_QUANTITIES = {"logp": _LOGP, "logits": _LOGITS, "prob": _PROB}
_RUN_TOGETHER = re.compile(r"\b(ref|old|base|pi|new|teacher|student)(?=log|prob)")
TOKENS = words_of("ids tokens actions responses labels targets label token action target")
COUNTS = words_of("num number count size length lengths")
ADVANTAGE = ("adv", "reward", "return", "score")


@dataclass(frozen=True)
class Side:
    """A name of probabilities: `quantity` is logp, logits or prob; `who` the prefix of a field, None if unsaid."""

    quantity: str
    who: str | None


@lru_cache(maxsize=100_000)
def words(name: str) -> tuple[str, ...]:
    """Return the words of an identifier in lower case: `refLogProbs_2` gives ref, log, probs."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return tuple(re.findall(r"[a-z]+", spaced.lower()))


def says(name: str, *which: str) -> bool:
    """Return True if one of the words of a name begins with one of `which`."""
    return any(word.startswith(which) for word in words(name))


def is_loss(name: str) -> bool:
    """Return True if one of some names is that of a loss, but of what it is given: loss_fn_inputs."""
    return any(says(one, *LOSS) and not _GIVEN.intersection(words(one)) for one in name.split())


@lru_cache(maxsize=100_000)
def side(name: str) -> Side | None:
    """Return what a name states of probabilities; None unless it names log-probs, logits or probabilities."""
    found = words(name)
    if not found or _NO_SIDE.intersection(found) or name.endswith("log1p"):
        return None
    text = _RUN_TOGETHER.sub(r"\1 ", " ".join(found))
    stated = [quantity for quantity, pattern in _QUANTITIES.items() if pattern.search(text)]
    both = "logits" in stated and "logp" in stated and "and" in found  # which of them is said where it is taken
    return Side(stated[0], whose(text)) if stated and not both else None


def whose(text: str) -> str | None:
    """Return whose a text says something is: a word for reference or sampler goes before one for the policy."""
    stated = {_WHO[word] for word in words(text) if word in _WHO}
    return next((who for who in PREFIXES if who in stated), None)


def is_of_reference(name: str) -> bool:
    """Return True for a name that says the reference or the teacher, and no ratio, difference or the like."""
    return not _NO_SIDE.intersection(words(name)) and whose(name) == REFERENCE


def is_preference(name: str) -> bool:
    """Return True for names of preference pairs: chosen_logps."""
    return bool(_PREFERENCE.intersection(words(name)))


def is_mask(name: str) -> bool:
    """Return True for names of masks."""
    return bool({"mask", "masks"}.intersection(words(name)))


def is_ratio(name: str) -> bool:
    """Return True for names of the importance ratio between policy and sampler: importance_ratio, is_ratios."""
    found = set(words(name))
    weighs = bool({"weight", "weights"} & found and {"importance", "is"} & found)
    return (weighs or bool({"ratio", "ratios"} & found)) and found <= _RATIO


def is_logged(name: str) -> bool:
    """Return True for names of what is only logged: `loss/policy` is an entry of a table of metrics."""
    return "/" in name or bool(METRICS.intersection(words(name)))


def says_kl(name: str) -> bool:
    """Return True for names of KL terms: kl, approx_kl, kld, per_token_kl, jsd, klDiv, k3_loss."""
    return bool(_KL.intersection(words(name))) or re.search(r"(^|[_.])k[123]([_.]|$)", name) is not None

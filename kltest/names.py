"""Names that fields, parameters, keys of batches and logged numbers go by: one table for all that reads names.

`FIELDS` are the calling convention: the fields of a rollout and the other names that each goes by. Filling, suggesting,
the audit and the scan read them here, with the words that say whose log-probs a name means and whether it says KL.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher


@dataclass(frozen=True)
class Field:
    """One field of a rollout; `names` are those of the parameters that it also fills."""

    shape: str
    meaning: str
    names: str = ""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names of parameters that the field fills beside its own."""
        return tuple(self.names.split())


FIELDS: dict[str, Field] = {
    "logp": Field(
        "(B, T)",
        "log-prob of the sampled token now; requires grad",
        "logprob logprobs log_prob log_probs logps per_token_logps new_logprobs lp",
    ),
    "ref_logp": Field(
        "(B, T)",
        "the same under the reference",
        "ref_logprob ref_logprobs ref_log_prob ref_log_probs log_probs_base log_probs_ref ref_logps "
        "ref_per_token_logps teacher_logp teacher_logps teacher_logprob teacher_logprobs teacher_log_prob "
        "teacher_log_probs",
    ),
    "old_logp": Field(
        "(B, T)",
        "the same under the sampler",
        "old_logprob old_logprobs old_log_prob old_log_probs log_probs_old old_logps old_per_token_logps",
    ),
    "rollout_logp": Field(
        "(B, T)",
        "the same as the engine that drew the tokens told it; old_logp unless --sampler says otherwise",
        "rollout_logps rollout_logprob rollout_logprobs rollout_log_prob rollout_log_probs inference_logp "
        "inference_logps inference_logprobs inference_log_probs infer_logprobs sampling_logp sampling_logps "
        "sampling_logprobs sampling_log_probs sampling_per_token_logps generation_logprobs vllm_logps vllm_logprobs "
        "engine_logps engine_logprobs",
    ),
    "prox_logp": Field(
        "(B, T)",
        "the same under the proximal policy, from which the trust region is measured; old_logp unless --sampler says "
        "otherwise",
        "prox_logps prox_logprobs proximal_logp proximal_logps proximal_logprobs proximal_log_probs",
    ),
    "mask": Field(
        "(B, T)",
        "1 on live tokens",
        "response_mask completion_mask action_mask loss_mask attention_mask full_attention_mask token_mask "
        "padding_mask labels_mask",
    ),
    "tokens": Field("(B, T) int", "sampled tokens", "completion_ids responses"),
    "logits": Field("(B, T, V)", "next-token log-probs of the policy; requires grad", "student_logits"),
    "ref_logits": Field("(B, T, V)", "next-token log-probs of the reference", "teacher_logits"),
    "old_logits": Field("(B, T, V)", "next-token log-probs of the sampler"),
    "topk_ids": Field(
        "(B, T, K) int",
        "the K likeliest next tokens of the reference, or of the policy for a name with student or policy in it",
        "topk_indices teacher_topk_ids teacher_topk_indices ref_topk_ids student_topk_ids student_topk_indices "
        "policy_topk_ids",
    ),
    "topk_logp": Field(
        "(B, T, K)",
        "their log-probs under the policy; requires grad",
        "topk_logprobs student_topk_logp student_topk_logprobs student_topk_log_probs policy_topk_logp",
    ),
    "ref_topk_logp": Field(
        "(B, T, K)",
        "the same under the reference",
        "ref_topk_logprobs teacher_topk_logp teacher_topk_logprobs teacher_topk_log_probs",
    ),
    "reward": Field(
        "(B,)",
        "task reward of the rollout; (B, T), repeated, where a loss wants that",
        "rewards scores token_level_scores",
    ),
    "advantage": Field("(B,)", "group-centred reward; (B, T), repeated, where a loss wants that", "advantages"),
    "group": Field("(B,) int", "which prompt", "group_ids"),
    "beta": Field("float", "coefficient of the KL term", "kl_coef kl_coeff kl_beta kl_loss_coef kl_ctl"),
    "rollout": Field("Rollout", "all of the above, as attributes or by key"),
}
_NAMED = {name: field for field, entry in FIELDS.items() for name in (field, *entry.aliases)}


AS_OLD = ("rollout_logp", "prox_logp")
"""Fields that equal `old_logp` where a batch has none of its own."""
LOGITS = frozenset({"logits", "ref_logits", "old_logits"})
"""Fields of log-probs of all next tokens, of policy, reference and sampler."""
SUPPORT_FIELDS = ("topk_ids", "topk_logp", "ref_topk_logp")
"""Fields of the K tokens of a support: made of `logits` and `ref_logits`."""
SUPPORT_SIZES = ("k", "topk", "top_k")
"""Names of parameters that say how many tokens a support has."""
SUPPORT_SIDE = "support"
"""The parameter that says whose likeliest tokens they are: teacher or student."""
SUPPORT_SIZE = 4
"""Tokens of a support if nothing says how many; in a small vocabulary fewer: see `support_size`."""


def support_size(k: int, vocabulary: int) -> int:
    """Return how many of k tokens a support has in a vocabulary: at least two tokens are left out, if it has three."""
    return max(1, min(k, vocabulary - 2))


_PAYLOAD = re.compile(
    r"(?P<of>\w+?)_(?:tokens?_)?(?:(?P<ids>ids|indices|index|idx|inds)|(?P<logp>values|vals|logits|log_?prob(?:s|abs)?|"
    r"log_?ps?)|(?P<mask>mask))"
)
_OF_PAYLOADS = frozenset(("target", "teacher", "student", "sparse", "topk", "top", "support", "candidate"))


def payloads(names: Iterable[str]) -> dict[str, str]:
    """Return the fields that names mean together: the ids of a support, their log-probs, and a mask of them.

    They begin alike, as `target_ids` and `target_values`; log-probs are the reference's unless they are called the
    policy's. Numbers of which a softmax is taken may be log-probs as well.
    """
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        if (found := _PAYLOAD.fullmatch(name)) and _OF_PAYLOADS.intersection(_words(found["of"])):
            parts.setdefault(found["of"], {})[str(found.lastgroup)] = name
    whole = {of: one for of, one in parts.items() if {"ids", "logp"} <= {*one}}
    fields = {"ids": "topk_ids", "mask": "mask"}
    return {
        name: fields.get(part) or ("topk_logp" if whose(of) == "" else "ref_topk_logp")
        for of, one in whole.items()
        for part, name in one.items()
    }


GROUP_SIZES = frozenset(
    (
        *("num_generations", "group_size", "rollout_n", "num_return_sequences"),
        *("n_samples_per_prompt", "num_samples_per_prompt", "samples_per_prompt"),
    )
)
"""Names of parameters and settings that say how many rollouts a prompt has."""

BATCH_SIZES = (
    *("batch_size", "bsz", "train_batch_size", "local_batch_size", "per_device_batch_size"),
    *("per_device_train_batch_size", "mini_batch_size", "minibatch_size", "micro_batch_size", "microbatch_size"),
    *("ppo_mini_batch_size", "ppo_micro_batch_size"),
)
"""Names of parameters and settings that say how many rollouts a batch has, or a part of one."""

_STEP = frozenset(("step", "epoch", "iteration", "iter"))
_OF_STEPS = frozenset(
    (
        *("global", "current", "cur", "curr", "train", "training", "update", "inner", "outer", "mini", "minibatch"),
        *("micro", "microbatch", "batch", "ppo", "grpo", "rl", "policy", "actor", "opt", "optim", "optimizer", "this"),
    )
)
_PLACES = frozenset(("idx", "index", "id", "counter"))
_SHARES = ("progress", "training_progress", "train_progress", "progress_remaining", "current_progress_remaining")


def training_step(name: str) -> int | float | None:
    """Return how far a training run is where a parameter or attribute says so: in steps, or as a share of it.

    All words of the name are known: `inner_epoch`, `ppo_epoch_idx`, not `num_epochs`, `step_size` or `warmup_step`.
    """
    last = name.split(".")[-1]
    words = {*_words(last)}
    if last in _SHARES:
        return 0.5
    return 1 if words & _STEP and words <= _STEP | _OF_STEPS | _PLACES else None


_TOKEN_IDS = frozenset(("id", "ids", "eos", "bos", "pad", "padding", "ignore"))


def says_token_id(name: str) -> bool:
    """Return True for `eos_token_id`, `pad_id`, `ignore_index`: a number that is compared with tokens."""
    return bool(_TOKEN_IDS & {*_words(name)})


def field_named(name: object) -> str | None:
    """Return the field with this name or alias, or None."""
    return _NAMED.get(name) if isinstance(name, str) else None


WHOSE = {
    "": ("current", "curr", "cur", "new", "trainer", "learner", "student"),
    "ref_": ("reference", "ref", "refs", "base", "teacher"),
    "old_": (
        *("old", "previous", "prev", "behaviour", "behavior", "sampler", "sampling", "rollout", "mu"),
        *("inference", "generation", "generator", "vllm", "sglang"),
    ),
}
"""Words that say whose log-probs a name means, by the prefix of the field. `kltest.symbolic.words` adds some."""
_PREFIX = {word: prefix for prefix, words in WHOSE.items() for word in words} | {"gen": "old_"}
# Words of the current policy, unless a word of _ROLES stands beside them: old_policy_logps.
_ANY_POLICY = frozenset({"policy", "actor", "pi", "theta"})
_NEUTRAL = frozenset({"per", "token", "action", "sequence", "seq", "model", "p", "prob", "probs"})
ENGINES = frozenset(
    ("rollout", "inference", "infer", "generation", "generator", "gen", "vllm", "sglang", "sampling", "engine")
)
"""Words that say that log-probs are what the engine told that drew the tokens."""
_COEFFICIENTS = frozenset({"coef", "coeff", "coefficient", "weight", "scale", "lambda", "alpha", "beta", "tau"})
_LONGEST_FIRST = sorted({*_PREFIX, *_ANY_POLICY, *_NEUTRAL}, key=len, reverse=True)
# Known words; names run them together: oldlogprobs, logpi.
_KNOWN = re.compile("|".join(["log(?:its?|probs?|ps?(?!i))?", *_LONGEST_FIRST]))
SIMILAR = 0.75


def whose(name: str) -> str | None:
    """Return the prefix of the fields whose log-probs a name means ("" for `student_topk_ids`); None if unsaid."""
    words = _words(name)
    found = {_PREFIX[word] for word in words if word in _PREFIX}
    return found.pop() if len(found) == 1 else "" if not found and _ANY_POLICY & set(words) else None


def says_top_k(name: str) -> bool:
    """Return True for `reverse_kl_student_topk`, `top_k_kl`."""
    return "topk" in "".join(_words(name))


def suggested_field(name: str) -> str | None:
    """Return the field whose role and quantity a name states (`prev_logprobs`: old_logp), or that of a near spelling;
    None if neither is clear."""
    stated, words = _stated(name), _words(name)
    if stated == "old_logp" and ENGINES & set(words):
        return "rollout_logp"
    if stated in FIELDS:
        return stated
    if words[:1] == ["kl"] and words[-1] in _COEFFICIENTS:
        return "beta"
    return field_named(near_spelling(name, _NAMED))


def near_spelling(name: str, known: Iterable[str]) -> str | None:
    """Return the nearest of the names whose words are, one by one, near to those of `name`."""
    words = _words(name)

    def is_similar(other: str) -> bool:
        theirs = _words(other)
        return len(theirs) == len(words) and all(map(_similar, words, theirs))

    return max(filter(is_similar, known), key=lambda other: SequenceMatcher(None, name, other).ratio(), default=None)


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
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def _similar(word: str, other: str) -> bool:
    return SequenceMatcher(None, word, other).ratio() >= SIMILAR


_KL = re.compile(r"(approx|mean|avg|ref|seq|token|policy)?kl(s|d|div|divergence)?\d*")
_OF_KL = re.compile(
    r"actor|agent|all|answers?|approx(imate|imated)?|average|avg|base|batch|completions?|current|curr?|debug|detached|"
    r"dist(ance)?|div(ergence)?|ema|empirical|est(imate|imated|imator)?|eval(uation)?|exact|from|full|global|group|info|"
    r"init(ial)?|item|k\d|local|logged|logs|masked|mc|mean|measured|metrics?|micro|mini|model|monte|carlo|moving|nats|new|"
    r"now|objective|observed|of|per|pi|policy|ppo|raw|ref(erence)?|response|reverse|rollouts?|rows?|running|sampled|"
    r"schulman|seq(uence)?s?|sft|smoothed|stats?|step|student|teacher|test|the|to|tokens?|train(ing)?|true|unbiased|"
    r"val(idation)?|values?|vs"
)
"""The words beside KL that leave it what it is. With any other one it is something else, or not known to be the KL:
a multiple (`kl_loss`), another statistic (`kl_p95`, `kl_sum`), another unit (`kl_bits`), a setting (`kl_horizon`)."""


_STATISTICS = frozenset({"mean", "avg", "average"})


def quantity(key: str) -> str:
    """Return the part of a metric's key that names what is logged: `kl` of `actor/kl`, `train/kl/mean` or `kl`."""
    *groups, last = key.split("/")
    return groups[-1] if groups and last.lower() in _STATISTICS else last


def says_kl(name: str) -> bool:
    """Return True for `kl`, `mean_kl`, `approxkl`, `klToRef`, not for `kl_loss`, `kl_coef`, `kl_max` or `kl_p95`.

    The scan looks for terms, and so for `kl_loss` and `k3` as well: `kltest.symbolic.words.says_kl`.
    """
    words = _words(name)
    beside = [word for word in words if not _KL.fullmatch(word)]
    return len(beside) < len(words) and all(map(_OF_KL.fullmatch, beside))


_LOGGED = {
    "logp": "policy_logp policy_logps policy_logprobs curr_logprobs trainer_logprobs action_log_probs",
    "ref_logp": "reference_logps reference_logprobs reference_policy_logprobs base_action_log_probs",
    "old_logp": "prev_logprobs old_action_log_probs",
    "rollout_logp": "",
    "prox_logp": "",
    "mask": "response_masks loss_masks final_response_mask",
    "entropy": "entropys entropies token_entropy token_entropies",
    "reward": "score raw_reward raw_rewards",
    "shaped_reward": "shaped_rewards token_level_rewards kl_rewards rewards_with_kl",
    "advantage": "",
    "group": "uid prompt_id problem_id",
    "version": "versions weight_version weight_versions policy_version policy_versions model_version",
}
"""Columns of logs of rollouts, and names that trainers give them beside those of FIELDS."""
_OF_A_BATCH = frozenset({"attention_mask", "full_attention_mask", "padding_mask", "labels_mask"})
"""Masks of prompt and completion, which in logs are no mask of the completion."""
LOGGED = {
    field: (field, *(FIELDS[field].aliases if field in FIELDS else ()), *names.split())
    for field, names in _LOGGED.items()
}
"""Columns of logs of rollouts, by the names that each goes by, the first the usual one."""
_COLUMN = {name: field for field, names in LOGGED.items() for name in names if name not in _OF_A_BATCH}


def logged_field(name: str) -> str | None:
    """Return the column of logs that a name means (`vllm_logprobs`: rollout_logp), or None."""
    stated = _COLUMN.get(name) or suggested_field(name)
    return stated if name in _COLUMN or stated in ("logp", "ref_logp", "old_logp", "rollout_logp") else None


def listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

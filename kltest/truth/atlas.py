"""The atlas: all named gradients, in the order in which identification prefers them, and combinations of them.

Notation: u_t = log π − log ref of the token at position t, g_t its score ∇log π, E_t the expectation over the next
token given the prefix, KL_t a divergence between next-token distributions, ρ_t = π/μ the ratio of the token to the
sampler μ, ρ̄ the geometric mean of a rollout's ratios. A gradient is *local* when the prefixes are held fixed.

What an estimator follows on rollouts of μ depends on the ratio in front of its terms: with the token's own,
`…@sampler`, the prefixes come from μ and the token from π; with none, `…@rollouts`, both come from μ; `…@mean_ratio`
has ρ̄ there.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kltest.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class NamedGradient:
    """One row of the atlas.

    Attributes:
        name: Name, as used in `--expect`.
        formula: Formula in unicode mathematics.
        meaning: Meaning in one line.
        field: It is the gradient of a function: its Jacobian is symmetric in every environment.
        on_policy: For a stale row, the combination that it equals if the sampler is the policy, of rows that are not.
    """

    name: str
    formula: str
    meaning: str
    field: bool = True
    on_policy: Mapping[str, float] | None = None

    @property
    def stale(self) -> bool:
        """True if it differs from the other rows only if the sampler is not the policy."""
        return self.on_policy is not None

    @property
    def local(self) -> bool:
        """True if prefixes are held fixed."""
        return self.name.startswith("local_")


_FIXED = "of each next token, prefixes held fixed"
_WHOLE = {
    "reverse_kl": ("∇KL(π‖ref)", "the reverse KL over whole rollouts: what a KL penalty is meant to follow"),
    "local_reverse_kl": (
        "E_π[Σ_t ∇KL_t(π‖ref)]",
        f"the reverse KL {_FIXED}: no future credit, and for T > 1 no objective",
    ),
    "future_reverse_kl": (
        "E_π[Σ_t g_t Σ_{s>t} u_s]",
        "the part of ∇KL(π‖ref) that a local gradient misses: the effect of a token on later prefixes",
    ),
    "last_token_reverse_kl": ("E_π[g_L u_L]", "the local reverse KL at the last live token of each rollout only"),
    "forward_kl": ("∇KL(ref‖π)", "the forward KL over whole rollouts: cross-entropy towards the reference"),
    "local_forward_kl": (
        "E_π[Σ_t ∇KL_t(ref‖π)]",
        "the forward KL of each next token, at prefixes of the policy, held fixed",
    ),
    "squared_log_ratio": ("∇E_π[½(Σ_t u_t)²]", "half the mean squared log-ratio of whole rollouts"),
    "squared_log_ratio_sum": ("∇E_π[Σ_t ½u_t²]", "the summed half squared log-ratios of tokens"),
    "local_squared_log_ratio": ("E_π[Σ_t ∇E_t[½u_t²]]", f"half the mean squared log-ratio {_FIXED}"),
    "chi_square": ("∇½χ²(π‖ref)", "half the χ² divergence of whole rollouts: a k3 upside down follows it"),
    "local_chi_square": ("E_π[Σ_t ∇½χ²_t(π‖ref)]", f"half the χ² divergence {_FIXED}"),
    "total_variation": ("∇TV(π, ref)", "the total variation distance of whole rollouts"),
    "local_total_variation": ("E_π[Σ_t ∇TV_t(π, ref)]", f"the total variation distance {_FIXED}"),
}
_OTHERS = {
    "from_sampler_kl": ("∇KL(μ‖π)", "the pull towards the sampler, seen from its rollouts"),
    "to_sampler_kl": ("∇KL(π‖μ)", "the reverse KL to the sampler over whole rollouts"),
    "expected_reward": ("∇E_π[R]", "the policy gradient of the task reward"),
    "entropy": ("∇H(π)", "the entropy of the policy's choices over whole rollouts: −E_π[Σ_t log π]"),
    "local_entropy": ("E_π[Σ_t ∇H_t(π)]", f"the entropy {_FIXED}: the bonus that trainers add"),
    "inverse_length": (
        "∇E_π[1/L]",
        "the mean inverse length of rollouts: k1 as a loss with a mean over each rollout's own tokens follows it; "
        "the reference does not occur, and descending it makes rollouts longer",
    ),
}
_ON_POLICY = {"from_sampler_kl": {"zero": 1.0}, "to_sampler_kl": {"zero": 1.0}}
_EQUAL_ON_POLICY = _ON_POLICY | {
    "centred_reverse_kl": {"reverse_kl": 1.0},
    "future_reverse_kl": {"reverse_kl": 1.0, "local_reverse_kl": -1.0},
    "exact_future_reverse_kl": {"reverse_kl": 1.0, "local_reverse_kl": -1.0},
    "other_tokens_forward_kl": {"zero": 1.0},
}

# Factors behind g_t, and their words. A token from π cancels what came before it: with the token's own ratio the whole
# return, the return to go and any baseline give the same.
_OWN_RATIO = {
    "reverse_kl": ("Σ_{s≥t} u_s", "the log-ratios from each token on, as a PPO surrogate follows them"),
    "squared_log_ratio_sum": ("(u_t + Σ_{s≥t} ½u_s²)", "u_t, and the half squared log-ratios from each token on"),
    "other_tokens_forward_kl": ("Σ_{s>t} (1 − ref_s/π_s)", "the weights of k3 as a loss of the tokens after each"),
    "to_sampler_kl": ("Σ_{s≥t} log π_s/μ_s", "the log-ratios to the sampler from each token on"),
    "entropy": ("Σ_{s≥t} −log π_s", "the surprise of the tokens from each on"),
}
_NO_RATIO = {
    "reverse_kl": ("Σ_s u_s", "the log-ratio of the whole rollout on each token: ∇E_μ[½(Σ_t u_t)²]"),
    "local_reverse_kl": ("u_t", "each token's own log-ratio: ∇E_μ[½Σ_t u_t²]"),
    "future_reverse_kl": ("Σ_{s>t} u_s", "the log-ratios after each token"),
    "last_token_reverse_kl": ("1{t=L} u_t", "the last live token's own log-ratio"),
    "forward_kl": ("(1 − Π_s ref_s/π_s)", "the weight of k3 as a loss, of the whole rollout"),
    "local_forward_kl": ("(1 − ref_t/π_t)", "the weight of k3 as a loss, of each token"),
    "squared_log_ratio": ("(Σ_s u_s + ½(Σ_s u_s)²)", "the whole rollout's log-ratio and half its square"),
    "squared_log_ratio_sum": ("(u_t + Σ_s ½u_s²)", "u_t, and the half squared log-ratios of the whole rollout"),
    "local_squared_log_ratio": ("(u_t + ½u_t²)", "each token's own log-ratio and half its square"),
    "chi_square": ("(Π_s π_s/ref_s − 1)", "the weight of k3 upside down, of the whole rollout"),
    "local_chi_square": ("(π_t/ref_t − 1)", "the weight of k3 upside down, of each token"),
    "total_variation": ("½sign(Σ_s u_s)", "half the sign of the whole rollout's log-ratio"),
    "local_total_variation": ("½sign(u_t)", "half the sign of each token's log-ratio"),
    "centred_reverse_kl": ("(Σ_s u_s − E_μ[Σ_s u_s])", "the whole rollout's log-ratio less the mean of its prompt"),
    "exact_future_reverse_kl": ("Σ_{s>t} KL_s(π‖ref)", "the exact KLs of the next tokens after each"),
    "other_tokens_forward_kl": ("Σ_{s≠t} (1 − ref_s/π_s)", "the weights of k3 as a loss of all other tokens"),
    "to_sampler_kl": ("Σ_s log π_s/μ_s", "the whole rollout's log-ratio to the sampler"),
    "entropy": ("Σ_s −log π_s", "the surprise of the whole rollout"),
    "local_entropy": ("(−log π_t)", "each token's own surprise"),
    "inverse_length": ("1/L", "the rollout's inverse length: at one length a share of the push away from the sampler"),
}
_MEAN_RATIO = ("reverse_kl", "local_reverse_kl", "local_forward_kl", "other_tokens_forward_kl")
_COUPLE_TOKENS = frozenset(
    {"future_reverse_kl", "squared_log_ratio_sum", "exact_future_reverse_kl", "other_tokens_forward_kl"}
)


def _rows() -> Iterator[NamedGradient]:
    """Yield the named gradients in the order in which identification prefers them."""
    for rows in (_WHOLE, _OTHERS):
        for name, (formula, meaning) in rows.items():
            yield NamedGradient(name, formula, meaning, formula.startswith("∇"), _ON_POLICY.get(name))
        for name in filter(lambda name: name.startswith("local_"), rows):
            at_sampler = rows[name][0].replace("E_π[Σ_t", "E_μ[Σ_t")
            words = f"{name} with the prefixes weighted by the sampler"
            yield NamedGradient(f"{name}@sampler", at_sampler, words, on_policy={name: 1.0})
    yield from _off_policy("sampler", "ρ_t ", "token ratios", _OWN_RATIO)
    yield from _off_policy("rollouts", "", "no ratio", _NO_RATIO)
    by_mean_ratio = {name: _NO_RATIO[name] for name in _MEAN_RATIO}
    yield from _off_policy("mean_ratio", "ρ̄ ", "the mean ratio, detached", by_mean_ratio)
    yield NamedGradient("zero", "0", "no gradient at all")


def _off_policy(at: str, ratio: str, words: str, rows: Mapping[str, tuple[str, str]]) -> Iterator[NamedGradient]:
    for name, (weight, meaning) in rows.items():
        yield NamedGradient(
            f"{name}@{at}",
            f"E_μ[Σ_t {ratio}g_t {weight}]",
            f"{words}; {meaning}",
            # Of weights that depend on the own token, or on the whole rollout; of the latter also times ρ̄.
            field=(at == "rollouts" and name not in _COUPLE_TOKENS) or (at, name) == ("mean_ratio", "reverse_kl"),
            on_policy=_EQUAL_ON_POLICY.get(name, {name: 1.0}),
        )


@dataclass(frozen=True)
class SupportName:
    """The support that a name means.

    Attributes:
        direction: "forward" or "reverse".
        whose: "top" for the likeliest tokens of the reference, "own" for those of the policy.
        k: How many; in a vocabulary of fewer than k + 2, two fewer than it has (`kltest.names.support_size`).
        kind: "" for the truncated sum, "renormalised", or "tail" for all other tokens as one.
    """

    direction: str
    whose: str
    k: int
    kind: str

    def __str__(self) -> str:
        return f"local_{self.direction}_kl_{self.whose}{self.k}{f'_{self.kind}' if self.kind else ''}"


_SUPPORT = re.compile(r"local_(forward|reverse)_kl_(top|own)([1-9]\d{0,4})(?:_(renormalised|tail))?")
_SUMS = {
    "": ("Σ_{{v∈S}} {a}·log({a}/{b})", "the truncated sum over {whose}: no divergence, it may be negative"),
    "renormalised": ("KL({a}_S‖{b}_S)", "the KL of both distributions renormalised over {whose}"),
    "tail": ("KL({a}_S∪tail‖{b}_S∪tail)", "the KL with {whose} kept apart and all other tokens taken as one"),
}


def support_named(base: str) -> SupportName | None:
    """Return what a name without a sampler says of a support; None if it says nothing."""
    found = _SUPPORT.fullmatch(base)
    return found and SupportName(found[1], found[2], int(found[3]), found[4] or "")


def resized(name: str, k: int) -> str:
    """Return the name of the same gradient over a support of k tokens; one that says nothing of a support as it is."""
    base, at, sampler = name.partition("@")
    stated = support_named(base)
    return f"{replace(stated, k=k)}{at}{sampler}" if stated else name


def of_support(k: int, of: str) -> tuple[str, ...]:
    """Return the names of a support of k tokens; those of the side `of` first, "ref_" for the reference, else ""."""
    sides = ("top", "own") if of else ("own", "top")
    kinds = [f"_{kind}" if kind else "" for kind in _SUMS]
    return tuple(
        f"local_{way}_kl_{whose}{k}{kind}" for whose in sides for way in ("forward", "reverse") for kind in kinds
    )


@dataclass(frozen=True)
class MixtureName:
    """The divergence from a mixture that a name means.

    Attributes:
        kind: "jensen_shannon", w·KL(ref‖m) + (1 − w)·KL(π‖m), or "skewed_forward_kl", KL(ref‖m), with m = w·ref +
            (1 − w)·π; or "skewed_reverse_kl", KL(π‖m) with m = w·π + (1 − w)·ref.
        weight: w.
        whole: It is of whole rollouts, else of each next token.
    """

    kind: str
    weight: float
    whole: bool


_MIXTURE = re.compile(r"(local_)?(?:(jensen_shannon)|(jensen_shannon|skewed_forward_kl|skewed_reverse_kl)([1-9]\d?))")
_OF_MIXTURES = {
    "jensen_shannon": ("JS{t}_w(π, ref), w = {:g}", "the Jensen-Shannon divergence with weight {:g} of the reference"),
    "skewed_forward_kl": ("KL{t}(ref‖{:g}·ref + {:g}·π)", "the KL of the reference from a mixture, {:g} of it its own"),
    "skewed_reverse_kl": ("KL{t}(π‖{:g}·π + {:g}·ref)", "the KL of the policy from a mixture, {:g} of it its own"),
}
_WEIGHTS = (10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90)


def mixture_named(base: str) -> MixtureName | None:
    """Return what a name without a sampler says of a mixture; None if it says nothing."""
    found = _MIXTURE.fullmatch(base)
    return found and MixtureName(found[2] or found[3], int(found[4] or 50) / 100, whole=found[1] is None)


def of_mixtures(stated: Iterable[float]) -> tuple[str, ...]:
    """Return the names of mixtures, with usual weights and those of numbers that a loss states, and their rests."""
    percents = {round(100 * one) for one in stated if 0 < one < 1 and abs(100 * one - round(100 * one)) < 1e-9}
    weights = sorted({*_WEIGHTS, *percents, *(100 - one for one in percents)} - {0, 100})
    names = [f"local_{kind}{weight}" for kind in _OF_MIXTURES for weight in weights]
    return ("local_jensen_shannon", *(name for name in names if name != "local_jensen_shannon50"))


def counts_alone(name: str) -> bool:
    """Return True for a name that is fitted alone: beside others a gradient would have several spellings, or nearly."""
    stated = mixture_named(name.partition("@")[0])
    usual = ("jensen_shannon", "local_jensen_shannon")
    return name == "future_reverse_kl" or (stated is not None and name.partition("@")[0] not in usual)


_TOGETHER = re.compile(r"inverse_length(?:_of([2-9]|[1-9]\d{1,3}))?")


def together(base: str) -> int | None:
    """Return the number of rollouts whose lengths are added up in `inverse_length_of2`; None for another name."""
    found = _TOGETHER.fullmatch(base)
    return found and int(found[1] or 1)


def is_of_lengths(name: str) -> bool:
    """Return True for a gradient of the lengths of rollouts alone, in which the reference does not occur."""
    return together(name.partition("@")[0]) is not None


def on_rollouts_of_the_sampler(name: str) -> str:
    """Return the name that one of a support, or of lengths, has with rollouts of another sampler.

    A divergence of whole rollouts is a function of the policy alone, and keeps its name.
    """
    mixture = mixture_named(name)
    if mixture is not None and mixture.whole:
        return name
    return f"{name}@{'rollouts' if is_of_lengths(name) else 'sampler'}"


_SUCCESS = re.compile(r"success_utility_of([2-9]|[1-9]\d{1,2})")
_TO_SAMPLER = re.compile(r"(local_)?to_sampler_(kl|squared_log_ratio|total_variation)")


def group_of(base: str) -> int | None:
    """Return the size n of the groups whose normalised advantages follow `success_utility_of<n>`; None for others."""
    found = _SUCCESS.fullmatch(base)
    return found and int(found[1])


def is_of_groups(combination: Iterable[str]) -> bool:
    """Return True if a name among these is of the success rates of groups, which single rollouts do not have."""
    return any(group_of(name.partition("@")[0]) for name in combination)


def towards_sampler(base: str) -> str | None:
    """Return the name that `local_to_sampler_kl` has with the sampler as the reference: `local_reverse_kl`; or None."""
    found = _TO_SAMPLER.fullmatch(base)
    return found and f"{found[1] or ''}{found[2].replace('kl', 'reverse_kl')}"


def of_group(size: int) -> tuple[str, ...]:
    """Return the names that only the policy part of a loss may follow in groups of this size: of success rates."""
    return (f"success_utility_of{size}", f"success_utility_of{size}@rollouts", f"success_utility_of{size}@sampler")


class _Atlas(dict[str, NamedGradient]):
    """The rows by name. Those of next-token distributions, of a support of any size, of any number of rollouts, and of
    the policy part alone are made when they are read.

    Only a loss that reads such distributions, or batches of so many rollouts, or a policy part can follow one: they are
    fitted for those and no others.
    """

    def __missing__(self, name: str) -> NamedGradient:
        base, _, at = name.partition("@")
        if at in ("", "rollouts", "sampler") and (row := _of_policy(name, base, at)) is not None:
            return row
        if (many := together(base)) and at in ("", "rollouts"):
            return _of_lengths(base, many, at)
        stated = support_named(base)
        mixture = mixture_named(base)
        if at not in ("", "sampler") or (stated is None and mixture is None):
            raise KeyError(name)
        if mixture is not None:
            if mixture.whole and at:
                raise KeyError(name)
            formula, meaning = _of_mixture(base, mixture)
            if mixture.whole:
                return NamedGradient(name, f"∇{formula}", meaning)
        elif stated is not None:
            a, b = ("π", "ref") if stated.direction == "reverse" else ("ref", "π")
            whose = f"the {stated.k} likeliest tokens of the {'reference' if stated.whose == 'top' else 'policy'}"
            sides = {"a": a, "b": b, "whose": whose}
            tokens = f"top {stated.k} of {'ref' if stated.whose == 'top' else 'π'}"
            formula, meaning = (text.format(**sides) for text in _SUMS[stated.kind])
            formula, meaning = f"{formula}, S the {tokens}", f"{meaning}, prefixes held fixed"
        if at:
            words = f"{base} with the prefixes weighted by the sampler"
            return NamedGradient(name, f"E_μ[Σ_t ∇{formula}]", words, field=False, on_policy={base: 1.0})
        return NamedGradient(name, f"E_π[Σ_t ∇{formula}]", meaning, field=False)


def _of_policy(name: str, base: str, at: str) -> NamedGradient | None:
    if base in _OTHERS and towards_sampler(base):
        return None
    if (other := towards_sampler(base)) is not None:
        row = ATLAS[f"{other}@{at}" if at else other]
        formula = row.formula.replace("ref", "μ").replace("u_", "v_")
        meaning = f"{row.meaning}; the sampler is the reference, v the log-ratio to it"
        return NamedGradient(name, formula, meaning, row.field, on_policy={"zero": 1.0})
    if (size := group_of(base)) is None and not (base == "expected_reward" and at):
        return None
    slope = f"U′_{size}·" if size else ""
    if not at:
        meaning = (
            f"a utility of the success rate p of a prompt, U′ = E[√(K({size} − K))]/({size}·p(1 − p)) with K successes "
            f"among {size} rollouts: rewards of 0 and 1 over the group's standard deviation follow it"
        )
        return NamedGradient(name, f"∇E_x[U_{size}(p_x)]", meaning)
    if at == "sampler":
        formula, words = f"E_μ[Σ_t ρ_t g_t {slope}R]", "token ratios; the surrogate that PPO ascends, prefixes of μ"
    else:
        formula, words = f"E_μ[Σ_t g_t {slope}(R − E_μ[R])]", "no ratio; the reward less the mean of its prompt"
    words += f"; U′ at the sampler's success rate, in groups of {size}" if size else ""
    return NamedGradient(name, formula, words, on_policy={base: 1.0})


def _of_mixture(base: str, mixture: MixtureName) -> tuple[str, str]:
    """Return the formula of a divergence from a mixture, without its gradient, and its meaning."""
    place, over = ("", "of whole rollouts") if mixture.whole else ("_t", _FIXED)
    if base.endswith("jensen_shannon"):
        return f"JS{place}(π, ref)", f"the Jensen-Shannon divergence {over}"
    formula, meaning = _OF_MIXTURES[mixture.kind]
    numbers = mixture.weight, 1 - mixture.weight
    return formula.format(*numbers, t=place), f"{meaning.format(*numbers)}, {over}"


def _of_lengths(base: str, many: int, at: str) -> NamedGradient:
    total = "ΣL" if many > 3 else "+".join(f"L_{number}" for number in range(1, many + 1))
    if at:
        formula, words = f"E_μ[Σ_i Σ_t g_it/({total})]", f"no ratio; the inverse of the tokens of {many} rollouts"
        return NamedGradient(f"{base}@{at}", formula, words, field=False, on_policy={base: 1.0})
    return NamedGradient(
        base,
        f"∇E_π[1/({total})]",
        f"the mean inverse of the tokens of {many} independent rollouts together: k1 as a loss with a mean over the "
        "tokens of such a batch follows it; the reference does not occur",
    )


ATLAS: dict[str, NamedGradient] = _Atlas({row.name: row for row in _rows()})
FURTHER = (
    *("local_jensen_shannon", "local_jensen_shannon10", "local_skewed_forward_kl10", "local_skewed_reverse_kl10"),
    *("jensen_shannon", "jensen_shannon10", "skewed_forward_kl10", "skewed_reverse_kl10"),
    *(*of_support(2, "ref_"), "inverse_length_of2"),
)
"""Names of next-token distributions: of mixtures with a weight of 10 %, of supports of two tokens, and of lengths of
two rollouts; any other number may stand in place of these."""
OF_POLICY = (
    *("expected_reward@rollouts", "expected_reward@sampler", "to_sampler_total_variation"),
    *("local_to_sampler_total_variation@sampler", "to_sampler_squared_log_ratio"),
    *("local_to_sampler_kl@sampler", "local_to_sampler_kl@rollouts"),
)
"""Names that are fitted for the policy part of a loss alone, beside those of `of_group`."""
_PLACE = {name: place for place, name in enumerate(ATLAS)}


def named(name: str) -> NamedGradient:
    """Return the row of a name. Raises UsageError, with the nearest names, if there is none."""
    try:
        return ATLAS[name]
    except KeyError:
        known = (*ATLAS, *FURTHER, *OF_POLICY, *of_group(4))
        hint = did_you_mean(name, known) or f"the named gradients are {', '.join(known)}"
        raise UsageError(f"there is no named gradient {name!r}; {hint.strip()}") from None


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
    order = sorted(combination, key=lambda name: (_PLACE.get(name, len(_PLACE)), name))
    kept = {name: float(combination[name]) for name in order if name != "zero" and combination[name] != 0}
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

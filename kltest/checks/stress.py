"""Cases far from the graded ones: is the gradient still the declared one there?

The graded environments are mild. A loss may follow the declared gradient in all of them and another one

- once the policy has left the reference, as Huber's loss does beyond its bound;
- where next tokens are all but certain under policy, reference or both, as most are after training;
- with a large vocabulary, whose ids and ranks are large, and most of whose tokens are unlikely;
- where the sampler is far from the policy, so that a cap, window or mask on their ratio acts;
- in rollouts of 64, of 1,023 and of 4,096 tokens, where a window, a discount or a mask begins, and whose log-prob as a
  whole is far below that of any short one.

It is compared with the truth there, so that a declared gradient that is bounded itself, as total variation's, is right.
How far apart depends on the question. A clamp is exact and visible at any distance. A number that differs a little
where a probability is a millionth may be the small constant that guards a logarithm, and is no other gradient.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from kltest.checks.approximations import sizes
from kltest.checks.batches import nearest_multiple, norm
from kltest.checks.check import Found, signed
from kltest.environments import Environment, Instance, OfSome, bandit, of_choices, sequence
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.case import relative_bias, size, target
from kltest.identify.findings import Findings, Row, shared
from kltest.identify.instances import CERTAIN, with_ties
from kltest.loss.calling import Loss
from kltest.moments.averaged import DTYPE as AVERAGED
from kltest.moments.tolerances import TOLERANCES, Tolerances
from kltest.names import LOGITS
from kltest.report import Level

VOCABULARY = 3
# Added to the logits of the first actions, of the reference and of the policy. The expectation weighs an action by its
# probability, and e⁻¹⁶ is as small as the tolerance.
FAR = ((-30.0, -6.0), (-15.0, -4.0))
NEARER = ((-12.0, -6.0), (-8.0, -4.0))
# Probability of the most likely token under policy and reference, a pair for each prompt, beyond .95, .99 and .999:
# first one of them near-deterministic, then both. Log-ratios of tokens stay below 5, which training reaches, so that no
# clamp acts that is only a warning.
ONE_SURE = ((0.993, 0.12), (0.96, 0.5), (0.5, 0.96), (0.993, 0.65), (0.65, 0.993), (0.9992, 0.905), (0.905, 0.9992))
BOTH_SURE = ((0.993, 0.9992), (0.9992, 0.993))
# In batches, which are enumerated prompt by prompt, only the surest.
SUREST = (*ONE_SURE[-2:], BOTH_SURE[-1])
# Actions of a bandit, a prime, so that no shards or blocks are whole; and those that have all of the probability if
# batches are enumerated, as shares of their number.
MANY, LIKELY = 307, (0.14, 0.57, 1.0)
# Actions of a bandit, of which the first are likely; how far below their logits those of the others lie, as a millionth
# is, and how much nearer those of the other one of policy and reference, a log-ratio that training reaches.
SEVERAL, HEAD, UNLIKELY, TIMES = (16, 12, 8, 6), 3, 13.2, 4.8
# Share of the larger probability of unlikely actions below which a gradient there is none; share of it of which nothing
# is left.
FEW, LEFT = 0.1, 0.05
# Relative distance that samples decide about where batches of coupled rows are too many.
SAMPLED = 0.1
TOKEN_FIELDS = LOGITS | {"tokens"}
# |log π/μ| of the first token and of the second, an entry for each prompt: of one token up to 5, then summed up to 10,
# which training reaches; a clamp at 20 is out of reach.
REACHED = (*((step / 2, 0.0) for step in range(1, 11)), *((5.0, step / 2) for step in range(1, 11)))
BEYOND = ((7.0, 0.0), (10.0, 0.0), (14.0, 0.0), (19.0, 0.0))
LENGTH = 64
# Rollouts as long as those of trainers: no multiple of a usual chunk, and within a usual limit; then a multiple of all,
# or of most if each call is a mean over many, which would take minutes.
LONGER = 1023
WHOLE_CHUNKS, WHOLE_CHUNKS_OF_MANY = 4096, 1024
# Lengths that are tried if the loss refuses so many tokens.
SHORTER = (2048, 1024, 512, 256, 128, 96, 64, 48, 32, 24, 20, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4)
# Positions of the tokens that are not certain, by the rows of a batch: multisets of rollouts are enumerated. They are
# multiples of powers of two, where blocks begin, and one less, where they end. In shorter rollouts they are nearer.
CHOICES = {1: (0, 16, 31, 40, 63), 2: (0, 32, 63)}
CHOICES_OF_GROUPS = (0, 48)
# Tokens that are equally likely where none is chosen: rollouts of 1,023 have a log-prob of about −1,400, and their
# probability is zero in floating-point numbers. Those of trainers are as unlikely.
EQUALLY_LIKELY = 4
# Log-probs where a token is certain. In float32 that of a token with a probability above 1 − 6e-8 is 0.
CERTAINLY = (0.0, -CERTAIN)
# Half of the largest log-ratio of a token there; wide if each call is a mean over many: a credit that ends after 8 or
# 32 tokens is off by a fifth then, well above what noise hides.
NARROW, WIDE = 0.4, 2.0
# The same of the first and the last of these tokens in rollouts as long as those of trainers: what is limited there
# alone is seen at log-ratios of a token below 5, and of a rollout below 10.
FAR_TOKENS = 1.8
# Log-ratio there of every token that is certain, twice that of the second token that is not: a loss that keeps a part
# of the tokens, as the largest 256, leaves that one out. Only where no declared gradient is one of rollouts of the
# reference, few of which are enumerated then.
REST = 0.0005
# Log-ratio of every token that is certain in rollouts that drifted from the reference, by their length.
DRIFT = {LENGTH: 0.6, LONGER: 0.12}
# Declared gradients that need no probability of a whole rollout, which is zero where rollouts are long and unlikely.
OF_SUMS = frozenset({"reverse_kl", "local_reverse_kl"})
# Share of a difference below which the part at one position is none; most that a multiple may leave of a gradient.
SMALL, ALIKE = 1e-3, 0.1
# Share of what is allowed below which a first mean over draws, whose noise is part of the bias, needs no more.
ROUGHLY = 0.5
# Standard errors beyond what is allowed at which a mean over draws is off.
SURE = 5.0
# Share of a credit that may be missing beside noise, of which a mean over draws leaves a fiftieth.
UNCREDITED = 0.07

Setting = tuple[float, ...]


class Off(NamedTuple):
    """A setting at which the expected gradient is not the declared one, both (C, V), and by how much.

    `noise` is the standard error, if the loss draws random numbers, or more: 1/√2 of what means over draws differ by.
    """

    setting: Any
    row: Row
    instance: Instance
    found: np.ndarray
    wanted: np.ndarray
    bias: float
    noise: float = 0.0


def first_off(tried: Iterable[Off], allowed: Callable[[Off], float]) -> Off | None:
    """Return the first that is surely off by more than allowed, None if none is; KltestError if one may be."""
    unsure = None
    for off in tried:
        if off.bias > allowed(off) + SURE * off.noise:
            return off
        unsure = off if off.bias > allowed(off) and unsure is None else unsure
    if unsure:
        raise KltestError(
            f"with these random numbers the gradient is off by {unsure.bias:.2g} of the declared one, and "
            f"{unsure.noise:.2g} may be noise"
        )
    return None


@dataclass(frozen=True)
class Stress:
    """A kind of case.

    Attributes:
        rows: Rows of the loss from which it goes further; none if that cannot be asked of it.
        settings: What is tried for a row, from near to far.
        instance: Makes the instance of some settings: with a prompt for each, or of one if they are `apart`.
        tolerance: The field of Tolerances up to which a bias is none.
        where: Names a setting, for the beginning of a sentence.
        codes: The checks that may report it.
        nearer: What is tried instead of a setting at which the loss fails, from far to near.
    """

    rows: Callable[[Findings], list[Row]]
    settings: Callable[[Findings, Row], Sequence[Any]]
    instance: Callable[[Findings, Row, Sequence[Any]], Instance]
    tolerance: str
    where: Callable[[Off], str]
    codes: tuple[str, ...]
    apart: bool = False
    nearer: Callable[[Any], Sequence[Any]] = lambda setting: ()

    def words(self, off: Off) -> str:
        """Return a sentence without its full stop."""
        off_by = f"{self.where(off)} the expected gradient is off by {off.bias:.2g} of the declared one"
        return f"{off_by}; it is right in the graded environments"


# The comparison


def wrong(findings: Findings, name: str) -> str:
    """Describe the first setting of a kind of case at which the gradient is not the declared one, "" if there is none.

    KltestError if the loss fails there and nearer.
    """
    found = findings.once(_first_off, name)
    return f"{STRESS[name].words(found)}." if found else ""


def _first_off(findings: Findings, name: str) -> Off | None:
    stress, tolerances = STRESS[name], TOLERANCES[findings.observed.dtype]
    allowed = max(getattr(tolerances, stress.tolerance), tolerances.narrow or 0.0)
    return first_off(tried(findings, stress), lambda off: allowed)


def tried(findings: Findings, stress: Stress) -> Iterator[Off]:
    """Compare from each row at each setting, nearer where the loss fails; a row that runs nowhere fails at the end.

    `Findings.reach` tells how far it went.
    """
    failures: list[KltestError] = []
    for row in stress.rows(findings):
        for some in _calls(stress, row, stress.settings(findings, row)):
            try:
                yield from _nearer(findings, row, stress, some)
            except KltestError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def _nearer(findings: Findings, row: Row, stress: Stress, settings: Sequence[Any]) -> list[Off]:
    """Compare at settings that share a call; if it fails, at each alone, and at nearer ones in place of those."""
    try:
        return list(compared(findings, row, stress, settings))
    except KltestError as error:
        failure = error
    found: list[Off] = []
    for setting in settings:
        for one in [*([setting] if len(settings) > 1 else []), *stress.nearer(setting)]:
            with suppress(KltestError):
                found += compared(findings, row, stress, [one])
                break
    if not found:
        raise failure
    return found


def _calls(stress: Stress, row: Row, settings: Sequence[Any]) -> list[list[Any]]:
    """Settings that share an instance: of single rollouts all of them, unless they are `apart`."""
    return [[one] for one in settings] if row.batch > 1 or stress.apart else [[*settings]]


def compared(findings: Findings, row: Row, stress: Stress, settings: Sequence[Any]) -> Iterator[Off]:
    """Yield the gradient of batches like a row's beside the declared one, setting by setting; the report says so.

    Those that share an instance are prompts of one environment.
    """
    for some in _calls(stress, row, settings):
        instance = stress.instance(findings, row, some)
        wanted, unit = target(findings.expect, instance, row.sampler), size(instance) / len(some)
        aims = np.split(wanted, len(some))
        parts: list[np.ndarray] = []
        noises = [0.0] * len(some)
        for measure in filter(None, (findings.measure.rough, findings.measure, *findings.measure.further)):
            before, parts = parts, np.split(measure.expected(row, instance).gradient, len(some))
            biases = [relative_bias(one, aim, unit) for one, aim in zip(parts, aims, strict=True)]
            if before:
                triples = zip(before, parts, aims, strict=True)
                noises = [norm(one - other) / math.sqrt(2) / (norm(aim) or unit) for one, other, aim in triples]
            if _is_settled(biases, noises if before else None):
                break
        findings.see(instance, row.sampler, row.batch)
        for setting, one, aim, off, noise in zip(some, parts, aims, biases, noises, strict=True):
            yield Off(setting, row, instance, one, aim, off, noise)


def _is_settled(biases: Sequence[float], noises: Sequence[float] | None) -> bool:
    """Return True if means over draws are right, or surely off; more draws would tell nothing new."""
    most = TOLERANCES[AVERAGED].gradient
    if noises is None:
        return max(biases) <= ROUGHLY * most
    return all(off <= most or off > most + SURE * noise for off, noise in zip(biases, noises, strict=True))


def bias(findings: Findings, row: Row, instance: Instance) -> float:
    """Relative bias of the expected gradient of batches like a row's in an instance."""
    found = findings.measure.expected(row, instance).gradient
    findings.see(instance, row.sampler, row.batch)
    return relative_bias(found, target(findings.expect, instance, row.sampler), size(instance))


def _row_of(findings: Findings, sampler: str) -> list[Row]:
    """Return the row to go further from, of batches if rows are coupled, else of several tokens if there is one.

    None if a row of this sampler is not right, or if it is so over some supports alone, whose vocabularies these are
    not.
    """
    rows = [] if sizes.remark(findings) else _right([row for row in findings.rows if row.sampler == sampler])
    return sorted(rows, key=lambda row: (-row.batch, row.length is None, -(row.length or 0)))[:1]


def _right(rows: list[Row]) -> list[Row]:
    """Return rows if all of them are right, else none; KltestError if samples left one undecided."""
    for row in rows:
        if row.agrees is None and row.method == "sampled":
            raise KltestError(f"it goes further from rows that are right, and {row.where} is not decided")
    return rows if all(row.agrees is True for row in rows) else []


def tokens_of(row: Row) -> int:
    """Tokens of a rollout: two if the loss agrees in rollouts of several and treats them apart, else one."""
    return 1 if row.length == 1 or row.batch > 1 else 2


def prompts(many: int, tokens: int, generator: np.random.Generator) -> Environment:
    """Return sequences of equally likely prompts, each token with a reward of 0 or 1."""
    environment = sequence(VOCABULARY, tokens, prompts=np.full(many, 1 / many), name="prompts")
    return replace(environment, reward=generator.integers(2, size=environment.reward.shape).astype(float))


# Policy and reference far apart


def _bandit_rows(findings: Findings) -> list[Row]:
    try:
        rows = findings.measure.rows("bandit", "current")
    except KltestError:  # it does not take rollouts of one token
        return []
    return _right(rows)


def _moved(findings: Findings, row: Row, settings: Sequence[Any]) -> Instance:
    """The graded bandit with its reference moved, or with its policy (and sampler) moved."""
    ((moved, shift),) = settings
    instance = row.case.instances[0]
    count = instance.environment.vocabulary
    added = np.resize([*shift[: count - 1], *[0.0] * count], count)
    if moved == "reference":
        return replace(instance, reference=table(instance.reference + added))
    left = table(instance.policy + added)
    return replace(instance, policy=left, sampler=left)


def _log_ratios(off: Off) -> str:
    instance = off.instance
    ratios = ", ".join(signed(ratio, 3) for ratio in np.sort(instance.policy[0] - instance.reference[0]))
    return f"In a bandit with the log-ratios {ratios}"


def _apart_by(shifts: Sequence[Setting], tolerance: str, code: str) -> Stress:
    settings = [*zip(("reference", "policy"), shifts, strict=True)]
    return Stress(_bandit_rows, lambda findings, row: settings, _moved, tolerance, _log_ratios, (code,), True, _halved)


def _halved(setting: tuple[str, Setting]) -> list[tuple[str, Setting]]:
    moved, shift = setting
    return [(moved, tuple(each / 2**halvings for each in shift)) for halvings in range(1, 6)]


# Tokens that are all but certain


def _sure(findings: Findings, row: Row, settings: Sequence[Setting]) -> Instance:
    generator = np.random.default_rng([findings.seed, len(_sure_settings(findings, row))])
    environment = prompts(len(settings), tokens_of(row), generator)
    most_likely = np.repeat(np.array(settings), environment.n_contexts // len(settings), axis=0).T
    second = (1 - most_likely) * generator.uniform(0.45, 0.55, size=most_likely.shape)
    policy, reference = np.log(np.stack([most_likely, second, 1 - most_likely - second], axis=-1))
    return Instance.of(environment, policy, reference, policy + generator.uniform(-0.3, 0.3, size=policy.shape))


def _sure_settings(findings: Findings, row: Row) -> tuple[Setting, ...]:
    return SUREST if row.batch > 1 else (*ONE_SURE, *BOTH_SURE)


# A large vocabulary


def _many_actions(findings: Findings, row: Row, settings: Sequence[int]) -> Instance:
    many = settings[0]
    reward = np.random.default_rng(findings.seed).integers(2, size=(1, many)).astype(float)
    instance = Instance.draw(bandit(many, reward=reward), findings.seed)
    if row.batch == 1:
        return instance
    likely = np.array([int(share * (many - 1)) for share in LIKELY])
    above = np.where(np.isin(np.arange(many), likely), CERTAIN, 0.0)
    tables = (table(logits + above) for logits in (instance.policy, instance.reference, instance.sampler))
    return OfSome(instance.environment, *tables, some=instance.paths.take(likely))


def _many(off: Off) -> str:
    many = off.instance.environment.vocabulary
    return f"In a bandit with {many} actions, token ids 0 to {many - 1},"


def many_in_samples(findings: Findings) -> Found | None:
    """Sample batches of coupled rows with so many actions, none of which is certain: few can be if all are enumerated.

    KltestError if samples do not decide.
    """
    rows = STRESS["many tokens"].rows(findings) if findings.observed.dtype != AVERAGED else []
    for row in (row for row in rows if row.batch > 1):
        instance = _many_actions(findings, replace(row, batch=1), [MANY])
        off = findings.measure.distance(row, instance, SAMPLED)
        words = (
            f"In a bandit with {MANY} actions, in samples of batches of {row.batch}, the expected gradient is off by "
            f"about {off.value:.2g} of the declared one"
        )
        if off.low > SAMPLED:
            return Found(f"{words}; it is right in the graded environments.")
        if off.high > SAMPLED:
            raise KltestError(f"{words}, and {off.high:.2g} at most")
    return None


# Unlikely tokens


def _some_unlikely(findings: Findings, row: Row, settings: Sequence[tuple[str, int]]) -> Instance:
    """To all actions but some one of policy and reference gives next to nothing, and the other one more."""
    ((unlikely, many),) = settings
    instance = _many_actions(findings, row, [many])

    def sharp(logits: np.ndarray, below: float) -> np.ndarray:
        likely = logits[:, :HEAD] - logits[:, :HEAD].max()
        return table(np.hstack([likely, 0.1 * logits[:, HEAD:] - below]))

    policy = sharp(instance.policy, UNLIKELY - (unlikely != "policy") * TIMES)
    reference = sharp(instance.reference, UNLIKELY - (unlikely != "reference") * TIMES)
    return replace(instance, policy=policy, reference=reference, sampler=policy)


def _unlikely_settings(findings: Findings, row: Row) -> list[tuple[str, int]]:
    """Return where the declared gradient has a part at unlikely actions."""
    found, unit = [], max(map(abs, findings.expect.values()))
    for setting in (("policy", SEVERAL[0]), ("reference", SEVERAL[0])):
        instance = _some_unlikely(findings, row, [setting])
        part = np.abs(target(findings.expect, instance, row.sampler)[:, HEAD:]).sum()
        likelier = np.exp(np.maximum(instance.policy, instance.reference))[:, HEAD:]
        found += [setting] if part > FEW * unit * likelier.sum() else []
    return found


def cut_off(findings: Findings) -> str:
    """Say that the part of the gradient is missing which lies at unlikely actions; "" if it is there.

    A constant beside a probability leaves some of it, a cut at a share of the largest probability nothing.
    """
    if findings.observed.dtype == AVERAGED:  # a mean over draws does not show so little
        return ""
    for off in tried(findings, STRESS["unlikely tokens"]):
        wanted, found = off.wanted[:, HEAD:], off.found[:, HEAD:]
        if abs((found * wanted).sum()) <= LEFT * (wanted**2).sum():
            return f"{STRESS['unlikely tokens'].where(off)} nothing is left of their part of the gradient."
    return ""


def _unlikely(off: Off) -> str:
    unlikely, many = off.setting
    other = "reference" if unlikely == "policy" else "policy"
    return (
        f"Where {many - HEAD} tokens have about {np.exp(-UNLIKELY):.0e} of the largest probability each under the "
        f"{unlikely}, as most of a large vocabulary, and {np.exp(TIMES):.0f} times that under the {other},"
    )


# A sampler far from the policy


def _far_sampler(findings: Findings, row: Row, settings: Sequence[Setting]) -> Instance:
    """A prompt for each pair: the first action e^d times as likely as under the sampler, the second e^−d times."""
    generator = np.random.default_rng([findings.seed, VOCABULARY])
    environment = prompts(len(settings), tokens_of(row), generator)
    later = environment.n_contexts // len(settings) - 1
    distances = np.concatenate([[first, *[second] * later] for first, second in settings])
    often, seldom = generator.uniform(0.3, 0.45, size=(2, len(distances))), np.exp(-distances)
    first = np.stack([often[0], often[0] * seldom])
    second = np.stack([often[1] * seldom, often[1]])
    policy, sampler = np.log(np.stack([first, second, 1 - first - second], axis=2))
    reference = policy + generator.uniform(-0.6, 0.6, size=policy.shape)
    return Instance.of(environment, policy, reference, sampler)


def examine_far_sampler(findings: Findings) -> Found | None:
    """Report the least log-ratio of policy to sampler at which the gradient is not the declared one: KL306."""
    stress, allowed = STRESS["far sampler"], TOLERANCES[findings.observed.dtype].far_sampler
    levels: tuple[tuple[Level, tuple[Setting, ...]], ...] = (("error", REACHED), ("warning", BEYOND))
    for row, (level, reach) in product(stress.rows(findings), levels):
        try:
            found = _nearer(findings, row, stress, [one for one in stress.settings(findings, row) if one in reach])
        except KltestError as error:
            if level == "error":
                raise
            return Found(f"log-ratios up to {reach[-1][0]:g} could not be tried: {error}", "inconclusive", level)
        if off := first_off(found, lambda off: allowed):
            return Found(f"{stress.words(off)}.", level=level)
    return None


def _log_ratio_to_sampler(off: Off) -> str:
    of = "summed over a rollout" if off.setting[1] else "of one token"
    return f"From log-ratios of policy to sampler of about ±{sum(off.setting):g} {of}"


# Rollouts of many tokens. All tokens but a few, near the start and far from it, are all but certain and equally likely
# under policy, reference and sampler. So few rollouts remain that they are enumerated, and the declared gradient is
# known by dynamic programming. Or one such token stands for several, each of which is as likely as the others.


def _long_rows(findings: Findings) -> list[Row]:
    """Of each sampler the row of rollouts of several tokens in the largest batches, if all of its rows are right."""
    of_samplers = (_right([row for row in findings.rows if row.sampler == sampler]) for sampler in findings.samplers)
    several = [[row for row in rows if row.length != 1] for rows in of_samplers if not sizes.remark(findings)]
    return [max(rows, key=lambda row: row.batch) for rows in several if rows]


def choices_of(batch: int, length: int = LENGTH) -> tuple[int, ...]:
    """Return the positions of the tokens that are not certain, for batches of this size; the last token stays last.

    In longer rollouts they are multiples of larger powers of two, and one less; in those of whole chunks one more.
    """
    places, last, times = CHOICES.get(batch, CHOICES_OF_GROUPS), LENGTH - 1, (length + 1) // LENGTH
    if length <= LENGTH:
        return tuple(dict.fromkeys(place * (length - 1) // last for place in places))
    beside = int(length % LENGTH == 0)
    between = (place * times + place % 2 * (times - 1) + beside for place in places if 0 < place < last)
    return (0, *between, *([length - 1] if last in places else []))


@lru_cache(maxsize=32)
def long_instance(
    batch: int,
    seed: int,
    length: int = LENGTH,
    width: float = NARROW,
    rest: float = 0.0,
    apart: float = FAR_TOKENS,
    alike: bool = False,
) -> Instance:
    """Draw the instance for batches of this size; rewards of 0 or 1 a rollout, each about half of the time.

    Log-ratios of a token lie within twice the width; wide ones make the credit of later tokens large beside noise.
    `rest` is the log-ratio of tokens that are certain, and half of it that of the second choice of three; the first and
    the last choice of the longest rollouts are twice `apart`. `alike`: no token is certain; those that are not chosen
    are one of several that are equally likely.
    """
    generator = np.random.default_rng([seed, length])
    choices, vocabulary = choices_of(batch, length), EQUALLY_LIKELY if alike else 2
    environment, rollouts, chosen = of_choices(vocabulary, length, choices, name="long", options=2)
    shape = (len(chosen), 2)
    base = 0.6 * generator.standard_normal(shape)
    reference, sampler = (base + width * generator.uniform(-1, 1, size=shape) for width in (width, 0.15))
    if length > LENGTH and width < apart:
        for place in (choices[0], choices[-1]):
            there = np.unique(rollouts.contexts[:, place])
            reference[there] = base[there] + np.where(np.arange(len(there)) % 2, -apart, apart)[:, None] * (1, -1)
    if rest and len(choices) > 2:
        there = np.unique(rollouts.contexts[:, choices[1]])
        reference[there] = base[there] + (rest / 4, -rest / 4)
    others = np.full(vocabulary, -np.log(vocabulary)) if alike else CERTAINLY
    unlikely = np.full((len(chosen), vocabulary - 2), -CERTAIN)
    policy, reference, sampler = (
        np.where(chosen[:, None], table(np.hstack([logits, unlikely])), others) for logits in (base, reference, sampler)
    )
    if rest:
        reference[~chosen] = np.log([np.exp(-rest), -np.expm1(-rest)])
    if not alike:
        return with_ties(OfSome(environment, policy, reference, sampler, some=rollouts), seed)
    stand_for = np.full(len(rollouts), (length - len(choices)) * np.log(vocabulary))
    some = replace(rollouts, log_weight=stand_for)
    return with_ties(OfSome(environment, policy, reference, sampler, some=some, alike=~chosen), seed)


def _long(findings: Findings, row: Row, settings: Sequence[int]) -> Instance:
    everywhere = settings[0] > LONGER and not any("forward" in name for name in findings.expect)
    width = WIDE if findings.observed.dtype == AVERAGED else NARROW
    alike = LENGTH < settings[0] <= LONGER and _equally_likely(findings)
    return long_instance(row.batch, findings.seed, settings[0], width, REST if everywhere else 0.0, alike=alike)


def _drifted(findings: Findings, row: Row, settings: Sequence[int]) -> Instance:
    return long_instance(row.batch, findings.seed, settings[0], rest=DRIFT[settings[0]], apart=0.0)


def _drifting_rows(findings: Findings) -> list[Row]:
    """Return rows for rollouts that drifted: none if digits are few, or if rollouts of the reference count."""
    exactly = TOLERANCES[findings.observed.dtype].summed is not None
    return _long_rows(findings) if exactly and not any("forward" in name for name in findings.expect) else []


def _equally_likely(findings: Findings) -> bool:
    """Return True if one token may stand for all: the loss does not read which it is, and sums of log-probs count."""
    summed = TOLERANCES[findings.observed.dtype].summed is not None and set(findings.expect) <= OF_SUMS
    return summed and not findings.observed.uses & TOKEN_FIELDS


def _rollouts(off: Off) -> str:
    where = f"In rollouts of {off.setting} tokens"
    if _is_unlikely(off.instance):
        where += f" with a log-prob of about −{-off.instance.paths.along(off.instance.policy).mean():,.0f}"
    return f"{where}, {off.row.sampler} sampler,"


def _is_unlikely(instance: Instance) -> bool:
    """Return True if tokens are equally likely in it where none is chosen."""
    return isinstance(instance, OfSome) and instance.alike is not None


def ends_instance(seed: int) -> Instance:
    """Return rollouts as long as those of trainers, in which the first token decides the KL of the last.

    No other has any. After one first token policy and reference are equal, after the other they are far apart.
    """
    choices = (0, LONGER - 1)
    environment, rollouts, chosen = of_choices(2, LONGER, choices, name="ends")
    base = np.where(chosen[:, None], 0.0, (CERTAIN, 0.0))
    reference = base.copy()
    reference[rollouts.contexts[rollouts.tokens[:, 0] == 1, -1]] = (WIDE, -WIDE)
    return with_ties(OfSome(environment, *map(table, (base, reference, base)), some=rollouts), seed)


def credited_to_the_end(findings: Findings) -> Found | None:
    """Report the share of the last token's log-ratio that the first of a thousand is credited with, beside noise.

    A discount so near to 1 moves the whole gradient by less than noise hides. KltestError if it hides this share too.
    """
    if findings.observed.dtype != AVERAGED:
        return None
    instance = ends_instance(findings.seed)
    first = np.unique(instance.paths.contexts[:, 0])
    for row in _long_rows(findings):
        if row.batch > 1:
            raise KltestError("a discount close to 1 is not seen in batches of coupled rows, beside random numbers")
        wanted = target(findings.expect, instance, row.sampler)[first]
        shares = []
        for measure in (findings.measure, *findings.measure.further[:1]):
            found = measure.gradient_of(measure.loss, instance, row.sampler)[first]
            shares.append(nearest_multiple(found, wanted))
        share, noise = float(np.mean(shares)), float(np.ptp(shares)) / 2
        words = (
            f"In rollouts of {LONGER} tokens, {row.sampler} sampler, the first token is credited with {share:.2g} of "
            f"the last one's log-ratio, where {noise:.1g} may be noise"
        )
        if abs(share - 1) > UNCREDITED + 3 * noise:
            return Found(f"{words}; the gradient is right in the graded environments.")
        if max(abs(share - 1), noise) > UNCREDITED:
            raise KltestError(words)
    return None


def late(findings: Findings, code: str) -> Found | None:
    """Return the finding in long rollouts if it belongs to a check; calls that fail make it inconclusive."""
    found = _in_long_rollouts(findings)
    return Found(found[1]) if found and found[0] == code else None


def right_in_long_rollouts(findings: Findings) -> bool:
    """Return True if the gradient is the declared one there."""
    return _in_long_rollouts(findings) is None


def _is_stated(findings: Findings, off: Off, tolerance: float) -> bool:
    """Return True if a number that the loss states, as `max_length=512`, is all that is in the way of the gradient.

    Rollouts may never be longer than it says; `kltest.checks.cuts` tells what it does. But if tokens further on have
    the declared gradient, rollouts may be longer, and others lack a part of theirs: a window of a credit does that.
    """
    last = np.unique(off.instance.paths.contexts[:, choices_of(off.row.batch, off.setting)[-1]])
    if off.wanted[last].any() and norm((off.found - off.wanted)[last]) <= tolerance * norm(off.wanted[last]):
        return False
    for larger in with_larger_numbers(findings.loss, off.setting, 10 * LONGER):
        try:
            found = findings.measure.gradient_of(larger, off.instance, off.row.sampler)
        except KltestError:  # rows of it are coupled
            return True
        if relative_bias(found, off.wanted, size(off.instance)) <= tolerance:
            return True
    return False


def with_larger_numbers(loss: Loss, below: float, to: int) -> Iterator[Loss]:
    """Yield the loss with each number in turn that it states, beyond the usual length and below another, made `to`."""
    for name, value in loss.arguments.stated.items():
        if isinstance(value, int | float) and LENGTH < value < below:
            yield loss.with_value(name, type(value)(to))


def farther(instance: Instance, to_reference: float, to_sampler: float) -> Instance:
    """Return the same environment with log-ratios to the reference and to the sampler as many times as large."""
    policy = instance.policy
    reference = table(policy + to_reference * (instance.reference - policy))
    return replace(instance, reference=reference, sampler=table(policy + to_sampler * (instance.sampler - policy)))


@shared
def _in_long_rollouts(findings: Findings) -> tuple[str, str] | None:
    """Return the check that the first difference in long rollouts belongs to, and its words."""
    tolerances, stress = TOLERANCES[findings.observed.dtype], STRESS["long rollouts"]

    def allowed(off: Off) -> float:
        summed = (tolerances.summed or 0.0) if _is_unlikely(off.instance) else 0.0
        return max(Tolerances.guard, tolerances.gradient, summed)

    off = first_off(tried(findings, stress), allowed)
    if off is None or _is_stated(findings, off, tolerance := allowed(off)):
        return None
    where = stress.words(off)
    factor = nearest_multiple(off.found, off.wanted)
    small = max(SMALL, tolerance)
    if norm(off.found) <= small * norm(off.wanted):
        return "KL105", f"{where}: nothing is left of it."
    left, whole = (
        norm(off.found - factor * off.wanted) / norm(off.found),
        norm(off.found - off.wanted) / norm(off.found),
    )
    # Where digits are few, a factor also has to account for what is off: it is none of what a bound takes off some.
    if left <= tolerance or left <= min(10 * tolerance, ALIKE, ALIKE * whole):
        return "KL203", f"{where}: it is {factor:.4g} times the declared one."
    choices = choices_of(off.row.batch, off.setting)
    contexts, difference = off.instance.paths.contexts, off.found - off.wanted
    places = [t for t in choices if norm(difference[np.unique(contexts[:, t])]) > small * norm(difference)]
    differs = f"{where}: it differs at tokens {', '.join(map(str, places))} of {', '.join(map(str, choices))} from 0 on"
    if "reverse_kl" in findings.expect and choices[-1] not in places:
        return "KL205", f"{differs}, so that log-ratios of much later tokens are not credited in full."
    return "KL105", f"{differs}."


STRESS = {
    "drifted rollouts": Stress(
        _drifting_rows,
        lambda findings, row: tuple(DRIFT),
        _drifted,
        "far",
        lambda off: f"In rollouts of {off.setting} tokens with a log-ratio of {DRIFT[off.setting]} each",
        ("KL105",),
        apart=True,
    ),
    "far apart": _apart_by(FAR, "gradient", "KL504"),
    # In bandits that are less far, beyond what a small constant makes there.
    "less far apart": _apart_by(NEARER, "far", "KL105"),
    "near-deterministic": Stress(
        lambda findings: _row_of(findings, findings.samplers[0]),
        _sure_settings,
        _sure,
        "far",
        lambda off: (
            "Where the likeliest token has probability {:g} under the policy and {:g} under the reference".format(
                *off.setting
            )
        ),
        ("KL105",),
    ),
    "many tokens": Stress(
        lambda findings: _row_of(findings, findings.samplers[0]) if findings.observed.uses & TOKEN_FIELDS else [],
        lambda findings, row: [MANY],
        _many_actions,
        "far",
        _many,
        ("KL105",),
        nearer=lambda many: [many // 3, many // 10],
    ),
    "unlikely tokens": Stress(
        lambda findings: [row for row in _bandit_rows(findings) if row.batch == 1],
        _unlikely_settings,
        _some_unlikely,
        "far",
        _unlikely,
        ("KL105",),
        apart=True,
        nearer=lambda setting: [(setting[0], many) for many in SEVERAL if many < setting[1]],
    ),
    "far sampler": Stress(
        lambda findings: _row_of(findings, "stale"),
        lambda findings, row: [one for one in (*REACHED, *BEYOND) if tokens_of(row) > 1 or not one[1]],
        _far_sampler,
        "far_sampler",
        _log_ratio_to_sampler,
        ("KL306",),
    ),
    "long rollouts": Stress(
        _long_rows,
        lambda findings, row: (
            LENGTH,
            LONGER,
            WHOLE_CHUNKS if findings.observed.dtype != AVERAGED else WHOLE_CHUNKS_OF_MANY,
        ),
        _long,
        "gradient",
        _rollouts,
        ("KL105", "KL203", "KL205"),
        apart=True,
        nearer=lambda length: [each for each in SHORTER if each < length],
    ),
}

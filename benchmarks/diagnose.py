"""Coverage and power of `kltest diagnose`: logs of rollouts that are drawn exactly, right ones and with a planted bug.

    python -m benchmarks.diagnose [--tries 200]    # writes diagnose.csv and diagnose_coverage.csv

A bigram of 32 tokens with an end token answers sixteen prompts with at most 48 tokens. Policy, older policy, engine and
reference are tables of log-probs, so that tokens are drawn from what the logs say, or from what a bug makes of it, and
what the intervals are of is known by recursion.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import typer
from rich.progress import track
from scipy.special import log_softmax

from benchmarks.measure import record
from kltest.diagnosing.diagnose import diagnose
from kltest.diagnosing.intervals import MOST_INTERVALS
from kltest.diagnosing.questions import CLIP
from kltest.environments.builders import ngram
from kltest.environments.environment import END

VOCABULARY, LENGTH, PROMPTS, GROUP = 32, 48, 16, 4
SIZES = (32, 128)
BETA = 0.05


@dataclass(frozen=True)
class Tables:
    """Log-probs (C, V) under policy, older policy, engine and reference, and those that tokens are drawn with."""

    logp: np.ndarray
    old_logp: np.ndarray
    rollout_logp: np.ndarray
    ref_logp: np.ndarray
    drawn: np.ndarray


@cache
def environment():
    """The bigram; a prompt is the context in which a rollout begins."""
    base = ngram(VOCABULARY, LENGTH, 2, end_token=0)
    return replace(base, start=1 + np.arange(PROMPTS), prompts=np.full(PROMPTS, 1 / PROMPTS))


@cache
def tables(seed: int = 0, age: float = 0.1) -> Tables:
    """Draw an engine that differs from the older policy as rounding does, and a reference farther away."""
    generator = np.random.default_rng(seed)
    logits = 1.5 * generator.standard_normal((environment().n_contexts, VOCABULARY))
    logits[:, 0] = 0.0  # ends a rollout after thirty tokens or so
    moved = [scale * generator.standard_normal(logits.shape) for scale in (0.0, age, 0.3)]
    policy, old, ref = (log_softmax(logits + one, axis=1) for one in moved)
    engine = log_softmax(old + 0.01 * generator.standard_normal(logits.shape), axis=1)
    return Tables(policy, old, engine, ref, engine)


def truncated(log_probs: np.ndarray, p: float = 1.0, k: int = VOCABULARY) -> np.ndarray:
    """Return log-probs (C, V) of top-p and top-k sampling, renormalised; −inf outside."""
    order = np.argsort(-log_probs, axis=1)
    chances = np.take_along_axis(np.exp(log_probs), order, axis=1)
    keep = (chances.cumsum(axis=1) - chances < p) & (np.arange(VOCABULARY) < k)
    kept = np.zeros_like(keep)
    np.put_along_axis(kept, order, keep, axis=1)
    return log_softmax(np.where(kept, log_probs, -np.inf), axis=1)


def at_temperature(log_probs: np.ndarray, temperature: float) -> np.ndarray:
    """Return the log-probs (C, V) of logits that are divided by a temperature."""
    return log_softmax(log_probs / temperature, axis=1)


def drawn(tables: Tables, prompts: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw logs of several rollouts for each of some prompts, as one batch that is padded with zeros."""
    starts = environment().start[np.sort(generator.integers(PROMPTS, size=prompts))].repeat(GROUP)
    following, sums = environment().successors[:, :, 0], np.exp(tables.drawn).cumsum(axis=1)
    contexts, tokens = np.zeros((2, len(starts), LENGTH), dtype=int)
    mask, current = np.zeros(contexts.shape, dtype=bool), starts
    for step in range(LENGTH):
        live = current != END
        chances = sums[current * live]
        token = (generator.random((len(starts), 1)) * chances[:, -1:] >= chances).sum(axis=1).clip(0, VOCABULARY - 1)
        contexts[:, step], tokens[:, step], mask[:, step] = current * live, token * live, live
        current = np.where(live, following[current * live, token], END)
    names = ("logp", "old_logp", "rollout_logp", "ref_logp")
    found = {name: np.where(mask, getattr(tables, name)[contexts, tokens], 0.0) for name in names}
    chances = np.exp(tables.old_logp)
    entropy = -(chances * np.where(chances > 0, tables.old_logp, 0.0)).sum(axis=1)
    reward = (tokens[:, 0] % 2 + generator.random(len(tokens)) < 1).astype(float)
    return found | {
        "mask": mask.astype(float),
        "entropy": np.where(mask, entropy[contexts], 0.0),
        "reward": reward,
        "group": np.repeat(np.arange(prompts), GROUP),
    }


Logged = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Logs that are right, or have a bug that one of the `questions` should find.

    `tables` changes the policies before rollouts are drawn, `logs` what was logged; `without` are columns that are
    not logged; `besides` are questions that find it as well. Bugs that are `near` a margin need not
    be found.
    """

    name: str
    questions: tuple[str, ...] = ()
    tables: Callable[[Tables], Tables] = lambda one: one
    logs: Callable[[Logged], Logged] = lambda one: one
    without: tuple[str, ...] = ("entropy",)
    besides: tuple[str, ...] = ()
    near: bool = False


def _without_last(logs: Logged) -> Logged:
    last = logs["mask"].sum(axis=1).astype(int) - 1
    mask = logs["mask"].copy()
    mask[np.arange(len(last)), last] = 0
    return logs | {"mask": mask}


def _with_padding(logs: Logged) -> Logged:
    return logs | {"mask": np.ones_like(logs["mask"])}


def _with_prompt(logs: Logged) -> Logged:
    """Three tokens of the prompt before the rollout, the same for all of a group."""
    size = len(logs["mask"])
    found = dict(logs)
    for name in ("logp", "old_logp", "rollout_logp", "ref_logp", "mask"):
        of_prompt = np.ones((size, 3)) if name == "mask" else -1 - logs["group"][:, None] % 3 - np.arange(3) / 9
        found[name] = np.concatenate([of_prompt, logs[name]], axis=1)
    return found


def _shaped(logs: Logged, beta: float = BETA, own: str = "old_logp") -> Logged:
    live, u = logs["mask"] != 0, logs[own] - logs["ref_logp"]
    last = live.sum(axis=1) - 1
    reward = np.where(np.arange(live.shape[1]) == last[:, None], logs["reward"][:, None], 0.0)
    return logs | {"token_level_rewards": reward - beta * u}


def _advantages(logs: Logged, beta: float = BETA) -> Logged:
    returns = logs["reward"] - beta * (logs["logp"] - logs["ref_logp"]).sum(axis=1)
    groups = returns.reshape(-1, GROUP)
    scaled = (groups - groups.mean(axis=1, keepdims=True)) / groups.std(axis=1, keepdims=True)
    return logs | {"advantages": scaled.ravel()}


def _exchanged(logs: Logged) -> Logged:
    return logs | {"old_logp": logs["ref_logp"], "ref_logp": logs["old_logp"]}


def _shifted(logs: Logged) -> Logged:
    return logs | {"ref_logp": np.roll(logs["ref_logp"], 1, axis=1) * logs["mask"]}


def _recomputed(logs: Logged) -> Logged:
    return logs | {"old_logp": logs["logp"], "version": logs["group"] % 2}


NO_ENGINE = ("entropy", "rollout_logp")
CASES = (
    Case("right"),
    Case("right, old rollouts", tables=lambda _: tables(0, 0.5)),
    Case("right, without an engine", without=NO_ENGINE),
    Case(
        "right, policy alone",
        without=(*NO_ENGINE, "old_logp", "group"),
        tables=lambda one: replace(one, drawn=one.logp),
    ),
    Case("right, entropy logged", tables=lambda one: replace(one, logp=one.old_logp), without=("logp",)),
    Case("right, penalty in rewards", logs=_shaped),
    Case("right, penalty in advantages", logs=_advantages),
    Case("top-p .9, renormalised", ("truncation",), lambda one: _of_engine(one, truncated(one.rollout_logp, p=0.9))),
    Case("top-p .98, renormalised", ("truncation",), lambda one: _of_engine(one, truncated(one.rollout_logp, p=0.98))),
    Case("top-k 16, renormalised", ("truncation",), lambda one: _of_engine(one, truncated(one.rollout_logp, k=16))),
    Case(
        "top-p .9, raw log-probs",
        ("sampling",),
        lambda one: replace(one, drawn=truncated(one.rollout_logp, p=0.9)),
        without=("logp",),
    ),
    Case(
        "temperature .8, raw log-probs",
        ("sampling",),
        lambda one: replace(one, drawn=at_temperature(one.rollout_logp, 0.8)),
        without=("logp",),
    ),
    Case(
        "temperature 1.2 in the engine alone",
        ("temperature", "engine"),
        lambda one: _of_engine(one, at_temperature(one.rollout_logp, 1.2)),
    ),
    Case(
        "temperature 1.2 in the trainer alone, engine raw",
        ("truncation", "temperature"),
        lambda one: replace(
            one,
            drawn=at_temperature(one.rollout_logp, 1.2),
            logp=at_temperature(one.logp, 1.2),
            old_logp=at_temperature(one.old_logp, 1.2),
        ),
    ),
    Case("engine with other weights", ("engine",), lambda one: _of_engine(one, tables(0, 0.4).old_logp)),
    Case(
        "top-p .995, renormalised",
        ("truncation",),
        lambda one: _of_engine(one, truncated(one.rollout_logp, p=0.995)),
        near=True,
    ),
    Case(
        "top-p .98, raw log-probs",
        ("sampling",),
        lambda one: replace(one, drawn=truncated(one.rollout_logp, p=0.98)),
        without=("logp",),
        near=True,
    ),
    Case(
        "temperature 1.03 in the engine alone",
        ("temperature",),
        lambda one: _of_engine(one, at_temperature(one.rollout_logp, 1.03)),
        near=True,
    ),
    Case("engine a little away", ("engine",), lambda one: _of_engine(one, tables(0, 0.27).old_logp), near=True),
    Case("reference is the policy", ("reference",), lambda one: replace(one, ref_logp=one.logp)),
    Case("reference is the older policy", ("reference",), lambda one: replace(one, ref_logp=one.old_logp)),
    Case("reference and older policy exchanged", ("reference",), logs=_exchanged, without=NO_ENGINE),
    Case("the same, with an engine", ("engine",), logs=_exchanged),
    Case("reference shifted by one token", ("columns",), logs=_shifted, besides=("reference",)),
    Case("negatives of log-probs", ("columns",), logs=lambda logs: logs | {"ref_logp": -logs["ref_logp"]}),
    Case("older policy computed again", ("staleness",), logs=_recomputed, without=NO_ENGINE),
    Case("mask without the last token", ("mask",), logs=_without_last),
    Case("mask with padding", ("mask",), logs=_with_padding),
    Case("mask with the prompt", ("mask",), logs=_with_prompt),
    Case("penalty of the wrong sign in rewards", ("coefficient",), logs=lambda logs: _shaped(logs, -BETA)),
    Case("penalty of the wrong sign in advantages", ("coefficient",), logs=lambda logs: _advantages(logs, -BETA)),
)


def _of_engine(one: Tables, engine: np.ndarray) -> Tables:
    return replace(one, rollout_logp=engine, drawn=engine)


def case_logs(case: Case, prompts: int, generator: np.random.Generator) -> Logged:
    """Draw the logs of a case."""
    found = case.logs(drawn(case.tables(tables()), prompts, generator))
    return {name: value for name, value in found.items() if name not in case.without}


def visits(prompt: int, log_probs: np.ndarray) -> np.ndarray:
    """Return the probability (T, C) of being in each context at each position of the rollouts of a prompt."""
    found = np.zeros((LENGTH, environment().n_contexts))
    found[0, environment().start[prompt]] = 1
    following = environment().successors[:, :, 0]
    for step in range(LENGTH - 1):
        np.add.at(
            found[step + 1], following[following != END], (found[step][:, None] * np.exp(log_probs))[following != END]
        )
    return found


def truth(one: Tables) -> dict[str, float]:
    """Return what the intervals are of, by question and name."""
    chances, each = np.exp(one.drawn), [visits(prompt, one.drawn) for prompt in range(PROMPTS)]
    counts = sum(each).sum(axis=0) / PROMPTS

    def rollout(values: np.ndarray) -> float:
        return float(counts @ (chances * np.where(chances > 0, values, 0.0)).sum(axis=1))

    def token(values: np.ndarray) -> float:
        return rollout(values) / float(counts.sum())

    # Of tokens that the engine can draw, weighted back to the older policy.
    aged = np.exp(np.where(chances > 0, one.old_logp - one.drawn, 0.0)) * (
        np.exp(-(one.old_logp - one.logp)) - 1 + one.old_logp - one.logp
    )
    age, engine, u = one.old_logp - one.logp, one.rollout_logp - one.old_logp, one.rollout_logp - one.ref_logp
    entropy = -(np.exp(one.old_logp) * one.old_logp).sum(axis=1, keepdims=True)
    first = [
        chances[environment().start] * values[environment().start] ** power
        for values in (one.old_logp, np.where(chances > 0, one.rollout_logp, 0.0))
        for power in (1, 2)
    ]
    spread = [(first[at + 1].sum(axis=1) - first[at].sum(axis=1) ** 2).sum() for at in (0, 2)]
    return {
        "staleness.kl": rollout(aged),
        "staleness.kl_token": token(aged),
        "engine.gap": token(np.abs(engine)),
        "engine.kl_token": token(engine),
        "truncation.kept_mass": token(np.exp(-engine)),
        "sampling.surprise": token(-one.old_logp - entropy),
        "temperature.ratio": float(np.sqrt(spread[0] / spread[1])),
        "reference.kl": rollout(u),
        "reference.kl_token": token(u),
        "reference.mean_weight": token(np.exp(-u)),
        "ratio.beyond_clip": token(np.abs(np.exp(-age) - 1) > CLIP),
        "kl to go.variance": to_go(one, u, each),
    }


def to_go(one: Tables, u: np.ndarray, each: list[np.ndarray]) -> float:
    """Return the variance of Σ_(s>t) u_s among rollouts of a prompt that reach t, over the tokens of groups."""
    chances, following = np.exp(one.drawn), environment().successors[:, :, 0]
    u = np.where(chances > 0, u, 0.0)
    # First and second moments of the sum from a context on; `later` are those of the sum behind each token.
    moments, later = np.zeros((2, len(u))), []
    for _ in range(LENGTH):
        behind = np.where(following == END, 0.0, moments[:, following])
        later.append((chances * behind).sum(axis=2))
        moments = np.stack(
            [(chances * one).sum(axis=1) for one in (u + behind[0], u**2 + 2 * u * behind[0] + behind[1])]
        )
    above = below = 0.0
    for prompt in each:
        alive = prompt.sum(axis=1)
        mean, square = ((prompt * np.stack(later[::-1])[:, which]).sum(axis=1) / alive for which in (0, 1))
        weight = GROUP * alive * (1 - (1 - alive) ** (GROUP - 1))
        above, below = above + (weight * (square - mean**2)).sum(), below + weight.sum()
    return above / below


COVERED = (
    "right",
    "right, old rollouts",
    "right, entropy logged",
    "top-p .9, renormalised",
    "temperature 1.2 in the engine alone",
)
EACH = 0.01
"""Rate at which a single interval may miss, and at which any of a report may."""


def coverage(prompts: int, tries: int) -> Iterator[dict[str, Any]]:
    """Yield how often each interval is below and above what it is of, at EACH, and any of a report at that rate."""
    for case in (one for one in CASES if one.name in COVERED):
        generator = np.random.default_rng([prompts, CASES.index(case)])
        expected, counts, widths, anywhere = truth(case.tables(tables())), Counter(), Counter(), 0
        for _ in track(range(tries), f"coverage: {case.name}, {prompts}"):
            logs = case_logs(case, prompts, generator)
            for rate in (EACH * MOST_INTERVALS, EACH):
                answers = diagnose(logs, error_rate=rate).answers
                found = {f"{one.question}.{name}": value for one in answers for name, value in one.numbers.items()}
                pairs = {name: (one, expected[name]) for name, one in found.items() if name in expected}
                if rate == EACH:
                    anywhere += any(not one.low <= value <= one.high for one, value in pairs.values())
                    continue
                for name, (one, value) in pairs.items():
                    counts[name, "below"] += one.high < value
                    counts[name, "above"] += one.low > value
                    widths[name] += one.width / tries
        row = {"logs": case.name, "prompts": prompts, "tries": tries}
        yield row | {"interval": "any of a report", "missed": anywhere / tries}
        for name, width in widths.items():
            sides = {side: counts[name, side] / tries for side in ("below", "above")}
            missed = {"missed": sum(sides.values()), **sides}
            yield row | {"interval": name, **missed, "truth": float(expected[name]), "width": width}


def power(prompts: int, tries: int) -> Iterator[dict[str, Any]]:
    """Yield how often the bug of each case is found, something else is, and nothing can be decided.

    At the larger size only of logs that are right, or near a margin.
    """
    few = prompts == min(SIZES)
    for number, case in ((at, one) for at, one in enumerate(CASES) if few or one.near or not one.questions):
        generator, counts = np.random.default_rng([prompts, number]), Counter()
        for _ in track(range(tries), f"power: {case.name}, {prompts}"):
            report = diagnose(case_logs(case, prompts, generator))
            found = {one.question for one in report.answers if one.status == "finding"}
            counts["found"] += bool(found & {*case.questions})
            counts["others"] += bool(found - {*case.questions, *case.besides})
            counts["inconclusive"] += report.verdict == "inconclusive"
        row = {"planted": case.name, "prompts": prompts, "rollouts": prompts * GROUP, "tries": tries}
        yield row | {name: counts[name] / tries for name in ("found", "others", "inconclusive")}


TABLES = {"diagnose.csv": power, "diagnose_coverage.csv": coverage}


def main(tries: int = 200) -> None:
    """Write both tables."""
    for name, rows in TABLES.items():
        found = [row for prompts in SIZES for row in rows(prompts, tries)]
        record(Path(__file__).with_name(name), pandas.DataFrame(found))


if __name__ == "__main__":
    typer.run(main)

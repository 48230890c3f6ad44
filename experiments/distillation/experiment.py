"""Distillation towards a teacher: where each loss over a support ends, alone and beside a reward, and its noise."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kltest.environments import Environment, Instance, sequence
from kltest.environments.policies import table
from kltest.names import support_size
from kltest.reproduce.frames import Row
from kltest.sweeps.run import Batching
from kltest.sweeps.settings import Setting, Settings
from kltest.truth import optimum, value
from kltest.truth.next_tokens import gradient_of_next_token
from kltest.truth.recursions import onward, total_visits

from ..arrays import generator

VOCABULARY, K = 12, 4
LENGTHS = {"bandit": 1, "sequence": 2}
# Spread of a teacher's logits; in one case it and the student have each other's order of tokens reversed.
TEACHERS = {"peaked": 2.5, "broad": 1.0, "far": 2.5}


@dataclass(frozen=True)
class Form:
    """A loss: the name of its next-token gradient with k for K, and the policy at which it is zero, alone.

    `end` takes probabilities (C, V) of the teacher and of the start, and True on the support (C, V).
    """

    words: str
    name: str
    end: Callable[..., np.ndarray] | None = None
    clamped: bool = False

    @property
    def of_a_support(self) -> bool:
        """True if it depends on k."""
        return "K" in self.name


def _within(teacher: np.ndarray, start: np.ndarray, inside: np.ndarray) -> np.ndarray:
    return np.where(inside, teacher, 0) / (inside * teacher).sum(axis=1, keepdims=True)


def _coarse(teacher: np.ndarray, start: np.ndarray, inside: np.ndarray) -> np.ndarray:
    share = (~inside * teacher).sum(axis=1, keepdims=True) / (~inside * start).sum(axis=1, keepdims=True)
    return np.where(inside, teacher, share * start)


def _over_e(teacher: np.ndarray, start: np.ndarray, inside: np.ndarray) -> np.ndarray:
    kept = (inside * teacher).sum(axis=1, keepdims=True) / np.e
    return np.where(inside, teacher / np.e, (1 - kept) * start / (~inside * start).sum(axis=1, keepdims=True))


def _teacher(teacher: np.ndarray, *_: np.ndarray) -> np.ndarray:
    return teacher


def _start(teacher: np.ndarray, start: np.ndarray, *_: np.ndarray) -> np.ndarray:
    return start


FORMS = {
    "sampled token": Form("log-ratio of the sampled token as a reward, to go", "to-go", _teacher),
    "reverse": Form("reverse KL of all tokens", "local_reverse_kl", _teacher),
    "forward": Form("forward KL of all tokens", "local_forward_kl", _teacher),
    "jensen-shannon": Form("Jensen–Shannon of all tokens", "local_jensen_shannon", _teacher),
    "advantage": Form("exact reverse KL in the advantage", "zero", _start),
    "forward top": Form("forward over the teacher's k", "local_forward_kl_topK", _within),
    "forward top, clamped": Form("forward over the teacher's k, at least 0", "local_forward_kl_topK", clamped=True),
    "forward top, renormalised": Form(
        "forward over the teacher's k, renormalised", "local_forward_kl_topK_renormalised"
    ),
    "forward top, tail": Form(
        "forward over the teacher's k, with a tail bucket", "local_forward_kl_topK_tail", _coarse
    ),
    "reverse top": Form("reverse over the teacher's k", "local_reverse_kl_topK", _over_e),
    "reverse own": Form("reverse over the student's k", "local_reverse_kl_ownK"),
    "reverse own, tail": Form("reverse over the student's k, with a tail bucket", "local_reverse_kl_ownK_tail"),
}


def _matters(one: Mapping[str, Any]) -> bool:
    """Of a loss of all tokens k says only whose mass is counted; on sequences, and in the noise, what is new is enough.

    An exact KL has no noise in a bandit without a reward.
    """
    if one["part"] == "noise":
        return one["environment"] == "sequence" or one["rewarded"]
    return one["k"] == K or (one["environment"] == "bandit" and FORMS[one["form"]].of_a_support)


PARTS: dict[str, Mapping[str, str]] = {
    "ends": {name: name for name in ("environment", "form", "k", "beta", "teacher", "seed")},
    "noise": {name: name for name in ("environment", "teacher", "rewarded", "place", "seed")},
}
SETTINGS = Settings(
    title="Distillation: supports, tails, sampled tokens",
    tags=("exact", "gradient", "training", "bandit", "sequence"),
    parts=PARTS,
    applies=_matters,
    values={
        "part": tuple(PARTS),
        "environment": tuple(LENGTHS),
        "form": tuple(FORMS),
        "k": Setting((1, 4), full=(1, 2, 4, 8), allowed=(1, VOCABULARY - 2)),
        # 0: the loss alone.
        "beta": Setting((0.0, 0.5), full=(0.0, 0.2, 0.5, 1.0), allowed=(0.0, 10.0)),
        "teacher": tuple(TEACHERS),
        "rewarded": (False, True),
        # Share of the way, in logits, from the start to the teacher or, beside a reward, to the optimum.
        "place": Setting(
            (0.0, 0.5, 0.9, 1.0), full=(0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 1.0), allowed=(0.0, 1.0)
        ),
    },
    seeds={"quick": 2, "full": 10},
)
BATCHING = Batching(("seed", "teacher"), size=96)
NOISE_BETA = 0.5
STEPS, RATE, LONGEST = 150, 0.8, 2.0
SLOWER = 2  # times as many steps beside a reward, of a length that keeps losses with ref/π in them stable


def compute_batch(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Return the row of each configuration; what differs in teachers and draws alone is trained together."""
    if configurations[0]["part"] == "noise":
        return [[{**one, **_noise(one)}] for one in configurations]
    alike = [tuple(one[name] for name in ("environment", "form", "k", "beta")) for one in configurations]
    rows: list[list[Row]] = [[] for _ in configurations]
    for which in dict.fromkeys(alike):
        mine = [at for at, one in enumerate(alike) if one == which]
        for at, row in zip(mine, _ends([configurations[at] for at in mine]), strict=True):
            rows[at].append({**configurations[at], **row})
    return rows


def drawn(length: int, teacher: str, seed: int) -> tuple[Environment, np.ndarray, np.ndarray]:
    """Return an environment with normal rewards, and log-probs (C, V) of student and teacher."""
    random, environment = generator("distillation", length, teacher, seed), sequence(VOCABULARY, length)
    shape = (environment.n_contexts, VOCABULARY)
    logits = random.standard_normal(shape) * TEACHERS[teacher]
    student = 0.5 * logits + random.standard_normal(shape)
    if teacher == "far":
        student = random.standard_normal(shape) * 0.3 - logits
    return replace(environment, reward=random.standard_normal(shape)), table(student), table(logits)


def to_go(environment: Environment, policy: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Return the expected return (C, V) from each token on, in a tree."""
    values = np.zeros(len(policy))
    for _ in range(environment.horizon):
        found = rewards + onward(environment, values)
        values = (np.exp(policy) * found).sum(axis=1)
    return found


def signal(form: Form, k: int, environment: Environment, policy: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Return by how much the loss pushes each log-prob (C, V): its next-token gradient over the probability."""
    chances, log_ratio = np.exp(policy), policy - teacher
    if form.name in ("to-go", "local_reverse_kl"):
        return to_go(environment, policy, log_ratio) if form.name == "to-go" else log_ratio
    if form.name in ("zero", "local_forward_kl"):
        return np.zeros_like(policy) if form.name == "zero" else -np.exp(-log_ratio)
    pushed = gradient_of_next_token(form.name.replace("K", str(k)), policy, teacher) / chances
    if form.clamped:
        inside = support(teacher, k)
        pushed *= (inside * np.exp(teacher) * -log_ratio).sum(axis=1, keepdims=True) > 0
    return pushed


def support(deciding: np.ndarray, k: int) -> np.ndarray:
    """Return (C, V) True on the k likeliest tokens."""
    ranks = np.argsort(np.argsort(-deciding, axis=1, kind="stable"), axis=1)
    return ranks < support_size(k, deciding.shape[1])


def descended(form: Form, k: int, beta: float, environment: Environment, start: np.ndarray, teacher: np.ndarray) -> Any:
    """Return log-probs after natural-gradient steps on the loss, or on E[R] − β·loss, and the last gradient.

    They have the zeros of the gradient in the logits, and reach them in a few hundred steps.
    """
    policy, steps, rate = start, STEPS, RATE
    if beta:
        steps, rate = SLOWER * STEPS, RATE / (1 + environment.horizon * np.ptp(environment.reward) / beta)
    for _ in range(steps):
        push = -signal(form, k, environment, policy, teacher)
        if "renormalised" in form.name:  # whose probabilities are those within the support
            push *= (support(teacher, k) * np.exp(policy)).sum(axis=1, keepdims=True)
        if beta:
            push += to_go(environment, policy, environment.reward) / beta
        push -= (np.exp(policy) * push).sum(axis=1, keepdims=True)
        step = rate * np.clip(push, -LONGEST, LONGEST)
        policy = np.maximum(table(policy + step), -60.0)
    return table(policy), np.exp(policy) * push


def _ends(configurations: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """All draws are descended together, each as the prompt of one environment."""
    first, many = configurations[0], len(configurations)
    form, k, beta, length = FORMS[first["form"]], first["k"], first["beta"], LENGTHS[first["environment"]]
    draws = [drawn(length, one["teacher"], one["seed"]) for one in configurations]
    together = sequence(VOCABULARY, length, prompts=np.full(many, 1 / many))
    rewards, starts, teachers = (
        np.concatenate(each) for each in zip(*((e.reward, *of) for e, *of in draws), strict=True)
    )
    policies, lasts = descended(form, k, beta, replace(together, reward=rewards), starts, teachers)
    for (environment, start, teacher), policy, last in zip(
        draws, *(np.split(x, many) for x in (policies, lasts)), strict=True
    ):
        yield _ended(form, k, beta, environment, start, teacher, policy) | {"last": float(np.abs(last).max())}


def _ended(form: Form, k: int, beta: float, environment: Environment, *policies: np.ndarray) -> Row:
    start, teacher, policy = policies
    ended, inside = Instance.of(environment, policy, teacher), support(teacher, k)
    visits, kl = total_visits(environment, policy)[:, None] / environment.horizon, value("reverse_kl", ended)
    row = {"kl": kl, "kl_at_start": value("reverse_kl", Instance.of(environment, start, teacher))}
    for name, chances, of in (
        ("", policy, inside),
        ("teacher_", teacher, inside),
        ("own_", policy, support(policy, k)),
    ):
        row[f"{name}outside"] = float((visits * np.exp(chances) * ~of).sum())
    if beta:
        row["gap"] = optimum(environment, teacher, beta).value - value("expected_reward", ended) + beta * kl
    elif form.end is not None:
        row["off"] = float(np.abs(np.exp(policy) - form.end(np.exp(teacher), np.exp(start), inside)).max())
    return row


def _noise(one: Mapping[str, Any]) -> Row:
    """Variance of a rollout's gradient, less a baseline, and the square of its mean: of each loss.

    The sampled token's own log-ratio, not to go, has the mean of the exact next-token KL.
    """
    environment, start, teacher = drawn(LENGTHS[one["environment"]], one["teacher"], one["seed"])
    target = optimum(environment, teacher, NOISE_BETA).policy if one["rewarded"] else teacher
    instance = Instance.of(environment, (1 - one["place"]) * start + one["place"] * target, teacher)
    paths, policy, chances = instance.paths, instance.policy, np.exp(instance.policy)
    rollouts, log_ratio = instance.rollout_weights("current"), policy - teacher
    # Scores (N, T, V), centred costs of rollouts (N,) and of tokens (N, T), whose mean counts as a baseline.
    scores = np.eye(VOCABULARY)[paths.tokens] - chances[paths.contexts]
    costs = one["rewarded"] * -environment.returns(paths)
    own = NOISE_BETA * log_ratio[paths.contexts, paths.tokens]
    costs, own = costs - rollouts @ costs, own - (rollouts @ own).mean()
    found = {"sampled token": (costs[:, None] + own)[..., None] * scores}
    for name in (name for name, form in FORMS.items() if form.name not in ("to-go", "zero")):
        pushed = signal(FORMS[name], K, environment, policy, teacher)
        gradient = chances * (pushed - (chances * pushed).sum(axis=1, keepdims=True))
        found[name] = costs[:, None, None] * scores + NOISE_BETA * gradient[paths.contexts]
    visits = total_visits(environment, policy) / environment.horizon
    row: Row = {"overlap": float(visits @ np.minimum(chances, np.exp(teacher)).sum(axis=1))}
    for name, parts in found.items():
        mean = np.zeros_like(policy)
        np.add.at(mean, paths.contexts, rollouts[:, None, None] * parts)
        square = float((mean**2).sum())
        row[f"variance of {name}"] = float(rollouts @ (parts**2).sum(axis=(1, 2))) - square
        row[f"square of {name}"] = square
    return row

"""What is measured of a policy on fresh rollouts: rewards, KL(π‖ref), and which gradient the KL term follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.stats import norm, t
from torch import Tensor

from kltest.finetune.drawing import draw, longest
from kltest.finetune.models import Models
from kltest.finetune.objective import Objective
from kltest.finetune.processes import Processes
from kltest.finetune.settings import AUTO, NONE, Settings
from kltest.finetune.tasks import Task
from kltest.finetune.update import accumulate
from kltest.language_models.language import Language
from kltest.language_models.rollouts import Rollouts
from kltest.language_models.scoring import score, score_in_parts

LEVEL = 0.95
Record = dict[str, float]
ROWS = 256
"""Rollouts in one forward pass of an evaluation, unless micro_batch is smaller."""


def evaluate(models: Models, task: Task, settings: Settings, step: int) -> Record:
    """Rewards and KL(π‖ref), held-out and out of distribution, entropy and length; names as in METRICS."""
    alone = Processes(0, 1, models.policy.device)
    found: Record = {}
    for split in ("held-out", "out-of-distribution"):
        if not _has(task, split):
            continue
        rollouts = draw(models.policy, task, settings, split, (step,), settings.eval_prompts, 1, alone)
        assert rollouts.reward is not None
        name = split.replace("-", "_")
        kl, entropy = values(models, rollouts, settings)
        found |= _with_interval(f"reward_{name}", *_wilson(rollouts.reward.cpu().numpy()))
        found |= _with_interval("kl" if split == "held-out" else f"kl_{name}", *_student(kl.cpu().numpy()))
        if split == "held-out":
            found["entropy"] = float(entropy.sum() / rollouts.mask.sum())
            found["length_held_out"] = float(rollouts.lengths.double().mean())
    return found


@torch.no_grad()
def values(models: Models, rollouts: Rollouts, settings: Settings) -> tuple[Tensor, Tensor]:
    """(B,) Σ_t KL(π(·|s_t)‖ref(·|s_t)) and Σ_t of the next token's entropy, in nats, float64."""
    kls, entropies = [], []
    for rows in rollouts.split(min(settings.micro_batch or ROWS, ROWS)):
        part = rollouts.rows(rows)
        policy, reference = (
            score(one, part, temperature=settings.temperature, logits=True).logits
            for one in (models.policy, models.reference)
        )
        assert policy is not None
        assert reference is not None
        chances = policy.double().exp()
        kls.append((chances * (policy.double() - reference.double())).sum(-1).where(part.mask, 0.0).sum(1))
        entropies.append(-(chances * policy.double()).sum(-1).where(part.mask, 0.0).sum(1))
    return torch.cat(kls), torch.cat(entropies)


def compare_gradients(
    models: Models, task: Task, settings: Settings, step: int, sampler: Language | None = None
) -> Record:
    """The KL term's expected gradient against that of KL(π‖ref), from independent batches; names as in METRICS.

    With a `sampler` the term is given its rollouts and log-probs, and the names are those of the stale gradient.
    """
    term = Objective(settings, reward=False)
    if term.kl is None:
        return {}
    plain = {"normalise": NONE, "placement": AUTO, "credit": AUTO, "kl_options": {}}
    truth = Objective(replace(settings.resolved, kl="rao-blackwell", **plain), reward=False)  # type: ignore[arg-type]
    gradients = partial(_gradients, models=models, task=task, settings=settings)
    parts = []
    for chunk in range(settings.gradient_chunks):
        if sampler is None:
            parts.append(gradients((term, truth), numbers=(step, chunk)))
        else:
            of_term = gradients((term,), numbers=(step, chunk), sampler=sampler)
            parts.append([*of_term, *gradients((truth,), numbers=(step, chunk))])
    flat = torch.stack([*(one for one, _ in parts), *(other for _, other in parts)]).double()
    name = "kl_gradient" if sampler is None else "stale_gradient"
    return compared((flat @ flat.T).cpu().numpy(), settings.gradient_batches, name)


def compared(products: np.ndarray, batches: int = 1, name: str = "kl_gradient") -> Record:
    """Cosine, size and noise from the (2K, 2K) inner products of K gradients of the term, then K of the truth.

    They are called after `name`. Each gradient is the mean of `batches` batches' gradients; those of one number may be
    of the same rollouts. ⟨E, R⟩, ⟨E, E⟩ and ⟨R, R⟩ are means over pairs of different numbers, which makes them
    unbiased. A square that is not more than twice its jackknife error from zero has no direction: of the truth, nothing
    is returned, of the term its size.
    """
    chunks = len(products) // 2
    numbers = np.arange(chunks)

    def moments(kept: np.ndarray) -> np.ndarray:
        blocks = (products[np.ix_(kept + row, kept + column)] for row, column in _BLOCKS(chunks))
        pairs = len(kept) * (len(kept) - 1)
        return np.array([(block.sum() - np.trace(block)) / pairs for block in blocks])

    squares, errors = _jackknife(moments, numbers)
    nothing, vanishes = squares[2] <= 2 * errors[2], squares[1] <= 2 * errors[1]
    if nothing:
        return {}
    found: Record = {}
    ratios: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        f"{name}_cosine": lambda kept: _cosine(moments(kept)),
        f"{name}_size": lambda kept: _size(moments(kept)),
    }
    reach = float(t.ppf((1 + LEVEL) / 2, chunks - 1))
    if vanishes:
        size, high = (
            math.sqrt(max(square, 0.0) / squares[2]) for square in (squares[1], squares[1] + reach * errors[1])
        )
        found, ratios = _with_interval(f"{name}_size", size, 0.0, high), {}
    for ratio_name, ratio in ratios.items():
        value, error = (float(number) for number in _jackknife(ratio, numbers))
        if math.isfinite(value) and math.isfinite(error):
            found |= _with_interval(ratio_name, value, value - reach * error, value + reach * error)
    variance = (np.trace(products[:chunks, :chunks]) / chunks - squares[1]) * batches
    found[f"{name}_noise"] = math.sqrt(max(variance, 0.0) / squares[2])
    return found


def _BLOCKS(chunks: int) -> tuple[tuple[int, int], ...]:
    """Where the products term·truth, term·term and truth·truth begin."""
    return (0, chunks), (0, 0), (chunks, chunks)


@np.errstate(all="ignore")
def _cosine(moments: np.ndarray) -> np.ndarray:
    return moments[0] / np.sqrt(moments[1] * moments[2])


@np.errstate(all="ignore")
def _size(moments: np.ndarray) -> np.ndarray:
    return np.sqrt(moments[1] / moments[2])


def _jackknife(statistic: Callable[[np.ndarray], np.ndarray], numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The statistic of all batches and its standard error, from leaving out one at a time."""
    without = np.stack([statistic(np.delete(numbers, one)) for one in numbers])
    spread = ((without - without.mean(axis=0)) ** 2).sum(axis=0)
    return statistic(numbers), np.sqrt((len(numbers) - 1) / len(numbers) * spread)


def _gradients(
    objectives: tuple[Objective, ...],
    models: Models,
    task: Task,
    settings: Settings,
    numbers: tuple[int, int],
    sampler: Language | None = None,
) -> list[Tensor]:
    """(P,) for each objective: its mean gradient over batches of the run's size, the same fresh ones for all."""
    alone = Processes(0, 1, models.policy.device)
    batches = settings.gradient_batches
    sizes = (settings.prompts * batches, settings.group_size)
    rollouts = draw(sampler or models.policy, task, settings, "gradient", numbers, *sizes, alone)
    size = settings.micro_batch or settings.rollouts
    scored = partial(score_in_parts, rollouts=rollouts, size=size, temperature=settings.temperature)
    old_logp = None if sampler is None else scored(sampler)
    rollouts = replace(rollouts, ref_logp=scored(models.reference), old_logp=old_logp)
    parameters = [one for one in models.policy.model.parameters() if one.requires_grad]
    found = []
    for objective in objectives:
        models.policy.model.zero_grad(set_to_none=True)
        for rows in rollouts.split(settings.rollouts):
            part = rollouts.rows(rows)
            accumulate(objective, models.policy, models.reference, part, alone, longest=longest(settings, task))
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        found.append(torch.cat([gradient.reshape(-1) for gradient in gradients]) / batches)
    models.policy.model.zero_grad(set_to_none=True)
    return found


def _has(task: Task, split: str) -> bool:
    from kltest.errors import UsageError

    try:
        task.draw(split, 1, np.random.default_rng(0))  # type: ignore[arg-type]
    except UsageError:
        return False
    return True


def _with_interval(name: str, value: float, low: float, high: float) -> Record:
    return {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}


def _student(values: np.ndarray) -> tuple[float, float, float]:
    mean, error = values.mean(), values.std(ddof=1) / math.sqrt(len(values))
    reach = t.ppf((1 + LEVEL) / 2, len(values) - 1) * error
    return mean, mean - reach, mean + reach


def _wilson(values: np.ndarray) -> tuple[float, float, float]:
    """Numbers between 0 and 1 vary at most as much as coins of their mean do."""
    n, mean, z = len(values), values.mean(), norm.ppf((1 + LEVEL) / 2)
    middle = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    # Where all fail or all succeed an end is 0 or 1, but for rounding.
    return mean, min(middle - reach, mean) if mean else 0.0, max(middle + reach, mean) if mean < 1 else 1.0

"""Measurements of a policy on fresh rollouts (rewards, KL(π‖ref), gradient of the KL term), and of a training batch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.stats import norm as normal
from torch import Tensor

from kltest.errors import UsageError
from kltest.finetune.models import Models
from kltest.finetune.objective import Fields, Objective, advantages, clipped, importance_ratios
from kltest.finetune.rollouts import draw, longest
from kltest.finetune.settings import AUTO, NONE, Settings
from kltest.finetune.tasks import Task
from kltest.finetune.update import accumulate
from kltest.language_models.generation import Rollouts
from kltest.language_models.language import LanguageModel
from kltest.language_models.scoring import over_time, score, score_in_parts
from kltest.samples.blocks import Interval, Sample, cosine, norm, reach
from kltest.samples.sketch import Sketch

LEVEL = 0.95
Record = dict[str, float]
# Most rollouts in one forward pass of an evaluation, and most log-probs of all their next tokens.
ROWS, LOGITS = 256, 2**27
# Numbers that are kept of each gradient; of a model with no more weights that is all of it.
SKETCH = 2**20 - 1


def evaluate(models: Models, task: Task, settings: Settings, step: int) -> Record:
    """Return rewards and KL(π‖ref), held-out and out of distribution, entropy and length; names as in METRICS."""
    found: Record = {}
    for split in ("held-out", "out-of-distribution"):
        if not _has(task, split):
            continue
        rollouts = draw(models.policy, task, settings, split, (step,), settings.eval_prompts, 1)
        assert rollouts.reward is not None
        name = split.replace("-", "_")
        own = rollouts.reward, rollouts.lengths.double(), *kl_and_entropy(models, rollouts, settings)
        reward, length, kl, entropy = (one.cpu().numpy() for one in own)
        found |= _mean(reward).named(f"reward_{name}")
        if rollouts.gold is not None:
            found |= _mean(rollouts.gold.cpu().numpy()).named(f"gold_{name}")
        found |= _student(kl).named("kl" if split == "held-out" else f"kl_{name}")
        if split == "held-out":
            found["entropy"] = float(entropy.sum() / length.sum())
            found["length_held_out"] = float(length.mean())
    return found


@torch.no_grad()
def kl_and_entropy(models: Models, rollouts: Rollouts, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return (B,) Σ_t KL(π(·|s_t)‖ref(·|s_t)) and (B,) Σ_t entropy of π(·|s_t), in nats, float64."""
    kls: list[Tensor] = []
    entropies: list[Tensor] = []
    each = LOGITS // (models.policy.vocabulary * max(1, rollouts.tokens.shape[1]))
    for rows in rollouts.split(max(1, min(settings.micro_batch or ROWS, ROWS, each))):
        part = rollouts.rows(rows)
        policy, reference = (
            score(one, part, temperature=settings.temperature, logits=True).logits
            for one in (models.policy, models.reference)
        )  # (b, T, V) log-probs
        assert policy is not None
        assert reference is not None
        sums = [_summed(*(one.double() for one in piece)) for piece in over_time(policy, reference)]
        for found, steps in zip((kls, entropies), zip(*sums, strict=True), strict=True):
            found.append(torch.cat(steps, dim=1).where(part.mask, 0.0).sum(1))
    return torch.cat(kls), torch.cat(entropies)


def _summed(policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """(b, t) KL and entropy of next tokens, whose log-probs are (b, t, V)."""
    chances = policy.exp()
    return (chances * (policy - reference)).sum(-1), -(chances * policy).sum(-1)


def compare_gradients(
    models: Models,
    task: Task,
    settings: Settings,
    step: int,
    sampler: LanguageModel | None = None,
) -> Record:
    """Compare the KL term's expected gradient with ∇KL(π‖ref), from independent batches; names as in METRICS.

    `step` chooses the random stream. With `sampler`, an older policy, the term is measured on its rollouts, and names
    begin with stale_gradient.
    """
    term = Objective(settings, reward=False)
    if term.kl is None:
        return {}
    plain = {"normalise": NONE, "placement": AUTO, "credit": AUTO, "kl_options": {}, "truncated": "keep"}
    truth = Objective(replace(settings.resolved, kl="rao-blackwell", **plain), reward=False)  # type: ignore[arg-type]
    sketch = Sketch(models.policy.model, SKETCH)
    gradients = partial(_gradients, models, task, settings, sketch)
    parts = []
    for chunk in range(settings.gradient_chunks):
        if sampler is None:
            parts.append(gradients((step, chunk), term, truth))
        else:
            parts.append([*gradients((step, chunk), term, sampler=sampler), *gradients((step, chunk), truth)])
    name = "kl_gradient" if sampler is None else "stale_gradient"
    return compared(Sample(torch.stack([torch.stack(part) for part in parts]).numpy()), settings.gradient_batches, name)


def compared(sample: Sample, batches: int = 1, name: str = "kl_gradient") -> Record:
    """Return cosine, relative norm ("size") and noise of the term's gradient E against the true one, R.

    A square within twice its jackknife error from zero has no direction: for the truth nothing is returned, for the
    term its size alone.

    Args:
        sample: In each chunk a gradient of the term and one of the truth, perhaps of the same rollouts.
        batches: Number of batches of which each gradient is the mean.
        name: Prefix of the metrics.
    """
    term, truth = np.eye(2)
    (square, error), (true, true_error) = sample.estimate(norm(term)), sample.estimate(norm(truth))
    if true <= 2 * true_error:
        return {}
    found: Record = {}
    if square <= 2 * error:
        high = square + reach(1 - LEVEL, len(sample)) * error
        size = (math.sqrt(max(one, 0.0) / true) for one in (square, 0.0, high))
        found |= Interval(*size).named(f"{name}_size")
    else:
        ratios = {"cosine": cosine(term, truth), "size": lambda pairs: np.sqrt(norm(term)(pairs) / norm(truth)(pairs))}
        for what, ratio in ratios.items():
            interval = sample.interval(ratio, 1 - LEVEL)
            if math.isfinite(interval.width):
                found |= interval.named(f"{name}_{what}")
    found[f"{name}_noise"] = math.sqrt(max(float(term @ sample.noise @ term) * batches, 0.0) / true)
    return found


def _gradients(
    models: Models,
    task: Task,
    settings: Settings,
    sketch: Sketch,
    numbers: tuple[int, int],
    *objectives: Objective,
    sampler: LanguageModel | None = None,
) -> list[Tensor]:
    """Sketches, one for each objective, of the mean gradient over batches of the run's size, the same for all."""
    batches = settings.gradient_batches
    sizes = (settings.prompts * batches, settings.group_size)
    rollouts = draw(sampler or models.policy, task, settings, "gradient", numbers, *sizes)
    size = settings.micro_batch or settings.rollouts
    scored = partial(score_in_parts, rollouts=rollouts, size=size, temperature=settings.temperature)
    old_logp = None if sampler is None else scored(sampler)
    rollouts = replace(rollouts, ref_logp=scored(models.reference), old_logp=old_logp)
    model = models.policy.model
    found = []
    for objective in objectives:
        model.zero_grad(set_to_none=True)
        for rows in rollouts.split(settings.rollouts):
            accumulate(objective, models, rollouts.rows(rows), longest=longest(settings, task))
        vector = torch.zeros(sketch.size, dtype=sketch.dtype, device=models.policy.device)
        for weight in sketch.weights:
            if weight.grad is not None:
                sketch.fold(weight, weight.grad, vector)
        found.append(vector.cpu() / batches)
    model.zero_grad(set_to_none=True)
    return found


def _has(task: Task, split: str) -> bool:
    try:
        task.draw(split, 1, np.random.default_rng(0))  # type: ignore[arg-type]
    except UsageError:
        return False
    return True


def _mean(values: np.ndarray) -> Interval:
    return (_wilson if 0 <= values.min() <= values.max() <= 1 else _student)(values)


def _student(values: np.ndarray) -> Interval:
    mean, error = values.mean(), values.std(ddof=1) / math.sqrt(len(values))
    either = reach(1 - LEVEL, len(values)) * error
    return Interval(mean, mean - either, mean + either)


def _wilson(values: np.ndarray) -> Interval:
    """Wilson's interval by hand: scipy's is for counts, and rewards may be any numbers between 0 and 1.

    It covers these as well, since none of them varies more than a coin with the same mean.
    """
    n, mean, z = len(values), values.mean(), normal.ppf((1 + LEVEL) / 2)
    middle = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    either = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    # If all fail or all succeed, an end is 0 or 1 up to rounding.
    low, high = min(middle - either, mean) if mean else 0.0, max(middle + either, mean) if mean < 1 else 1.0
    return Interval(mean, low, high)


def of_batch(batch: Rollouts, fields: Fields, logged: Sequence[float | None], end: tuple[int, ...]) -> Record:
    """Return metrics of a batch at its first update, names as in METRICS.

    Args:
        batch: The rollouts, before that update.
        fields: What its gradient depended on.
        logged: The KL that the term logged in each minibatch, None where it logged nothing.
        end: Ids of end tokens.
    """
    reward, live = fields.reward, fields.mask  # (B,), (B, T)
    groups = reward.reshape(len(fields.group.unique()), -1)
    record = {
        "reward": float(reward.mean()),
        "length": float(live.sum() / len(live)),
        "ended": float(batch.ended(end).float().mean()),
        "tied_groups": float((groups == groups[:, :1]).all(dim=1).to(reward).mean()),
        "sampler_gap": float((fields.old_logp - batch.sampled_logp).abs().where(live, 0.0).max()),
    }
    known = [one for one in logged if one is not None]
    return {**record, "kl_logged": sum(known) / len(known)} if known else record


def of_ratios(fields: Fields, settings: Settings) -> Record:
    """Return metrics of the importance ratios in the last inner epoch; `settings` are resolved."""
    record = {"ratio_largest": float(importance_ratios(fields, "token").max())}
    if settings.clip > 0:
        ratio = importance_ratios(fields, settings.ratio)
        advantage = advantages(fields.reward, fields.group, settings.baseline, settings.scale)[:, None]
        cut = clipped(ratio, advantage, settings.clip) & fields.mask
        record["clipped"] = float(cut.sum() / fields.mask.sum())
    return record

"""Measurements of a policy on fresh rollouts (rewards, KL(π‖ref), gradient of the KL term), and of a training batch."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import norm as normal
from scipy.stats import sem
from torch import Tensor

from kltest.errors import UsageError
from kltest.finetune.models import Models
from kltest.finetune.objective import Fields, Objective, accumulate
from kltest.finetune.rollouts import draw, stream
from kltest.finetune.settings import AUTO, Settings
from kltest.finetune.tasks import Task
from kltest.language_models.generation import Rollouts
from kltest.language_models.scoring import score, score_in_parts
from kltest.samples.blocks import Interval, Sample, cosine, norm, reach
from kltest.samples.sketch import Sketch

LEVEL = 0.95
Record = dict[str, float]
# Most rollouts in one forward pass of an evaluation, and most log-probs of all their next tokens.
ROWS, LOGITS = 256, 2**25
# Numbers that are kept of each gradient; of a model with no more weights that is all of it.
SKETCH = 2**20 - 1


def evaluate(models: Models, task: Task, settings: Settings, step: int) -> Record:
    """Return rewards and KL(π‖ref), held-out and out of distribution, entropy and length; names as in METRICS."""
    found: Record = {}
    for split in ("held-out", "out-of-distribution"):
        if not _has(task, split):
            continue
        rollouts = draw(models.policy, task, settings, split, stream(settings, split, step), settings.eval_prompts)
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
    most = LOGITS // (models.policy.vocabulary * rollouts.tokens.shape[1])
    for part in rollouts.parts(max(1, min(settings.micro_batch or ROWS, ROWS, most))):
        scored = [
            score(one, part, temperature=settings.temperature, logits=True).logits
            for one in (models.policy, models.reference)
        ]
        policy, reference = (one.double() for one in scored if one is not None)  # (b, T, V) log-probs
        chances = policy.exp()
        for found, log_ratio in ((kls, policy - reference), (entropies, -policy)):
            found.append((chances * log_ratio).sum(-1).where(part.mask, 0.0).sum(1))
    return torch.cat(kls), torch.cat(entropies)


def compare_gradients(models: Models, task: Task, settings: Settings, step: int) -> Record:
    """Compare the KL term's expected gradient with ∇KL(π‖ref), from independent batches; names as in METRICS.

    `step` chooses the random stream.
    """
    term = Objective(settings, reward=False)
    if term.kl is None:
        return {}
    exact = {"kl": "rao-blackwell", "placement": AUTO, "credit": AUTO, "kl_options": {}, "algorithm": "reinforce"}
    truth = Objective(replace(settings, **exact), reward=False)  # type: ignore[arg-type]
    sketch, batches = Sketch(models.policy.model, SKETCH), settings.gradient_batches
    chunks = []
    for chunk in range(settings.gradient_chunks):
        generator = stream(settings, "gradient", step, chunk)
        sizes = (settings.prompts * batches, settings.group_size)
        rollouts = draw(models.policy, task, settings, "train", generator, *sizes)
        size = settings.micro_batch or settings.rollouts
        ref_logp = score_in_parts(models.reference, rollouts, size, temperature=settings.temperature)
        parts = list(replace(rollouts, ref_logp=ref_logp).parts(settings.rollouts))
        chunks.append(torch.stack([_sketched(objective, models, parts, sketch) for objective in (term, truth)]))
    return compared(Sample(torch.stack(chunks).numpy()), batches)


def _sketched(objective: Objective, models: Models, batches: Sequence[Rollouts], sketch: Sketch) -> Tensor:
    """The sketch of the mean gradient over batches."""
    models.policy.model.zero_grad(set_to_none=True)
    for batch in batches:
        accumulate(objective, models, batch)
    vector = torch.zeros(sketch.size, dtype=sketch.dtype, device=models.policy.device)
    for weight in sketch.weights:
        if weight.grad is not None:
            sketch.fold(weight, weight.grad, vector)
    models.policy.model.zero_grad(set_to_none=True)
    return vector.cpu() / len(batches)


def compared(sample: Sample, batches: int = 1) -> Record:
    """Return cosine, relative norm ("size") and noise of the term's gradient E against the true one, R.

    A square within twice its jackknife error from zero has no direction: for the truth nothing is returned, for the
    term its size alone.

    Args:
        sample: In each chunk a gradient of the term and one of the truth, perhaps of the same rollouts.
        batches: Number of batches of which each gradient is the mean.
    """
    term, truth = np.eye(2)
    (square, error), (true, true_error) = sample.estimate(norm(term)), sample.estimate(norm(truth))
    if true <= 2 * true_error:
        return {}
    if square <= 2 * error:
        high = square + reach(1 - LEVEL, len(sample)) * error
        found = {"size": Interval(*(math.sqrt(max(one, 0.0) / true) for one in (square, 0.0, high)))}
    else:
        ratios = {"cosine": cosine(term, truth), "size": lambda pairs: np.sqrt(norm(term)(pairs) / norm(truth)(pairs))}
        found = {what: sample.interval(ratio, 1 - LEVEL) for what, ratio in ratios.items()}
    record = {"kl_gradient_noise": math.sqrt(max(float(term @ sample.noise @ term) * batches, 0.0) / true)}
    for what, interval in found.items():
        if math.isfinite(interval.width):
            record |= interval.named(f"kl_gradient_{what}")
    return record


def _has(task: Task, split: str) -> bool:
    try:
        task.draw(split, 1, np.random.default_rng(0))  # type: ignore[arg-type]
    except UsageError:
        return False
    return True


def _mean(values: np.ndarray) -> Interval:
    return _wilson(values) if 0 <= values.min() <= values.max() <= 1 else _student(values)


def _student(values: np.ndarray) -> Interval:
    mean, either = values.mean(), reach(1 - LEVEL, len(values)) * sem(values)
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


def of_ratios(fields: Fields, objective: Objective) -> Record:
    """Return metrics of the importance ratios in the last inner epoch."""
    record = {"ratio_largest": float(fields.log_ratio.exp().max())}
    if objective.grpo:
        record["clipped"] = float((objective.clipped(fields) & fields.mask).sum() / fields.mask.sum())
    return record

"""A language model's positions: where exact next-token KLs remove variance; writes the recorded `language.csv`.

`python -m experiments.variance.language 0 1 2` adds rows for these seeds, under two minutes of a core each. The model,
its task of free length and its training are those of the experiment finetune, but for what LARGER changes.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.files import as_csv
from kltest.finetune.models import Models, load
from kltest.finetune.objective import Objective
from kltest.finetune.rollouts import draw, stream
from kltest.finetune.run import Training
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import task_named
from kltest.language_models.generation import Rollouts
from kltest.language_models.scoring import score
from kltest.reproduce.frames import Row

from ..finetune.experiment import settings_for
from ..finetune.settings import SAME
from ..records import lines, rounded
from .experiment import LANGUAGE, RECORD, RECORDED_SHARES

# A longer run of a larger model, with k1 in the reward.
LARGER: Mapping[str, Any] = {
    **SAME,
    "task": "free",
    "model": "tiny:0.2M",
    "updates": 96,
    "group_size": 4,
    "learning_rate": 5e-4,
    "variant": "k1-reward",
    "beta": 0.1,
}
FIGURES = 5
"""Significant figures that rows keep."""


def record(seed: int, **changes: Any) -> list[Row]:
    """Rows of one seed: a reference and a policy are trained, and the policy's rollouts measured on the way."""
    settings = settings_for({**LARGER, "seed": seed, **changes})
    task = task_named(settings.task, settings.keys)
    torch.set_num_threads(1)
    models = load(settings, task, torch.device("cpu"))
    training = Training(settings, task, models, Objective(settings))
    rows: list[Row] = []
    while training.step < settings.steps:
        training.next()
        last = training.step == settings.steps
        if last or training.step in LANGUAGE["updates"]:
            count, generator = (
                int(LANGUAGE["rollouts" if last else "fewer"]),
                stream(settings, "held-out", training.step),
            )
            rollouts = draw(models.policy, task, settings, "held-out", generator, count)
            at = positions(models, rollouts, settings.temperature)
            rows.append({"what": "training", "update": training.step, **state(at, rollouts, settings)})
    return [{"seed": seed, **row} for row in (*rows, *measured(models, rollouts, settings, at))]


def state(at: Mapping[str, np.ndarray], rollouts: Rollouts, settings: Settings) -> Row:
    """Variances of rollouts: of both values, of what the tokens add on their own, and of both objectives."""
    assert rollouts.reward is not None
    sampled, exact = (at[name].sum(axis=1) for name in ("u", "kl"))
    reward = rollouts.reward.numpy()
    return {
        "kl": exact.mean(),
        "own": at["variance"].sum(axis=1).mean(),
        "sampled": sampled.var(ddof=1),
        "exact": exact.var(ddof=1),
        "objective_sampled": (reward - settings.beta * sampled).var(ddof=1),
        "objective_exact": (reward - settings.beta * exact).var(ddof=1),
    }


def measured(models: Models, rollouts: Rollouts, settings: Settings, at: Mapping[str, np.ndarray]) -> Iterator[Row]:
    """Shares of a variance without exact KLs that they remove, of value, gradient at logits and gradient at weights."""
    live, ahead = rollouts.mask.numpy(), at["kl"][:, ::-1].cumsum(axis=1)[:, ::-1] - at["kl"]
    surprise = at["u"] - at["kl"]
    # E[surprise·(KL ahead) | prefix] is the covariance: unbiased position by position.
    gains = {
        "value": (at["variance"] + 2 * surprise * ahead, len(live) * at["u"].sum(axis=1).var(ddof=1)),
        "logits": (at["gradient"], at["gradient"].sum()),
    }
    few = slice(int(LANGUAGE["differentiated"]))

    def squares(chosen: np.ndarray) -> np.ndarray:
        return squared_norms(models, rollouts.rows(few), chosen[few], settings.temperature)

    none = squares(np.zeros_like(live))
    for rule in ("variance", "entropy", "log-ratio"):
        score_of = np.abs(at["u"]) if rule == "log-ratio" else at[rule]
        for share in RECORDED_SHARES:
            chosen = (score_of > np.quantile(score_of[live], 1 - share)) & live if share < 1 else live
            row = {"rule": rule, "share": share}
            if rule == "log-ratio":
                # The sampled token decides: no estimate without bias.
                yield {**row, "what": "bias", "removed": -(chosen * surprise).sum() / at["kl"].sum()}
                continue
            for what, (gain, whole) in gains.items():
                yield {**row, "what": what, "removed": (chosen * gain).sum() / whole}
            if rule == "variance" and share in (0.1, 1.0):
                yield {**row, "what": "weights", "removed": (none - squares(chosen)).sum() / none.sum()}


@torch.no_grad()
def positions(models: Models, rollouts: Rollouts, temperature: float) -> dict[str, np.ndarray]:
    """(B, T) of every position, 0 where padded: u, KL, Var(u | s), tr Cov(u·∇log π | s) at logits, entropy."""
    policy, reference = (
        score(one, rollouts, temperature=temperature, logits=True).logits.double()  # type: ignore[union-attr]
        for one in (models.policy, models.reference)
    )
    p, u = policy.exp(), policy - reference
    kl = (p * u).sum(dim=2)
    norms = 1 - 2 * p + p.square().sum(dim=2, keepdim=True)
    found = {
        "u": u.gather(2, rollouts.tokens[:, :, None])[:, :, 0],
        "kl": kl,
        "variance": (p * (u - kl[:, :, None]).square()).sum(dim=2),
        "gradient": (p * u.square() * norms).sum(dim=2) - (p * (u - kl[:, :, None])).square().sum(dim=2),
        "entropy": -(p * policy).sum(dim=2),
    }
    return {name: one.where(rollouts.mask, 0.0).numpy() for name, one in found.items()}


def squared_norms(models: Models, rollouts: Rollouts, chosen: np.ndarray, temperature: float) -> np.ndarray:
    """(B,) squared norms of ∇ of each rollout's estimate at the weights, exact KLs at the chosen (B, T) positions."""
    weights = [one for one in models.policy.model.parameters() if one.requires_grad]
    found = []
    for row in range(len(rollouts)):
        one = rollouts.rows(slice(row, row + 1))
        loss = surrogate(models, one, torch.from_numpy(chosen[row : row + 1]).to(torch.float32), temperature)
        parts = torch.autograd.grad(loss, weights, allow_unused=True)
        found.append(sum(float(part.square().sum()) for part in parts if part is not None))
    return np.array(found)


def surrogate(models: Models, rollouts: Rollouts, exact: Tensor, temperature: float) -> Tensor:
    """Σ_t c_t·KL_t + sg((1 − c_t)·u_t + what lies ahead)·log π: its gradient is that of the estimate with c (B, T)."""
    found = score(models.policy, rollouts, temperature=temperature, logits=True)
    with torch.no_grad():
        reference = score(models.reference, rollouts, temperature=temperature, logits=True).logits
    assert found.logits is not None
    assert reference is not None
    live = rollouts.mask.to(found.logp)
    kl = (found.logits.exp() * (found.logits - reference)).sum(dim=2) * live
    u = (found.logp - reference.gather(2, rollouts.tokens[:, :, None])[:, :, 0]).detach() * live
    cost = exact * kl.detach() + (1 - exact) * u
    ahead = cost.flip(1).cumsum(1).flip(1) - cost
    return (exact * kl + ((1 - exact) * u + ahead) * found.logp * live).sum()


def write(rows: list[Row]) -> None:
    """Write the record, a line a row, sorted."""
    plain = [{name: rounded(one, FIGURES) for name, one in row.items()} for row in rows]
    RECORD.write_text(as_csv(plain), encoding="utf-8")


def main(seeds: Sequence[int]) -> None:
    """Add seeds to the record, or make theirs again."""
    kept = [row for row in lines(RECORD) if row["seed"] not in seeds]
    for seed in seeds:
        kept += record(seed)
        write(sorted(kept, key=lambda row: row["seed"]))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])

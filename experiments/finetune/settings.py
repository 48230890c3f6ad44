"""A language model under KL terms and a reward that can be over-optimised: what is varied, and what is committed."""

from collections.abc import Mapping
from typing import Any

from kltest.sweeps.settings import Settings

# Settings of variants, under the names of `kltest finetune --set`. With four updates for the rollouts of one sampler,
# a quarter of the rounds gives as many updates.
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"kl": "none"},
    "k1-reward": {"kl": "k1-reward"},
    # A baseline on the penalty as well as on the reward.
    "leave-one-out": {"kl": "leave-one-out"},
    "k2-loss": {"kl": "k2-loss"},
    "k3-loss": {"kl": "k3-loss"},
    "k1-loss": {"kl": "k1-loss"},
    **{
        f"stale:{kl}": {"kl": kl, "inner_epochs": 4}
        for kl in ("k1-reward-to-go-prefix-ratio", "k1-reward-sequence-ratio", "k2-loss", "k3-ratio")
    },
}
BETAS = (0.1, 0.2)
SEEDS = 16
# The coefficient of which claims are made, and the only one with a stale sampler.
BETA = 0.1

# Settings of every run beside those below; all else is the runner's default.
RUN: Mapping[str, Any] = {
    # No reference earns this: all take as many steps.
    "reference_reward": 1.0,
    "gradient_every": 0,
    "checkpoint_every": 0,
    "threads": 1,
}
# Number of measurements of a run, its start not counted, and the columns kept of each.
EVALUATIONS = 8
METRICS = ("reward_held_out", "gold_held_out", "kl", "kl_low", "kl_high", "length_held_out", "entropy")
# Standard deviation over seeds of a paired difference in the objective, as the pilot with other seeds had it.
PILOT_DEVIATION = 0.15

# Settings that are the same in all runs of a sweep: those of the committed one, which holds no column of them.
SAME: Mapping[str, Any] = {
    "model": "tiny:0.2M",
    "reference_steps": 600,
    "updates": 96,
    "prompts": 16,
    "group_size": 4,
    "learning_rate": 5e-4,
    "eval_prompts": 256,
    "device": "cpu",
    "dtype": "float32",
}
PARTS = {
    # Runs made now: a few at quick scale, all of them at full.
    "run": ("seed", "variant", "beta", *SAME),
    # Findings when all of them were made: sweep.csv.
    "committed": (),
    # Findings of audits of one of its policies: audits.csv.
    "audits": (),
}
# Of the committed sweep. To renew it: `kltest run finetune --scale full`, then copy results/finetune/sweep.csv here.
COMMITTED: Mapping[str, str] = {
    "date": "2026-11-23",
    "revision": "97734d8",
    "python": "3.11.7",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}

# The run of the sweep whose policy is audited, and how: `python -m experiments.finetune.audits` writes audits.csv.
AUDITED: Mapping[str, Any] = {"variant": "k1-reward", "beta": BETA, "seed": 0}
AUDITS: Mapping[str, Any] = {
    "estimators": (
        *("k1-loss", "k2-loss", "k3-loss", "k1-reward", "k1-reward-to-go", "k1-reward-immediate"),
        *("last-token", "length-normalised", "rao-blackwell"),
    ),
    "units": 256,
    "error_rate": 0.01,
    "margin": 0.05,
    "date": "2026-11-23",
    "torch": "2.13.0",
}


def applies(configuration: Mapping[str, Any]) -> bool:
    """Without a KL term there is no coefficient, and with one there is; a stale sampler is tried at one of them."""
    if configuration["part"] != "run":
        return True
    variant, beta = configuration["variant"], configuration["beta"]
    if variant == "none":
        return bool(beta == 0)
    return beta == BETA if variant.startswith("stale:") else beta > 0


SETTINGS = Settings(
    title="A language model under KL terms, and a reward that can be over-optimised",
    tags=("sampled", "training", "off-policy", "language model"),
    parts=PARTS,
    values={"part": tuple(PARTS), "variant": ("none", "k1-reward", "k2-loss"), "beta": (0.0, 0.1), **SAME},
    full={"variant": tuple(VARIANTS), "beta": (0.0, *BETAS)},
    seeds={"quick": 1, "full": SEEDS},
    allowed={
        "variant": tuple(VARIANTS),
        "beta": (0.0, 100.0),
        "model": ("tiny:0.2M", "tiny:1M", "tiny:5M", "tiny:20M", "tiny:100M"),
        "reference_steps": (1, 100_000),
        "updates": (16, 1_000_000),
        "prompts": (1, 4096),
        "group_size": (2, 4096),
        "learning_rate": (0.0, 1.0),
        "eval_prompts": (2, 100_000),
        "device": ("auto", "cpu", "cuda"),
        "dtype": ("float32", "bfloat16"),
    },
    applies=applies,
    recorded=True,
)

"""A language model under KL terms and a reward that can be over-optimised: what is varied, and what is committed."""

from collections.abc import Mapping
from typing import Any

from kltest.sweeps.settings import Settings

# Tasks of task.py: of free length, and of a fixed one.
TASKS = {"free": "Lines", "fixed": "Ends"}
# KL terms: `leave-one-out` is k1 in the reward, with a baseline on the penalty as well as on the reward.
UNBIASED, LOCAL = "leave-one-out", ("k2-loss", "k3-loss")
FRESH = ("none", UNBIASED, *LOCAL, "k1-loss")
# Four updates for the rollouts of one sampler, in a quarter of the rounds; the reward has the ratio of the sequence in
# all of them.
STALE_EPOCHS = 4
STALE = (
    "stale:k1-reward-to-go-prefix-ratio",
    "stale:k1-reward-sequence-ratio",
    "stale:k2-loss",
    "stale:k3-ratio",
)
# Not in the plan: chosen when the planned runs were there. Reward and penalty in one piece (joint.py).
JOINT = "stale:joint"
BETAS = (0.025, 0.05, 0.1, 0.2, 0.4)
# The only coefficient with a stale sampler.
BETA = 0.1
SEEDS = 8
# Nothing is claimed of fewer: their intervals tell nothing.
FEWEST = 4

# Settings of every run beside those below; all else is the runner's default.
RUN: Mapping[str, Any] = {
    # No reference earns this: all take as many steps.
    "reference_reward": 1.0,
    "gradient_every": 0,
    "checkpoint_every": 0,
    "threads": 1,
}
# Number of measurements of a run, its start not counted, and the columns kept of each.
EVALUATIONS = 2
METRICS = ("reward_held_out", "gold_held_out", "kl", "kl_low", "kl_high", "length_held_out", "entropy")

# Settings that are the same in all runs of a sweep: those of the committed one, which holds no column of them.
SAME: Mapping[str, Any] = {
    "model": "tiny:50k",
    "reference_steps": 600,
    "updates": 32,
    "prompts": 16,
    "group_size": 8,
    "learning_rate": 3e-3,
    "eval_prompts": 256,
    "device": "cpu",
    "dtype": "float32",
}
PARTS = {
    # Runs made now: a few at quick scale, a seed of them at full.
    "run": ("seed", "task", "variant", "beta", *SAME),
    # Findings of all runs that are recorded: sweep.csv.
    "committed": (),
    # Findings of audits of the policy of a run: audits.csv.
    "audits": (),
    # What final policies lack: lacking.csv.
    "lacking": (),
}
# Of the recorded runs, which `python -m experiments.finetune.sweep` makes.
COMMITTED: Mapping[str, str] = {
    "date": "2026-11-28",
    "python": "3.11.7",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}

# What a run's final policy is audited with: `python -m experiments.finetune.audits` writes audits.csv.
AUDITS: Mapping[str, Any] = {
    "policy": {"seed": 0, "task": "free", "variant": "k2-loss", "beta": BETA},
    "estimators": (
        *("k1-loss", "k2-loss", "k3-loss", "k1-reward", "k1-reward-to-go", "k1-reward-immediate"),
        *("last-token", "length-normalised", "rao-blackwell"),
    ),
    "units": 256,
    "group_size": 4,
    "error_rate": 0.01,
    "margin": 0.05,
    "date": "2026-11-28",
    "torch": "2.13.0",
}
# Of which runs it is recorded what their final policies lack, on how many prompts and rollouts of each, and on how many
# prompts an audit estimates the share that is missed: `python -m experiments.finetune.lacking` writes lacking.csv.
LACKING: Mapping[str, Any] = {"variant": "k2-loss", "prompts": 256, "group_size": 8, "units": 256}


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
    values={"part": tuple(PARTS), "task": tuple(TASKS), "variant": (UNBIASED, "k2-loss"), "beta": (BETA,), **SAME},
    full={"variant": (*FRESH, *STALE, JOINT), "beta": (0.0, *BETAS)},
    seeds={"quick": 1, "full": 1},
    allowed={
        "task": tuple(TASKS),
        "variant": (*FRESH, *STALE, JOINT),
        "beta": (0.0, 100.0),
        "model": ("tiny:50k", "tiny:0.2M", "tiny:1M", "tiny:5M", "tiny:20M", "tiny:100M"),
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

"""A step of the language-model runner, against one of TRL's GRPOTrainer, in turn in one process.

The same small Llama with fresh weights, the same prompts, 64 completions of up to 32 tokens in groups of 4, rewards by
the same verifier, one KL term (k3 in the loss, β = 0.05), clipping, AdamW or Adam, float32, the CPU. TRL's loop runs
whole; its clock runs from the beginning to the end of each of its steps, and after each comes one of ours, and the
floor: forward and backward passes alone over our step's tokens. Lengths are random with one distribution for both (a
token ends a completion by chance, and learning rates are too small to matter), so that ratios are of seconds for a
token that counts.

TRL has an environment of its own, the one in which `kltest libraries trl` measures it; it is made if it is not there.
Where TRL can be imported, the benchmark runs at once, with as many threads as OMP_NUM_THREADS says. KLTEST_DEVICE is
cpu or cuda, KLTEST_SIZES the models, as "tiny:5M tiny:100M"; the largest takes half an hour.
"""

import copy
import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks.measure import Row, from_pairs, measured, seconds
from kltest.finetune.models import Models
from kltest.finetune.objective import Objective
from kltest.finetune.run import Training
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import task_named
from kltest.language_models.language import LanguageModel
from kltest.language_models.models import parameters_asked, tiny_model, tiny_tokenizer

SIZES = os.environ.get("KLTEST_SIZES", "tiny:670k tiny:5M").split()
DEVICE = os.environ.get("KLTEST_DEVICE", "cpu")
THREADS = os.environ.get("OMP_NUM_THREADS", "1")
# The steps that are timed, fewer of a large model, after two that are not.
STEPS, FEWER, WARM = 12, 3, 2
# A model of more parameters has no aim.
LARGE = 20e6
SHARED = {"beta": 0.05, "learning_rate": 1e-7}
RUN = {
    **SHARED,
    "prompts": 16,
    "group_size": 4,
    "max_tokens": 32,
    "algorithm": "grpo",
    "eval_every": 0,
    "gradient_every": 0,
}
TRL = {
    **SHARED,
    "per_device_train_batch_size": 64,
    "num_generations": 4,
    "max_completion_length": 32,
    "loss_type": "grpo",
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


def main() -> list[Row]:
    """Return the rows of the table of ratios."""
    if importlib.util.find_spec("trl") is not None:
        return [_row(model) for model in SIZES]
    from kltest.adapters import find
    from kltest.scoreboard.installation import install

    trl = find("trl")
    installed = install(trl, trl.version)
    environment = {**installed.environment, "OMP_NUM_THREADS": THREADS}
    rows = measured("finetune", Path(__file__).parents[1], str(installed.python), environment)
    return [Row(**row) for row in rows.to_dict("records")]


def _row(model: str) -> Row:
    turns = Turns(model)
    parameters = sum(one.numel() for one in turns.fresh.parameters())
    with tempfile.TemporaryDirectory() as folder:
        _trainer(turns, WARM + (STEPS if parameters < LARGE else FEWER), folder).train()
    machine = f"CPU, {torch.get_num_threads()} thread(s)" if DEVICE == "cpu" else torch.cuda.get_device_name()
    # Tokens of a step differ from step to step, so that medians count and not the fastest.
    _, theirs, least = map(statistics.median, zip(*turns.costs[WARM:], strict=True))
    return from_pairs(
        "generation and update / TRL's GRPOTrainer",
        f"{float(f'{parameters / 1e6:.2g}'):g}M parameters, 64 completions of up to 32 tokens, {machine}",
        [cost[:2] for cost in turns.costs[WARM:]],
        bound=2.0 if parameters < LARGE else None,
        at_most=False,
        floor=theirs / least,
        of=statistics.median,
    )


class Turns(TrainerCallback):
    """After each of TRL's steps, one of the runner and the floor.

    Attributes:
        problems: By prompt; those that TRL is given as well.
        fresh: The model from which both begin.
        costs: Of each step, seconds a token that counts: ours, theirs, and the floor's.
    """

    def __init__(self, model: str) -> None:
        self.task = task_named("addition")
        self.tokenizer = tiny_tokenizer(self.task.characters)
        torch.manual_seed(0)
        ends = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        self.fresh = tiny_model(parameters_asked(model), len(self.tokenizer), *ends)
        policy = LanguageModel.of(copy.deepcopy(self.fresh).eval().to(DEVICE), self.tokenizer)
        settings = Settings(model=model, steps=10**6, device=DEVICE, **RUN)
        self.training = Training(settings, self.task, Models(policy, policy.frozen()), Objective(settings))
        # At the very first step a run is measured.
        self.training.step = 1
        self.problems = {one.prompt: one for one in self.task.draw("train", 512, np.random.default_rng(0))}
        self.costs: list[tuple[float, float, float]] = []

    def reward(self, prompts: list[str], completions: list[str], completion_ids: list[Any], **_: Any) -> list[float]:
        """The verifier that TRL calls, and a count of its tokens."""
        self.tokens = sum(map(len, completion_ids))
        pairs = zip(prompts, completions, strict=True)
        return [self.task.reward(self.problems[prompt], completion) for prompt, completion in pairs]

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start TRL's clock."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Stop TRL's clock, then time our step and the floor."""
        theirs = time.perf_counter() - self.started
        ours = seconds(self.training.next, time.perf_counter)
        count = int(self.training.batch.mask.sum())
        self.costs.append((ours / count, theirs / self.tokens, seconds(self.least, time.perf_counter) / count))
        self.training.models.policy.model.zero_grad(set_to_none=True)

    def least(self) -> None:
        """The policy's forward and backward pass over the last step's tokens, with nothing else."""
        ids = torch.cat([self.training.batch.prompts, self.training.batch.tokens], dim=1)
        self.training.models.policy.model(input_ids=ids, use_cache=False).logits.sum().backward()
        if DEVICE != "cpu":
            torch.cuda.synchronize()


def _trainer(turns: Turns, steps: int, folder: str) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(output_dir=folder, max_steps=steps, use_cpu=DEVICE == "cpu", **TRL)
    # A reference is made from the folder that the policy came from.
    turns.fresh.save_pretrained(f"{folder}/model")
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32),
        reward_funcs=turns.reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in turns.problems]),
        processing_class=turns.tokenizer,
        callbacks=[turns],
    )

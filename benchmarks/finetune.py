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

from benchmarks.measure import Row, from_pairs, measured
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
PROMPTS, GROUP, TOKENS, BETA, RATE = 16, 4, 32, 0.05, 1e-7


def main() -> list[Row]:
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
    from transformers import TrainerCallback

    ours, size = _Ours(model), parameters_asked(model)
    steps = STEPS if size < 20e6 else FEWER
    # Of each step: seconds of theirs, of ours and of the floor, tokens of theirs and of ours.
    timed: list[tuple[float, float, float, int, int]] = []
    tokens = [0]

    class Clock(TrainerCallback):
        """After each of TRL's steps, one of ours and the floor."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            theirs = time.perf_counter() - self.started
            timed.append((theirs, ours.step(), ours.floor(), tokens[-1], int(ours.batch.mask.sum())))

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        pairs = zip(prompts, completions, strict=True)
        return [ours.task.reward(ours.problems[prompt], completion) for prompt, completion in pairs]

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(ours, reward, steps + WARM, folder)
        trainer.add_callback(Clock())
        trainer.train()
    machine = f"CPU, {torch.get_num_threads()} thread(s)" if DEVICE == "cpu" else torch.cuda.get_device_name()
    size = sum(one.numel() for one in ours.fresh.parameters())
    case = f"{float(f'{size / 1e6:.2g}'):g}M parameters, 64 completions of up to 32 tokens, {machine}"
    per_token = [(mine / own, theirs / other) for theirs, mine, _, other, own in timed[WARM:]]
    # Tokens of a step differ from step to step, so that medians count and not the fastest.
    least = statistics.median(floor / own for _, _, floor, _, own in timed[WARM:])
    return from_pairs(
        "generation and update / TRL's GRPOTrainer",
        case,
        per_token,
        bound=2.0 if size < 20e6 else None,
        at_most=False,
        floor=statistics.median(other for _, other in per_token) / least,
        of=statistics.median,
    )


class _Ours:
    """A run of the runner, step by step; `problems` by prompt are those that TRL is given as well."""

    def __init__(self, model: str) -> None:
        self.task = task_named("addition")
        self.tokenizer = tiny_tokenizer(self.task.characters)
        torch.manual_seed(0)
        ends = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        self.fresh = tiny_model(parameters_asked(model), len(self.tokenizer), *ends)
        policy = LanguageModel.of(copy.deepcopy(self.fresh).eval().to(DEVICE), self.tokenizer)
        settings = Settings(
            model=model,
            steps=10**6,
            prompts=PROMPTS,
            group_size=GROUP,
            max_tokens=TOKENS,
            algorithm="grpo",
            beta=BETA,
            learning_rate=RATE,
            eval_every=0,
            gradient_every=0,
            device=DEVICE,
        )
        self.training = Training(settings, self.task, Models(policy, policy.frozen()), Objective(settings))
        # At the very first step a run is measured.
        self.training.step = 1
        self.problems = {one.prompt: one for one in self.task.draw("train", 512, np.random.default_rng(0))}

    def step(self) -> float:
        """Seconds of a step, whose rollouts are the `batch`."""
        started = time.perf_counter()
        self.training.next()
        self.batch: Any = self.training.batch
        return time.perf_counter() - started

    def floor(self) -> float:
        """Seconds of the policy's forward and backward pass over the last step's tokens, with nothing else."""
        ids, model = torch.cat([self.batch.prompts, self.batch.tokens], dim=1), self.training.models.policy.model
        started = time.perf_counter()
        model(input_ids=ids, use_cache=False).logits.sum().backward()
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        model.zero_grad(set_to_none=True)
        return seconds


def _trainer(ours: _Ours, reward: Any, steps: int, folder: str) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        max_steps=steps,
        beta=BETA,
        learning_rate=RATE,
        temperature=1.0,
        loss_type="grpo",
        use_cpu=DEVICE == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    # A reference is made from the folder that the policy came from.
    ours.fresh.save_pretrained(f"{folder}/model")
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in ours.problems]),
        processing_class=ours.tokenizer,
    )

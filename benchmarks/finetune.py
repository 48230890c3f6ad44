"""A step of the language-model runner, against one of TRL's GRPOTrainer, in turn in one process.

The same small Llama with fresh weights, the same prompts, 64 completions of up to 32 tokens in groups of 4, rewards by
the same verifier, one KL term (k3 in the loss, β = 0.05), clipping, AdamW or Adam, float32, the CPU. TRL's loop runs
whole; its clock runs from the beginning to the end of each of its steps, and after each comes one of ours, and the
floor: forward and backward passes alone over our step's tokens. Lengths are random with one distribution for both (a
token ends a completion by chance, and learning rates are too small to matter), so that ratios are of seconds for a
token that counts.

TRL has an environment of its own, the one in which `kltest libraries trl` measures it; it is made if it is not there.
Where TRL can be imported, the benchmark runs at once, with as many threads as OMP_NUM_THREADS says.
"""

import copy
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Row, from_pairs, table

# The steps that are timed, after two that are not; the largest takes half an hour, and is asked for by name.
SIZES = {"tiny:670k": 12, "tiny:5M": 10, "tiny:100M": 3}
BOUNDS = {"tiny:670k": 2.0, "tiny:5M": 2.0, "tiny:100M": None}
WARM = 2
USUAL = ("tiny:670k", "tiny:5M")
PROMPTS, GROUP, TOKENS, BETA, RATE = 16, 4, 32, 0.05, 1e-7
ROOT = Path(__file__).parents[1]
# cpu, or cuda: benchmarks/gpu.md says what to run there.
DEVICE = os.environ.get("KLTEST_DEVICE", "cpu")


def main(sizes: dict[str, int] | None = None) -> list[Row]:
    sizes = {name: SIZES[name] for name in USUAL} if sizes is None else sizes
    if importlib.util.find_spec("trl") is None:
        return _in_its_environment(sizes)
    return [_row(model, steps) for model, steps in sizes.items()]


def _in_its_environment(sizes: dict[str, int]) -> list[Row]:
    from kltest.adapters import find
    from kltest.scoreboard.installation import install

    trl = find("trl")
    installed = install(trl, trl.version)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    told = f"import sys, json; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.finetune import main, told; "
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "rows.json"
        code = f"{told}told(main({sizes!r}), {str(kept)!r})"
        subprocess.run(installed.command("-c", code), env={**installed.environment, **threads}, cwd=ROOT, check=True)
        return [Row(**row) for row in json.loads(kept.read_text(encoding="utf-8"))]


def told(rows: list[Row], path: str) -> None:
    """The rows, for the process that asked for them."""
    Path(path).write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


def _row(model: str, steps: int) -> Row:
    from transformers import TrainerCallback

    from kltest.finetune.tasks import task_named

    task = task_named("addition")
    ours = _Ours(model, task)
    seconds: list[tuple[float, float, float]] = []
    counts: list[tuple[int, int]] = []

    class Clock(TrainerCallback):
        """After each of TRL's steps, one of ours and the floor."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            theirs = time.perf_counter() - self.started
            mine, tokens = ours.step()
            seconds.append((theirs, mine, ours.floor()))
            counts.append((int(theirs_seen[-1]), tokens))

    theirs_seen: list[int] = []

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **others: Any
    ) -> list[float]:
        theirs_seen.append(sum(map(len, completion_ids)))
        pairs = zip(prompts, completions, strict=True)
        return [task.reward(ours.problems[prompt], completion) for prompt, completion in pairs]

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(ours, reward, steps + WARM, folder)
        trainer.add_callback(Clock())
        trainer.train()
    size = sum(one.numel() for one in ours.models.policy.model.parameters())
    millions = float(f"{size / 1e6:.2g}")
    case = f"{millions:g}M parameters, 64 completions of up to 32 tokens, {_machine()}"
    timed = list(zip(seconds, counts, strict=True))[WARM:]
    per_token = [(mine / own, theirs / other) for (theirs, mine, _), (other, own) in timed]
    rate = 1 / statistics.median(mine for mine, _ in per_token), 1 / statistics.median(other for _, other in per_token)
    print(f"{case}: {rate[0]:,.0f} tokens a second, TRL {rate[1]:,.0f}", flush=True)
    # Tokens of a step differ from step to step, so that medians count and not the fastest.
    least = statistics.median(floor / own for (_, _, floor), (_, own) in timed)
    claim, floor = "generation and update / TRL's GRPOTrainer", 1 / rate[1] / least
    return from_pairs(claim, case, per_token, bound=BOUNDS[model], at_most=False, floor=floor, of=statistics.median)


def _machine() -> str:
    return f"CPU, {torch.get_num_threads()} thread(s)" if DEVICE == "cpu" else torch.cuda.get_device_name()


class _Ours:
    """A run of the runner, step by step; `problems` by prompt are those that TRL is given as well."""

    def __init__(self, model: str, task: Any) -> None:
        import numpy as np

        from kltest.finetune.checkpoints import RunFolder
        from kltest.finetune.models import Models
        from kltest.finetune.objective import Objective
        from kltest.finetune.run import Training
        from kltest.finetune.settings import Settings
        from kltest.language_models.language import LanguageModel
        from kltest.language_models.models import parameters_asked, tiny_model, tiny_tokenizer

        self.tokenizer = tiny_tokenizer(task.characters)
        ends = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        torch.manual_seed(0)
        self.fresh = tiny_model(parameters_asked(model), len(self.tokenizer), *ends)
        policy, reference = (copy.deepcopy(self.fresh).eval().to(DEVICE) for _ in range(2))
        reference.requires_grad_(False)
        self.models = Models(*(LanguageModel.of(one, self.tokenizer) for one in (policy, reference)))
        settings = Settings(
            model=model,
            steps=10**6,
            prompts=PROMPTS,
            group_size=GROUP,
            max_tokens=TOKENS,
            algorithm="grpo",
            kl="k3-loss",
            beta=BETA,
            learning_rate=RATE,
            eval_every=0,
            gradient_every=0,
            device=DEVICE,
        )
        self.training = Training(settings, task, self.models, Objective(settings))
        # At the very first step a run is measured.
        self.training.step = 1
        self.files = RunFolder(None, settings)
        drawn = task.draw("train", 512, np.random.default_rng(0))
        self.problems = {problem.prompt: problem for problem in drawn}

    def step(self) -> tuple[float, int]:
        """Seconds, and how many tokens were generated."""
        started = time.perf_counter()
        self.training.next(self.files)
        seconds = time.perf_counter() - started
        self.batch = self.training.batch
        assert self.batch is not None
        return seconds, int(self.batch.mask.sum())

    def floor(self) -> float:
        """Seconds of the policy's forward and backward pass over the last step's tokens, with nothing else."""
        ids = torch.cat([self.batch.prompts, self.batch.tokens], dim=1)
        started = time.perf_counter()
        self.models.policy.model(input_ids=ids, use_cache=False).logits.sum().backward()
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        self.models.policy.model.zero_grad(set_to_none=True)
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


if __name__ == "__main__":
    print(table(main({name: SIZES[name] for name in sys.argv[1:]} or None)))

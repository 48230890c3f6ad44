"""What a model is to do: prompts, answers, and a verifier that turns a rollout into a reward. One task a file."""

from kltest.finetune.tasks.task import SPLITS, Problem, Split, Task, task_named

__all__ = ["SPLITS", "Problem", "Split", "Task", "task_named"]

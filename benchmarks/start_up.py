"""Commands against the bare imports that they cannot do without, each in a fresh process.

Among them a pytest run of every registered estimator under every check; two minutes are a hundred imports of torch.
"""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.measure import Row, compare

LOSSES = """
import torch


def penalty(logp, ref_logp, mask):
    log_ratio = ((logp - ref_logp) * mask).sum(-1)
    return log_ratio.square() / 2


def grpo(logp, ref_logp, old_logp, mask, advantages, beta=0.1):
    ratio, advantage = (logp - old_logp).exp(), advantages[:, None]
    objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    log_ratio = ref_logp - logp
    return ((beta * (log_ratio.exp() - log_ratio - 1) - objective) * mask).sum() / mask.sum()


def dropped(logp, ref_logp, mask):
    log_ratio = ((logp - ref_logp) * mask).sum(-1)
    return torch.nn.functional.dropout(log_ratio.square() / 2, 0.5)


def dropped_whole(logits, ref_logits, mask):
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return torch.nn.functional.dropout((logits.exp() * (logits - ref_logits)).sum(-1) * mask, 0.5)
"""
TESTS = """
import kltest
from kltest.estimators import registry

@kltest.parametrize_with_checks(list(registry()))
def test_registry(loss, check):
    check(loss)
"""
PYTEST = "pytest -q --no-header --tb=no --maxfail=100000"
WHOLE = "pytest, whole registry × all checks"
# With the import that they cannot do without, and the aim.
COMMANDS = {
    "kltest --help": ("typer", 3.0),
    "kltest grade k3-loss --select KL1,KL2,KL3": ("torch", 1.5),
    "kltest grade k3-loss": ("torch", 1.5),
    "kltest grade k2-ratio-detached": ("torch", 1.5),
    "kltest grade FILE:penalty": ("torch", 1.5),
    # The mean over all tokens couples the rows of a batch, so that whole groups are enumerated.
    "kltest grade FILE:grpo": ("torch", 6.0),
    # A loss that draws random numbers: rows are sampled, and what lies farther out is a mean over thousands of draws.
    "kltest grade FILE:dropped": ("torch", 6.0),
    "kltest grade FILE:dropped_whole --expect local_reverse_kl": ("torch", 6.0),
    WHOLE: ("torch", 100.0),
}


def main() -> list[Row]:
    """Return the rows of the table of ratios."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "losses.py").write_text(LOSSES, encoding="utf-8")
        Path(folder, "test_registry.py").write_text(TESTS, encoding="utf-8")
        return [
            compare(
                f"{command} / import {module}",
                "CPU time of the process and its children",
                partial(_run, folder, "-m", *command.replace(WHOLE, PYTEST).replace("FILE", "losses.py").split()),
                partial(_run, folder, "-c", f"import {module}"),
                bound=bound,
                floor=None if command == WHOLE else 1.0,
                rounds=2 if command == WHOLE else 5,
            )
            for command, (module, bound) in COMMANDS.items()
        ]


def _run(folder: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    # A refuted loss is exit code 1, of pytest as well: most of the registry is there to be refuted.
    if done.returncode > 1 or " error" in "".join(done.stdout.splitlines()[-1:]):
        raise RuntimeError(f"{arguments} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-500:]}")

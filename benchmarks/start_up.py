"""The command line against the bare imports that it cannot do without, each in a fresh process."""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Row, from_pairs, seconds

MODULES = ("typer", "torch")
WARM, ROUNDS = 1, 3

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
"""


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "losses.py")
        file.write_text(LOSSES, encoding="utf-8")
        return _compared(file)


def _compared(file: Path) -> list[Row]:
    claims = [
        (["--help"], "typer", 3.0),
        (["grade", "k3-loss", "--select", "KL1,KL2,KL3"], "torch", 2.5),
        (["grade", "k3-loss"], "torch", 3.0),
        (["grade", "k2-ratio-detached"], "torch", 3.0),
        (["grade", f"{file}:penalty"], "torch", 3.0),
        # The mean over all tokens couples the rows of a batch, so that whole groups are enumerated.
        (["grade", f"{file}:grpo"], "torch", 6.0),
    ]
    pairs: list[list[tuple[float, float]]] = [[] for _ in claims]
    # A process takes seconds: in each round every import is timed once, beside all commands that it is compared with.
    for _ in range(WARM + ROUNDS):
        bare = {name: seconds(lambda name=name: _run([sys.executable, "-c", f"import {name}"])) for name in MODULES}
        for (arguments, module, _), timed in zip(claims, pairs, strict=True):
            timed.append(
                (seconds(lambda arguments=arguments: _run([sys.executable, "-m", "kltest", *arguments])), bare[module])
            )
    rows = [
        from_pairs(
            f"kltest {' '.join(arguments).replace(str(file), 'FILE')} / import {module}",
            "CPU time of the process and its children",
            timed[WARM:],
            bound=bound,
            floor=1.0,
        )
        for (arguments, module, bound), timed in zip(claims, pairs, strict=True)
    ]
    return rows


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    # `kltest grade k3-loss` refutes (exit 1); anything above means that it did not do its work.
    if done.returncode > 1:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr.decode()[-500:]}")

"""The page on the language-model runner: estimators, settings and metrics, from the places that define them."""

from __future__ import annotations

from dataclasses import fields

import kltest.finetune
from kltest.files import as_markdown
from kltest.finetune import exact
from kltest.finetune.metrics import METRICS
from kltest.finetune.settings import CHOICES, Settings

COMMANDS = """```bash
python -m pip install -c constraints.txt -e ".[finetune]"
kltest finetune                                      # a tiny model, trained first; on a CPU in about a minute
kltest finetune --kl k3-loss --beta 0.5              # another KL term: any name of `kltest list`, or FILE.py:function
kltest finetune --settings run.toml --set steps=500  # settings from a file; what the command line says wins
kltest finetune --exact                              # a transformer whose completions are all enumerated
kltest finetune --model ./my-model --task jsonl:problems.jsonl --set device=cuda --set dtype=bfloat16
accelerate launch --num_processes 2 -m kltest.cli finetune --model tiny:5M
```"""


def page() -> str:
    """Return the page in Markdown; docs/hooks.py puts it into docs/guides/language-model.md."""
    settings = [
        {
            "setting": f"`{one.name}`",
            "default": "`{}`" if one.name == "kl_options" else f"`{one.default}`",
            "meaning": one.metadata["meaning"] + _choices(one.name),
        }
        for one in fields(Settings)
    ]
    metrics = [{"metric": f"`{name}`", "what it is": meaning} for name, meaning in METRICS.items()]
    parts = [
        "# Fine-tuning a language model",
        COMMANDS,
        str(kltest.finetune.__doc__).strip(),
        "A run can be stopped at any moment; the same command continues it, and `--again` starts anew. The folder of a "
        "run holds `metrics.jsonl`, a line for every step, `timings.jsonl`, a checkpoint, and the trained `model` in "
        "Hugging Face's format.",
        "## A transformer that can be enumerated",
        str(exact.__doc__).strip(),
        "`kltest finetune --exact` does so for every registered estimator (`--kl` for one), on sequences of one length "
        "and on ragged ones, and ends with exit code 1 if one of them differs from the tabular case. "
        "`--set vocabulary=…` and `--set length=…` choose the environment, `--model` the network. `kltest grade TARGET "
        "--environment transformer` grades any loss there: policy, reference and sampler are one small network with "
        "different weights, and the row names the gradient that the loss follows at all of its weights.",
        "## Settings",
        as_markdown(settings).rstrip(),
        "## Metrics",
        as_markdown(metrics).rstrip(),
    ]
    return "\n\n".join(parts) + "\n"


def _choices(name: str) -> str:
    return f" (one of {', '.join(f'`{choice}`' for choice in CHOICES[name])})" if name in CHOICES else ""

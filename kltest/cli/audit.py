"""`kltest audit`: measure the gradient that a target follows on a real language model, by sampling."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kltest.cli.destinations import deliver, destinations
from kltest.cli.parameters import given, reported_as, take
from kltest.errors import UsageError
from kltest.grading.options import OPTIONS

FORMATS = ("text", "json")
SHARED = ("expect", "placement", "credit", "arguments", "margin", "group_size")
"""Options of `kltest grade` that mean the same here."""


def command(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A loss, as for `kltest grade`.", show_default=False)],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="The policy: tiny, tiny:SIZE, a folder, or the id of one on the hub."
        ),
    ],
    ref: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The reference [default for a tiny model: one near it].")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The policy that draws the rollouts [default: the model].")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts, one a line, or JSON lines with `prompt`.")
    ] = None,
    rollouts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rollouts of a training run: JSON lines, or tensors of torch."),
    ] = None,
    units: Annotated[int, typer.Option(metavar="N", min=8, help="Most prompts to draw, each with its rollouts.")] = 256,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest rollout, in tokens.")] = 16,
    temperature: Annotated[float, typer.Option(metavar="T", help="Divisor of the logits of all models.")] = 1.0,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, …")] = "cpu",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="float32, float64, bfloat16 or float16.")
    ] = "float32",
    output: Annotated[list[str] | None, reported_as(FORMATS)] = None,
    **options: Any,
) -> int:
    where = destinations(output or ["text"], FORMATS)
    from kltest.auditing.audit import audit
    from kltest.auditing.models import DTYPES, load
    from kltest.auditing.units import read_prompts, read_rollouts
    from kltest.language_models.models import is_tiny
    from kltest.sweeps.progress import Progress

    chosen = given(options)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype: there is no {dtype!r}; choose from {', '.join(DTYPES)}")
    if temperature <= 0:
        raise UsageError(f"--temperature: give a positive number; it is {temperature:g}")
    if ref is None and not is_tiny(model):
        raise UsageError("--ref is missing: give the reference, the model that the KL is measured against")
    if prompts is None and rollouts is None and not is_tiny(model):
        raise UsageError("--prompts is missing: give a file of prompts, one a line, or --rollouts")
    if prompts is not None and rollouts is not None:
        raise UsageError("--prompts and --rollouts exclude each other; give one of them")
    texts = [] if prompts is None else read_prompts(prompts)
    batch = None if rollouts is None else read_rollouts(rollouts)
    loading: dict[str, Any] = {"seed": chosen.get("seed", 0), "dtype": dtype, "device": device}
    roles = {"model": model, "ref": ref or model, "sampler": sampler}
    found = {role: load(name, role, **loading) for role, name in roles.items() if name is not None}
    bar = Progress("audit", units)
    report = audit(
        target,
        found["model"],
        found["ref"],
        batch,
        sampler=found.get("sampler"),
        prompts=texts,
        units=units,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        models=roles,
        progress=lambda _: bar.advance(),
        **chosen,
    )
    deliver(where, lambda to, shown: report.to_json() if to.form == "json" else report.to_text(shown), verbose=False)
    return report.exit_code


WRONG = "Highest probability that anything in the report is wrong."
take(
    command,
    [
        *(OPTIONS[name] for name in SHARED),
        replace(OPTIONS["error_rate"], default=0.01, help=WRONG),
        replace(OPTIONS["seed"], help="Seed of the rollouts."),
    ],
)

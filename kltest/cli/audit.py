"""`kltest audit`: measure the gradient that a target follows on a real language model, by sampling."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kltest.errors import UsageError

FORMATS = ("text", "json")


def command(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A loss, as for `kltest grade`.", show_default=False)],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The policy: tiny, tiny:SIZE, a folder, or the id of one on the hub.")
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
        typer.Option(metavar="FILE", help="Rollouts as a training run kept them: JSON lines, or tensors of torch."),
    ] = None,
    units: Annotated[int, typer.Option(metavar="N", min=8, help="Most prompts to draw, each with its rollouts.")] = 256,
    group_size: Annotated[int, typer.Option(metavar="N", min=1, help="Rollouts of a prompt.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest rollout, in tokens.")] = 16,
    temperature: Annotated[float, typer.Option(metavar="T", help="Divisor of the logits of all models.")] = 1.0,
    expect: Annotated[str, typer.Option(metavar="NAME", help="The gradient that is claimed.")] = "reverse_kl",
    placement: Annotated[str | None, typer.Option(metavar="WHERE", help="loss, reward, shaped-reward or both.")] = None,
    credit: Annotated[str | None, typer.Option(metavar="CREDIT", help="return, to-go or immediate.")] = None,
    arg: Annotated[
        list[str] | None, typer.Option("--arg", metavar="NAME=VALUE", help="An argument of the target, repeatable.")
    ] = None,
    error_rate: Annotated[
        float, typer.Option(metavar="RATE", help="Highest probability that anything in the report is wrong.")
    ] = 0.01,
    margin: Annotated[
        float, typer.Option(metavar="SHARE", help="Largest distance from the claim that is confirmed, of its norm.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the rollouts.")] = 0,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, …")] = "cpu",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32, float64, bfloat16 or float16.")] = "float32",
    output: Annotated[
        list[str] | None, typer.Option(metavar="FORMAT[:PATH]", help="text or json; repeatable [default: text].")
    ] = None,
) -> int:
    from kltest.cli.destinations import deliver, destinations

    where = destinations(output or ["text"], FORMATS)
    from kltest.auditing.audit import audit
    from kltest.auditing.models import DTYPES, load
    from kltest.auditing.units import read
    from kltest.grading.forms import arguments
    from kltest.language_models.models import is_tiny
    from kltest.sweeps.progress import Progress

    if dtype not in DTYPES:
        raise UsageError(f"--dtype: there is no {dtype!r}; choose from {', '.join(DTYPES)}")
    if temperature <= 0:
        raise UsageError(f"--temperature: give a positive number; it is {temperature:g}")
    if ref is None and not is_tiny(model):
        raise UsageError("--ref is missing: give the reference, the model that the KL is measured against")
    texts = _prompts(prompts) if prompts else []
    if not texts and rollouts is None and not is_tiny(model):
        raise UsageError("--prompts is missing: give a file of prompts, one a line, or --rollouts")
    if texts and rollouts is not None:
        raise UsageError("--prompts and --rollouts exclude each other; give one of them")
    batch = None if rollouts is None else read(rollouts)
    loading: dict[str, Any] = {"seed": seed, "dtype": dtype, "device": device}
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
        expect=expect,
        placement=placement,
        credit=credit,
        arguments=arguments(arg or [], "--arg"),
        error_rate=error_rate,
        margin=margin,
        seed=seed,
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        models=roles,
        progress=lambda _: bar.advance(),
    )
    deliver(where, lambda to, shown: report.to_json() if to.form == "json" else report.to_text(shown), verbose=False)
    return report.exit_code


def _prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one a line, or of JSON lines with `prompt`."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise UsageError(f"--prompts {path} has no prompt: write one a line")
    if not lines[0].lstrip().startswith("{"):
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError):
            found.append(None)
        if not isinstance(found[-1], str):
            raise UsageError(f"--prompts {path}: line {number} is no JSON object with a text `prompt`")
    return found

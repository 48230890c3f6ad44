"""`kltest reproduce`, `kltest run`, `kltest figures` and `kltest paper`."""

from typing import Annotated

import typer

EXPERIMENTS = (
    *("approximations", "atlas", "coefficients", "differentiate-the-estimate", "distillation", "finetune", "groups"),
    *("libraries", "metrics", "off-policy", "sequence", "tabular-mdp", "training-curves", "variance"),
)
"""Names for the help, which looks into no checkout."""
Scale = Annotated[str, typer.Option(metavar="quick|full", help="How much is computed.")]
Folder = Annotated[
    str | None, typer.Option("--output", metavar="DIR", help="Folder of the results [default: results].")
]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Processes to spread over [default: one a core].")]
Cluster = Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler to use, as tcp://host:8786.")]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")]


def reproduce(
    scale: Scale = "quick",
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this experiment; repeatable.")] = None,
    workers: Workers = None,
    cluster: Cluster = None,
    retry_failed: Retry = False,
    output: Folder = None,
) -> int:
    from kltest.reproduce import Request, commands

    request = Request(scale=scale, workers=workers, cluster=cluster, retry_failed=retry_failed)
    return commands.reproduce(only=only or [], output=output, request=request)


def run(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help=f"A folder in experiments/: {', '.join(EXPERIMENTS)}.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE,...", help="Other values for a setting; repeatable."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Number of random repetitions.")] = None,
    scale: Scale = "quick",
    workers: Workers = None,
    cluster: Cluster = None,
    retry_failed: Retry = False,
    output: Folder = None,
) -> int:
    from kltest.reproduce import Request, commands

    request = Request(scale, tuple(changes or ()), seeds, workers, cluster, retry_failed)
    return commands.run(experiment, output=output, request=request)


def figures(output: Folder = None) -> int:
    from kltest.reproduce import commands

    return commands.figures(output=output)


def paper(output: Folder = None) -> int:
    from kltest.reproduce import commands

    return commands.paper(output=output)

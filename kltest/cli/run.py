"""`kltest run`."""

from __future__ import annotations

from typing import Annotated

import typer

from kltest.cli.common import Cluster, Folder, Retry, Scale, Workers

EPILOG = "With --set or --seeds its results stand beside those that the figures and the paper read."


def command(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="The name of a folder in experiments/.")],
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

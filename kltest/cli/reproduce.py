"""`kltest reproduce`."""

from __future__ import annotations

from typing import Annotated

import typer

from kltest.cli.common import Cluster, Folder, Retry, Scale, Workers


def command(
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

"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Scale = Annotated[str, typer.Option(metavar="quick|full", help="How much is computed.")]
Folder = Annotated[
    str | None, typer.Option("--output", metavar="DIR", help="Folder of the results [default: results].")
]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Processes to spread over [default: one a core].")]
Cluster = Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler to use, as tcp://host:8786.")]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")]

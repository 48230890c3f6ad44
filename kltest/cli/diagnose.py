"""`kltest diagnose`: what logged log-probs show of sampler, engine, reference, masks and penalty, without a model."""

from pathlib import Path
from typing import Annotated

import typer

from kltest.cli.destinations import deliver, destinations
from kltest.cli.parameters import reported_as
from kltest.errors import UsageError

FORMATS = ("text", "json", "html")


def command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Logs of rollouts: .jsonl, .json, .parquet or .pt.", show_default=False),
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=NAME",
            help="Name of a column that the usual names do not find, nothing to leave it out; repeatable.",
        ),
    ] = None,
    error_rate: Annotated[
        float, typer.Option(metavar="RATE", help="Highest probability that any interval of the report misses.")
    ] = 0.01,
    strict: Annotated[
        bool, typer.Option("--strict", help="A question without its columns makes the verdict inconclusive.")
    ] = False,
    beta: Annotated[
        float | None,
        typer.Option(metavar="β", help="Coefficient of the KL term; with rewards it tells how far the optimum is."),
    ] = None,
    output: Annotated[list[str] | None, reported_as(FORMATS)] = None,
) -> int:
    where = destinations(output or ["text"], FORMATS)
    if not file.exists():
        raise UsageError(f"there is no file {file}")
    names = {}
    for text in column or ():
        name, equals, key = text.partition("=")
        if not equals:
            raise UsageError(f"--column {text}: write FIELD=NAME, as logp=my_logprobs")
        names[name] = key
    from kltest.diagnosing.diagnose import diagnosed
    from kltest.diagnosing.page import page

    found, logs = diagnosed(file, names, error_rate, strict=strict, beta=beta)
    forms = {"json": lambda shown: found.to_json(), "html": lambda shown: page(found, logs), "text": found.to_text}
    deliver(where, lambda to, shown: forms[to.form](shown), verbose=False)
    return found.exit_code

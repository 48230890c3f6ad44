"""`kltest same`: compare two implementations of a loss, each in a child process of its own."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from kltest.cli.destinations import deliver, destinations
from kltest.cli.parameters import given, reported_as, take
from kltest.grading.isolated import terminated_as_interrupted
from kltest.grading.options import DEFAULT_TIMEOUT, OPTIONS
from kltest.loss.target import named

FORMATS = ("text", "json")
ARGUMENT = "An argument of {} alone, repeatable; it wins over --arg."


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A loss, as for `kltest grade`.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.", show_default=False)],
    arg_a: Annotated[list[str] | None, typer.Option("--arg-a", metavar="NAME=VALUE", help=ARGUMENT.format("A"))] = None,
    arg_b: Annotated[list[str] | None, typer.Option("--arg-b", metavar="NAME=VALUE", help=ARGUMENT.format("B"))] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Largest relative difference that is none [default: that of rounding]."),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option("--ranks", metavar="N", min=1, max=8, help="Also on N processes, each with its share of rows."),
    ] = 1,
    output: Annotated[list[str] | None, reported_as(FORMATS)] = None,
    **options: Any,
) -> int:
    where = destinations(output or ["text"], FORMATS)
    chosen = given(options)
    form = OPTIONS["arguments"].form
    own = {name: form(texts, f"--{name}") if texts else None for name, texts in (("arg-a", arg_a), ("arg-b", arg_b))}
    for target in (a, b):
        if ":" in target and ".py" in target:
            named(target)  # refuses missing files before torch is imported
    from kltest.comparing.same import same

    with terminated_as_interrupted():
        found = same(
            a,
            b,
            arguments_a=own["arg-a"],
            arguments_b=own["arg-b"],
            tolerance=tolerance,
            ranks=ranks,
            isolated=True,
            **{"timeout": DEFAULT_TIMEOUT, **chosen},
        )
    deliver(where, lambda to, _: found.to_json() if to.form == "json" else found.to_text(), verbose=False)
    return found.exit_code


take(
    command,
    [
        replace(OPTIONS["arguments"], help="An argument of both, repeatable, as of `kltest grade`."),
        replace(OPTIONS["seed"], help="Seed of the batches and of random numbers."),
        replace(OPTIONS["timeout"], help="Seconds that all may take.", unset=f"{DEFAULT_TIMEOUT:g}"),
    ],
)

"""The command line: what can be asked, and how mistakes are answered. What commands do is in `kltest.cli`."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from kltest import __version__
from kltest.errors import KltestError

app = typer.Typer(
    name="kltest",
    help="Which gradient does a KL penalty really follow? Exact, on every rollout of a small world.",
    epilog="Start with: kltest grade k3-loss",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXIT_CODES = (
    "Exit code: 0 confirmed, 1 refuted, 2 usage, 3 the loss or kltest crashed, 4 inconclusive, 5 nothing to grade; of "
    "several targets the worst."
)

# A full disk, a quota, a limit on the size of a file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def answered(command: Callable[..., int | None]) -> Callable[..., NoReturn]:
    """Errors become one message on standard error and an exit code; a failure of our own says that it is one."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> NoReturn:
        try:
            code = command(*arguments, **options) or 0
            sys.stdout.flush()
        except KltestError as error:
            typer.echo(f"kltest: {error}", err=True)
            code = error.exit_code
        except KeyboardInterrupt:
            typer.echo("kltest: interrupted", err=True)
            code = 130
        except BrokenPipeError:
            # The reader has left (`kltest list | head`).
            _give_up_standard_output()
            code = 141
        except Exception as error:
            code = _failed(error)
        raise typer.Exit(code)

    return run


def _failed(error: Exception) -> int:
    """Say what failed: that there is no room to write is nobody's bug, all else that comes this far is ours."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        _give_up_standard_output()
        typer.echo(f"kltest: {error.filename or 'standard output'} cannot be written: {error.strerror}", err=True)
        return 3
    from kltest.grading.bugs import note_bug
    from kltest.grading.isolation import describe

    typer.echo(f"kltest: {note_bug(describe(error), traceback.format_exc())}", err=True)
    return 3


def _give_up_standard_output() -> None:
    """Nothing more can be said there, also not by Python when it writes what is left at its exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kltest {__version__}")
        raise typer.Exit()


@app.callback()
def kltest(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Which gradient does a KL penalty really follow? Exact, on every rollout of a small world."""


@app.command(epilog=EXIT_CODES)
@answered
def grade(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            help="A name of `kltest list`, package.module:function, path/to/file.py:function, or an installed library "
            "(trl, verl, …) or one of its settings. Without one, the targets of [tool.kltest] in pyproject.toml.",
            show_default=False,
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The gradient that is claimed, or a combination: [c*]NAME[±[c*]NAME]… [default: reverse_kl]",
        ),
    ] = None,
    placement: Annotated[
        str | None, typer.Option(metavar="loss|reward|both", help="Where the term stands [default: its own, else loss]")
    ] = None,
    credit: Annotated[
        str | None,
        typer.Option(
            metavar="return|to-go|immediate",
            help="What a token in the reward is credited with [default: its own, else return]",
        ),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="The worlds, of `kltest list` [default: bandit,sequence,ragged]"),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="current|stale|both",
            help="Who drew the rollouts [default: both where the loss uses the sampler's log-probs, else current]",
        ),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An argument of the target, repeatable; NAME=@FIELD gives it a field of the rollout.",
        ),
    ] = None,
    select: Annotated[str | None, typer.Option(metavar="CODE,…", help="Only these checks: codes or prefixes.")] = None,
    ignore: Annotated[str | None, typer.Option(metavar="CODE,…", help="Not these checks: codes or prefixes.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Chooses worlds and padding [default: 0]")] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The longest that a target may take [default: 60]")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(metavar="N", help="Rollouts of one prompt in a group [default: 4]")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Rollouts in a batch, where the loss couples them.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="exact|sampled",
            help="Enumerate, or sample until it is decided [default: exact, sampled where that is impossible]",
        ),
    ] = None,
    error_rate: Annotated[
        float | None, typer.Option(metavar="RATE", help="How often a sampled verdict may be wrong [default: 1e-6]")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="The relative bias that a sampled verdict lets pass [default: 0.05]"),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", help="The most batches sampled in an instance [default: 200000, one a call 10000]"),
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(
            metavar="NORM",
            help="What no gradient of a batch exceeds, if you know it: a sampled verdict is then not asymptotic.",
        ),
    ] = None,
    expect_failure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE=REASON",
            help="A check that is expected to fail, and why, repeatable: it does not refute, but passing does.",
        ),
    ] = None,
    allow_stale_excuses: Annotated[
        bool, typer.Option("--allow-stale-excuses", help="Let checks pass that are expected to fail.")
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option(metavar="OLD.json", help="Say what changed since this report (--output json:OLD.json)."),
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT[:PATH]",
            help="text, json, junit, markdown, github or html, to standard output or "
            "a file; repeatable [default: text]",
        ),
    ] = None,
) -> int:
    """Which gradient a loss follows, and whether it is the claimed one."""
    from kltest.cli.grade import grade as run

    given = {
        "expect": expect,
        "placement": placement,
        "credit": credit,
        "environment": environment,
        "sampler": sampler,
        "arg": arg or None,
        "select": select,
        "ignore": ignore,
        "seed": seed,
        "timeout": timeout,
        "group-size": group_size,
        "batch-size": batch_size,
        "method": method,
        "error-rate": error_rate,
        "margin": margin,
        "samples": samples,
        "bound": bound,
        "expected-failures": expect_failure or None,
        "allow-stale-excuses": allow_stale_excuses or None,
    }
    return run(targets or [], given, output or [], diff)


@app.command("list")
@answered
def list_(
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> int:
    """All estimators, named gradients, worlds and checks."""
    from kltest.cli.destinations import say
    from kltest.cli.listing import as_json, as_text

    say((as_json() if json else as_text()).encode("utf-8"))
    return 0


@app.command()
@answered
def explain(
    name: Annotated[str, typer.Argument(metavar="CODE|NAME", help="A check's code, an estimator or a named gradient.")],
    demo: Annotated[
        bool, typer.Option("--demo", help="Run a check's pitfall in the smallest world that shows it: its numbers.")
    ] = False,
) -> int:
    """A check, an estimator or a named gradient in full."""
    from kltest.cli.destinations import say
    from kltest.cli.explain import demonstrate
    from kltest.cli.explain import explain as words

    say((demonstrate(name) if demo else words(name)).encode("utf-8"))
    return 0


@app.command()
@answered
def libraries(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LIBRARY[==VERSION]...",
            help="Which libraries, in which versions (`newest`: whatever the package index has) [default: all]",
            show_default=False,
        ),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="List known settings and what was recorded of them; install nothing.")
    ] = False,
    program: Annotated[
        str | None,
        typer.Option(metavar="LIBRARY:SETTING", help="Print a program that shows a setting's gradient without kltest."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this setting, or those that fit a pattern (`grpo/*`); repeatable."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The longest that a setting may take [default: its own]")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what was measured before.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Say what changed since the recorded results; exit 1 if anything did.")
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Make these the recorded results (in a checkout).")] = False,
    output: Annotated[
        str | None, typer.Option("--output", metavar="DIR", help="Where results go [default: results/libraries]")
    ] = None,
) -> int:
    """Install real libraries, each in an environment of its own, and grade all their settings."""
    from kltest.cli.libraries import Request, listing
    from kltest.cli.libraries import libraries as measure
    from kltest.cli.libraries import program as standalone

    if program is not None:
        return standalone(program)
    if list_only:
        return listing(names or [], setting or [])
    if timeout is not None:
        from kltest.grading.options import GRADE

        timeout = GRADE["timeout"](timeout, "--timeout")
    request = Request(tuple(setting or ()), timeout, again)
    return measure(names or [], request=request, output=output, diff=diff, record=record)


@app.command()
@answered
def finetune(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="tiny, tiny:SIZE (as tiny:1M), a folder, or a hub id [default: tiny]"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="addition[:DIGITS], countdown[:NUMBERS] or jsonl:PATH [default: addition]"),
    ] = None,
    kl: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The KL term: a name of `kltest list`, or none [default: k1 in the reward, unbiased]",
        ),
    ] = None,
    beta: Annotated[float | None, typer.Option(metavar="β", help="Coefficient of the KL term [default: 0.05]")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="How often rollouts are drawn [default: 100]")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Chooses prompts and samples [default: 0]")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings from a .toml or .json file; options win over it.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="DIR", help="Where it is kept [default: results/finetune/KEY]"),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Start anew instead of going on.")] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Instead of training: every estimator's exact gradient at all weights of a transformer whose "
            "completions are all counted (--set vocabulary=8, length=3, device=cuda).",
        ),
    ] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Say all settings and metrics.")] = False,
) -> int:
    """Fine-tune a language model under a KL term and measure what the term does; unbiased unless told otherwise."""
    from kltest.cli.finetune import finetune as train
    from kltest.cli.finetune import listing

    if list_only:
        return listing()
    given = {"model": model, "task": task, "kl": kl, "beta": beta, "steps": steps, "seed": seed}
    if exact:
        from kltest.cli.exact import exact as counted

        given |= {"settings": settings, "again": again or None}
        return counted(given, changes=changes or [], output=output)
    return train(given, changes=changes or [], file=settings, output=output, again=again)


Scale = Annotated[str, typer.Option(metavar="quick|full", help="How much is computed.")]
Folder = Annotated[str | None, typer.Option("--output", metavar="DIR", help="Where results go [default: results]")]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Processes to spread over [default: one a core].")]
Cluster = Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler to use, as tcp://host:8786.")]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")]


@app.command()
@answered
def reproduce(
    scale: Scale = "quick",
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this experiment; repeatable.")] = None,
    workers: Workers = None,
    cluster: Cluster = None,
    retry_failed: Retry = False,
    output: Folder = None,
) -> int:
    """The main job: every experiment, every figure and the paper."""
    from kltest.reproduce import Request, commands

    request = Request(scale=scale, workers=workers, cluster=cluster, retry_failed=retry_failed)
    return commands.reproduce(only=only or [], output=output, request=request)


@app.command()
@answered
def run(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="The name of a folder in experiments/.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE,...", help="Other values for a setting; repeatable."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="How many random repetitions.")] = None,
    scale: Scale = "quick",
    workers: Workers = None,
    cluster: Cluster = None,
    retry_failed: Retry = False,
    output: Folder = None,
) -> int:
    """One experiment; with --set or --seeds, beside the results that the figures and the paper read."""
    from kltest.reproduce import Request, commands

    request = Request(scale, tuple(changes or ()), seeds, workers, cluster, retry_failed)
    return commands.run(experiment, output=output, request=request)


@app.command()
@answered
def figures(output: Folder = None) -> int:
    """Draw every figure from the results that are there."""
    from kltest.reproduce import commands

    return commands.figures(output=output)


@app.command()
@answered
def paper(output: Folder = None) -> int:
    """Typeset the paper from the results that are there."""
    from kltest.reproduce import commands

    return commands.paper(output=output)


def main() -> None:
    """The entry point of the `kltest` command."""
    _open_closed_streams()
    try:
        app()
    except OSError as error:  # --help and --version are written before any command runs
        sys.exit(_failed(error))


def _open_closed_streams() -> None:
    """A stream that the caller closed (`>&-`) leads nowhere; left closed, the next file opened would take its place."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115

"""The program `kltest`: its commands, and how errors become a message and an exit code."""

import contextlib
import errno
import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from kltest.errors import INTERRUPTED, KltestError, UsageError
from kltest.version import VERSION

# The module of each command and its help, in the order of `--help`; the function is `command` or has its name. A
# command's module is imported when the command is called: `kltest --help` imports none.
COMMANDS = {
    "grade": ("grade", "Identify the gradient of a loss and compare it with the claim."),
    "scan": ("scan", "Find every KL term in a source tree and grade it; nothing of the tree is imported."),
    "init": (
        "init",
        "Write the continuous integration of a checkout: workflow, hook, configuration, baseline and test.",
    ),
    "pin": ("pin", "Write one test file, without kltest, that pins the gradients that losses follow today."),
    "same": ("same", "Compare two implementations of a loss: value, gradient and logged numbers."),
    "audit": ("audit", "Measure the gradient that a loss follows on a language model, by sampling."),
    "diagnose": ("diagnose", "Report what logged log-probs show: sampler, engine, reference, masks; no model."),
    "list": ("listing", "List estimators, named gradients, environments, fields and checks."),
    "explain": ("explain", "Describe a check, an estimator or a named gradient."),
    "libraries": ("libraries", "Install real libraries and grade all their settings."),
    "finetune": ("finetune", "Fine-tune a language model under a KL term; unbiased by default."),
    "reproduce": ("reproduce", "Run every experiment and make all figures and the paper (in a checkout)."),
    "run": ("reproduce", "Run one experiment (in a checkout)."),
    "figures": ("reproduce", "Draw every figure from the results (in a checkout)."),
    "paper": ("reproduce", "Typeset the paper from the results (in a checkout)."),
}
EPILOGS = {
    "grade": "Exit code: 0 confirmed, 1 refuted, 2 usage, 3 the loss or kltest crashed, 4 inconclusive, 5 nothing to "
    "grade; of several targets the worst.",
    "scan": "Exit code: 0 no finding, 1 a finding, 2 usage, 4 no term that was found could be graded (with --strict: "
    "not all), 5 no term.",
    "init": "Exit code: 0 written and green, or nothing to write, 1 red, 2 usage, 5 no KL term that can be held.",
    "pin": "Exit code: 0 written and green, 2 usage or a loss that cannot be pinned, 3 a loss failed or the file is "
    "not green; then nothing is written.",
    "same": "Exit code: 0 the same on everything that was tried, 1 they differ, 2 usage, 4 nothing could be decided.",
    "audit": "Exit code: as of grade. Start with: kltest audit k3-loss --model tiny",
    "diagnose": "Exit code: 0 nothing found in what was looked at, 1 a finding, 2 usage, 4 inconclusive (with --strict "
    "also if a question was not looked at), 5 no rollout.",
    "run": "With --set or --seeds its results stand beside those that the figures and the paper read.",
}

# Errors of a full disk, a quota, and a limit on the size of a file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def with_exit_code(command: Callable[..., int | None]) -> Callable[..., NoReturn]:
    """Turn a command's errors into one message on standard error and an exit code."""

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
            code = INTERRUPTED
        except BrokenPipeError:
            # The reader is gone (`kltest list | head`).
            _give_up_standard_output()
            code = 141
        except Exception as error:
            code = _failed(error)
        raise typer.Exit(code)

    return run


def _failed(error: Exception) -> int:
    """Report a full disk and a library that was left out as such, and everything else as a bug of kltest."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        _give_up_standard_output()
        typer.echo(f"kltest: {error.filename or 'standard output'} cannot be written: {error.strerror}", err=True)
        return 3
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing not in ("", "kltest"):
        remedy = f"python -m pip install {missing}"
        typer.echo(f"kltest: this command needs {missing}, which is not installed here; `{remedy}`", err=True)
        return UsageError.exit_code
    from kltest.grading.isolated import describe, note_bug

    typer.echo(f"kltest: {note_bug(describe(error), traceback.format_exc())}", err=True)
    return 3


def _give_up_standard_output() -> None:
    """Redirect standard output to nowhere, so that Python's last flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kltest {VERSION}")
        raise typer.Exit()


def program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Identify the gradient that a KL penalty follows: exactly, over every rollout of a small environment."""


class LoadedWhenCalled(typer.core.TyperCommand):
    """A command that has a name and a help, and imports its module when it is asked for its parameters or run."""

    @functools.cached_property
    def loaded(self) -> Any:
        """The command made of its module."""
        found = vars(import_module(f"kltest.cli.{COMMANDS[str(self.name)][0]}"))
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(self.name)(with_exit_code(found.get("command") or found[str(self.name)]))
        return typer.main.get_command(alone)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; `--fix` may stand without a value, which Typer has no option for."""
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, ["--fix=show" if one == "--fix" else one for one in args[:end]] + args[end:])

    # Setters ignore what Typer read from a function without parameters.
    params = property(lambda self: self.loaded.params, lambda self, value: None)  # type: ignore[assignment]
    callback = property(lambda self: self.loaded.callback, lambda self, value: None)  # type: ignore[assignment]


def _application() -> typer.Typer:
    made = typer.Typer(
        name="kltest",
        callback=program,
        epilog="Start with: kltest grade k3-loss",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, (_, text) in COMMANDS.items():
        made.command(name, cls=LoadedWhenCalled, help=text, epilog=EPILOGS.get(name))(lambda: None)
    return made


app = _application()


def main() -> None:
    """Run the command line; the entry point `kltest`."""
    _open_closed_streams()
    # Torch and the grader are half a million objects and no garbage: looking for it takes a tenth of a short command.
    gc.set_threshold(50_000, 20, 20)
    try:
        app()
    except (OSError, ModuleNotFoundError) as error:  # before a command runs: as it is loaded, or writes its --help
        sys.exit(_failed(error))


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed (`>&-`) on nowhere, before another file takes their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115

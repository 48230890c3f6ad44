"""`kltest pin`: write one test file, without kltest, that pins the gradients that losses follow today."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kltest.cli.parameters import given, take
from kltest.errors import UsageError
from kltest.grading.isolated import terminated_as_interrupted
from kltest.grading.options import OPTIONS

ENVIRONMENT = replace(
    OPTIONS["environment"],
    default=("sequence", "ragged"),
    help="Kinds of small environments: bandit, sequence, ragged.",
)
ARGUMENTS = replace(
    OPTIONS["arguments"], help=OPTIONS["arguments"].help + " With two values of one NAME, a setting each is pinned."
)
TAKEN = [
    ARGUMENTS,
    *(OPTIONS[name] for name in ("placement", "credit")),
    ENVIRONMENT,
    *(OPTIONS[name] for name in ("sampler", "group_size", "batch_size", "timeout")),
]


def command(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="package.module:function, or path/to/file.py:function."),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE.py", help="The test file; name it so that pytest finds it.")
    ] = Path("test_kl_gradient_on_cpu.py"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    **options: Any,
) -> int:
    arguments = options.pop("arguments") or []
    chosen = {"environment": ENVIRONMENT.default, **given(options)}
    _check(output, force=force)

    from kltest.grading.pinning import MOST_SECONDS, pinning_jobs, write_pins

    made = "" if output.parent.exists() else f"; the folder {output.parent} is new"
    jobs = pinning_jobs(targets, chosen, arguments, output.parent)
    with terminated_as_interrupted():
        written = write_pins(jobs, output)
    count = f"{len(written.follows)} pin{'s' * (len(written.follows) > 1)}"
    print(f"{output}: {count}, {written.size:,} bytes, green in {written.seconds:.1f} s{made}")
    for name, words in written.follows.items():
        for line in words:
            print(f"  {name} follows {line}")
    if written.seconds > MOST_SECONDS:
        print(f"kltest: it takes more than {MOST_SECONDS:g} s; pin fewer settings in one file", file=sys.stderr)
    return 0


take(command, TAKEN)


def _check(output: Path, *, force: bool) -> None:
    """Refuse a file that cannot be written, before the work."""
    if output.suffix != ".py":
        raise UsageError(f"--output: {output} is no Python file; give test_NAME.py")
    standing = next(folder for folder in output.absolute().parents if folder.exists())  # what is missing is made in it
    if output.is_dir() or not standing.is_dir() or not os.access(standing, os.W_OK):
        raise UsageError(f"--output: {output} cannot be written")
    if output.exists() and not force:
        raise UsageError(f"{output} exists, and what it pins would be lost; give --force to overwrite it")

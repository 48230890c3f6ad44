"""Options of the table in `kltest.grading.options` as parameters of a command."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from kltest.grading.options import Option, checked


def take(command: Callable[..., int], options: Iterable[Option]) -> None:
    """Give a command these options in place of its `**options`, behind its first parameter."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    first, *rest = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own if each.name != "options"]
    command.__signature__ = inspect.Signature([first, *map(_parameter, options), *rest])  # type: ignore[attr-defined]


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = list[option.kind] if option.repeatable else option.kind  # type: ignore[name-defined]
    optional = kind if kind is bool else kind | None
    written = typer.Option(option.flag, metavar=option.metavar, help=option.explained(option.help))
    default = False if kind is bool else None
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[optional, written]
    )


def reported_as(formats: Sequence[str]) -> Any:
    """Return `--output` for reports in some formats."""
    *others, last = formats
    words = f"{', '.join(others)} or {last}; repeatable [default: text]."
    return typer.Option(metavar="FORMAT[:PATH]", help=words)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that were given, checked; a switch that is off and a list without entries were not."""
    named = {name: None if value is False or value == [] else value for name, value in options.items()}
    return checked(named, lambda option: option.flag or option.name)

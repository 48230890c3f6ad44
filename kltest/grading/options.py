"""Options of a grading: the one place where their names, defaults, forms and help texts are written.

From `Options` are made the command line of `kltest grade`, the settings of `[tool.kltest]`, and the validation and
documentation of the arguments of `kltest.grade`. Importing this module loads neither torch nor numpy.
"""

import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_args

from kltest.estimators.spec import Credit, Placement
from kltest.grading import forms
from kltest.grading.forms import Form
from kltest.report import Level

DEFAULT_TIMEOUT = 60.0
"""Seconds that a target may take on the command line; in Python there is no limit unless one is given."""
SAMPLING = ("error_rate", "margin", "samples", "bound")
"""Options that matter only if something is sampled."""


@dataclass(frozen=True)
class Option:
    """One option of a grading.

    `default` is written as a user would write it. `unset` says what holds if a default of None is left. `flag` and
    `key` name the option on the command line and in `[tool.kltest]` (None: only Python has it). `kind` is the type of
    one value on the command line. With `may_be_none`, None in Python is as if the option had not been given; with
    `may_be_empty`, so is an empty text or list. `in_python` is the help text of a Python argument if it differs.
    """

    default: Any
    form: Form
    help: str
    metavar: str | None = None
    unset: str = ""
    kind: type = str
    repeatable: bool = False
    flag: str | None = ""
    key: str | None = ""
    may_be_none: bool = False
    may_be_empty: bool = False
    in_python: str = ""
    name: str = ""

    @property
    def explained(self) -> str:
        """The help text with the default behind it."""
        return _with_default(self.help, self)

    @property
    def explained_in_python(self) -> str:
        """The same for an argument of `kltest.grade`."""
        return _with_default(self.in_python or self.help, self)

    def left_out(self, value: object) -> bool:
        """True if a Python value is as if the option had not been given."""
        return (self.may_be_none and value is None) or (
            self.may_be_empty and isinstance(value, str | list | tuple | set | frozenset) and not value
        )


def _option(default: Any, form: Form, help: str, metavar: str | None = None, **more: Any) -> Any:
    """A field of Options; a table that is not given is empty, and the claim is parsed."""
    option = Option(default, form, help, metavar, **{"may_be_none": default is None, **more})
    metadata = {"option": option}
    if option.repeatable:
        return field(default_factory=dict, metadata=metadata)
    if form is forms.combination:
        return field(default_factory=lambda: form(default, "default"), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one grading, each in its checked form."""

    expect: Mapping[str, float] = _option(
        "reverse_kl",
        forms.combination,
        "The gradient that is claimed, or a combination: `[c*]NAME[±[c*]NAME]…`.",
        "NAME",
    )
    placement: str | None = _option(
        None,
        forms.choice(*get_args(Placement)),
        "Position of the term.",
        "|".join(get_args(Placement)),
        unset="its own, else loss",
    )
    credit: str | None = _option(
        None,
        forms.choice(*get_args(Credit)),
        "What a token in the reward is credited with.",
        "|".join(get_args(Credit)),
        unset="its own, else return",
    )
    environment: tuple[str, ...] = _option(
        ("bandit", "sequence", "ragged"), forms.environments, "Environments of `kltest list`.", "NAME,…"
    )
    sampler: str | None = _option(
        None,
        forms.choice("current", "stale", "both"),
        "Policy that drew the rollouts.",
        "current|stale|both",
        unset="both if the loss depends on the sampler's log-probs, else current",
    )
    arguments: Mapping[str, Any] = _option(
        None,
        forms.arguments,
        "An argument of the target, repeatable; NAME=@FIELD passes a field of the rollout, NAME.ATTRIBUTE=VALUE "
        "(config.beta=0.1, self.beta=@beta) sets an attribute of an object.",
        "NAME=VALUE",
        in_python='Arguments of the loss by name; "@FIELD" passes a field of the rollout; a dotted name '
        '("config.beta") sets an attribute of an object.',
        repeatable=True,
        flag="--arg",
        key="arg",
    )
    beta: float | None = _option(
        None, forms.coefficient, "Coefficient of the KL part, passed to the loss.", unset="1", flag=None, key=None
    )
    select: tuple[str, ...] = _option(
        (), forms.codes, "Only these checks: codes or prefixes.", "CODE,…", may_be_none=True, may_be_empty=True
    )
    ignore: tuple[str, ...] = _option(
        (), forms.codes, "All checks but these: codes or prefixes.", "CODE,…", may_be_none=True, may_be_empty=True
    )
    seed: int = _option(0, forms.whole(0), "Seed of the environments and of padding.", "N", kind=int)
    timeout: float | None = _option(
        None,
        forms.seconds,
        "Seconds that a target may take.",
        "SECONDS",
        kind=float,
        unset=f"{DEFAULT_TIMEOUT:g} on the command line, none in Python",
    )
    group_size: int | None = _option(
        None, forms.whole(2), "Rollouts of one prompt in a group.", "N", kind=int, unset="4"
    )
    batch_size: int | None = _option(
        None,
        forms.whole(2),
        "Rollouts in a batch, if the loss couples them.",
        "N",
        kind=int,
        unset="as many as can be enumerated",
    )
    method: str = _option(
        "exact",
        forms.choice("exact", "sampled"),
        "Enumerate all rollouts, or sample until the verdict is clear; what cannot be enumerated is always sampled.",
        "exact|sampled",
    )
    error_rate: float = _option(
        1e-6, forms.positive(below=1.0), "Highest probability of a wrong sampled verdict.", "RATE", kind=float
    )
    margin: float = _option(
        0.05, forms.positive(), "Largest relative bias that a sampled verdict accepts.", "SHARE", kind=float
    )
    samples: int | None = _option(
        None,
        forms.whole(1),
        "Most batches sampled in an instance.",
        "N",
        kind=int,
        unset="200000, or 10000 if each needs a call of its own",
    )
    bound: float | None = _option(
        None,
        forms.positive(),
        "A known bound on the norm of a batch's gradient; without it a sampled verdict is asymptotic.",
        "NORM",
        kind=float,
    )
    strict: bool = _option(False, forms.switch, "Make errors of all warnings.", kind=bool)
    levels: Mapping[str, Level] = _option(
        None, forms.levels, 'Levels of single checks by their codes, "error" or "warning".', repeatable=True, flag=None
    )
    expected_failures: Mapping[str, str] = _option(
        None,
        forms.expected_failures,
        "A check that is expected to fail, and why, repeatable: its failure does not refute, but its pass does.",
        "CODE=REASON",
        in_python="Reasons by code of checks that are expected to fail: a failure does not refute, but a pass does.",
        repeatable=True,
        flag="--expect-failure",
    )
    allow_unexpected_passes: bool = _option(
        False, forms.switch, "Do not refute a loss if a check passes that is expected to fail.", kind=bool
    )
    name: str | None = _option(
        None, forms.title, "The name of the loss in the report.", unset="the name of the function", flag=None, key=None
    )

    @property
    def call(self) -> Any:
        """The `kltest.loss.outcome.Call` that these options ask for."""
        from kltest.loss.outcome import Call  # imports torch

        return Call(self.placement, self.credit, self.beta, self.arguments)  # type: ignore[arg-type]

    @classmethod
    def of(cls, **given: Any) -> "Options":
        """Options from Python values. Raises UsageError for the first that is wrong."""
        kept = {name: value for name, value in renamed(given).items() if not OPTIONS[name].left_out(value)}
        return cls(**{name: OPTIONS[name].form(value, name) for name, value in kept.items()})


def without_effect(options: Options, placement: str, *, sampled: bool) -> Iterator[str]:
    """Yield sentences on options that were given and changed nothing in a grading."""
    given = [] if sampled else [name for name in SAMPLING if getattr(options, name) != OPTIONS[name].default]
    if given:
        flags = " and ".join(str(OPTIONS[name].flag) for name in given)
        yield f"{flags} had no effect: nothing was sampled. Ask for --method sampled"
    if options.credit and placement == "loss":
        yield "--credit had no effect: only a term in the reward is credited. Ask for --placement reward"


def _named() -> Iterator[Option]:
    for each in fields(Options):
        option: Option = each.metadata["option"]
        dashed = each.name.replace("_", "-")
        flag = f"--{dashed}" if option.flag == "" else option.flag
        yield replace(option, name=each.name, flag=flag, key=dashed if option.key == "" else option.key)


OPTIONS = {option.name: option for option in _named()}
"""All options by their names in Python."""
KEYS = {option.key: option for option in OPTIONS.values() if option.key}
"""The options that may stand in `[tool.kltest]`, for all targets or for one, by their names there."""
RENAMED = {"allow_stale_excuses": "allow_unexpected_passes"}
"""Old names, read for one release."""


def renamed(given: Mapping[str, Any], stacklevel: int = 4) -> dict[str, Any]:
    """Python arguments under their present names, with a DeprecationWarning for each old one that is set."""
    found = dict(given)
    for old, new in RENAMED.items():
        if old in found and OPTIONS[new].form(found.pop(old), old):
            warnings.warn(f"{old} is deprecated; write {new}", DeprecationWarning, stacklevel=stacklevel)
            found[new] = True
    return found


def checked(given: Mapping[str, object], place: Callable[[Option], str]) -> dict[str, Any]:
    """Those options that were given (not None), checked; `place` names an option's place in messages."""
    return {name: OPTIONS[name].form(value, place(OPTIONS[name])) for name, value in given.items() if value is not None}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Checked options, a later layer winning; expected failures and levels add up by code."""
    found: dict[str, Any] = {}
    for layer in layers:
        by_code = {name: {**found.get(name, {}), **layer.get(name, {})} for name in ("expected_failures", "levels")}
        found |= {**layer, **{name: table for name, table in by_code.items() if table}}
    return found


Function = TypeVar("Function", bound=Callable[..., Any])


def documented(function: Function) -> Function:
    """Write the options into the function's docstring in place of `{options}`."""
    wrap = textwrap.TextWrapper(108, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    lines = (wrap.fill(f"{option.name}: {option.explained_in_python}") for option in OPTIONS.values())
    function.__doc__ = (function.__doc__ or "").replace("        {options}", "\n".join(lines))
    return function


def _with_default(help: str, option: Option) -> str:
    default = option.unset
    if not default and option.default not in (None, ()) and option.default is not False:
        default = ",".join(option.default) if isinstance(option.default, tuple) else str(option.default)
    return f"{help.rstrip('.')} [default: {default.replace('e-0', 'e-')}]." if default else help

"""Options of a grading: the one place where their names, defaults, forms and help texts are written.

From `Options` are made the command line of `kltest grade`, the settings of `[tool.kltest]`, and the validation and
documentation of the arguments of `kltest.grade`. Importing this module loads neither torch nor numpy.
"""

import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    one value on the command line. `in_python` is the help text of a Python argument if it differs.
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
    in_python: str = ""
    name: str = ""

    def explained(self, help: str) -> str:
        """Return a help text with the default behind it."""
        default = self.unset
        if not default and self.default not in (None, ()) and self.default is not False:
            default = ",".join(self.default) if isinstance(self.default, tuple) else str(self.default)
        return f"{help.rstrip('.')} [default: {default.replace('e-0', 'e-')}]." if default else help

    def left_out(self, value: object) -> bool:
        """True if a Python value is as if the option had not been given: None, or nothing where all is the default."""
        if value is None:
            return self.default in (None, ())
        return self.default == () and isinstance(value, str | list | tuple | set | frozenset) and not value


def _option(default: Any, form: Form, help: str, metavar: str | None = None, **more: Any) -> Any:
    """A field of Options; a table that is not given is empty, and the claim is parsed."""
    option = Option(default, form, help, metavar, **more)
    metadata = {"option": option}
    if option.repeatable:
        return field(default_factory=dict, metadata=metadata)
    if form is forms.combination:
        return field(default_factory=lambda: form(default, "default"), metadata=metadata)
    return field(default=default, metadata=metadata)


def _choice(default: str | None, names: Sequence[str], help: str, unset: str = "") -> Any:
    return _option(default, forms.choice(*names), help, "|".join(names), unset=unset)


def _codes(help: str) -> Any:
    return _option((), forms.codes, help, "CODE,…")


def _switch(help: str) -> Any:
    return _option(False, forms.switch, help, kind=bool)


def _number(default: float | None, form: Form, help: str, metavar: str = "N", kind: type = int, unset: str = "") -> Any:
    return _option(default, form, help, metavar, kind=kind, unset=unset)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one grading, each in its checked form."""

    expect: Mapping[str, float] = _option(
        "reverse_kl",
        forms.combination,
        "The gradient that is claimed, or a combination: `[c*]NAME[±[c*]NAME]…`.",
        "NAME",
    )
    placement: str | None = _choice(None, get_args(Placement), "Position of the term.", unset="its own, else loss")
    credit: str | None = _choice(
        None, get_args(Credit), "What a token in the reward is credited with.", unset="its own, else return"
    )
    environment: tuple[str, ...] = _option(
        ("bandit", "sequence", "ragged"), forms.environments, "Environments of `kltest list`.", "NAME,…"
    )
    sampler: str | None = _option(
        None,
        forms.sampler,
        "Policy that drew the rollouts; engine, truncated and versions are samplers of which `old_logp` knows nothing, "
        "and `rollout_logp` what the engine tells.",
        "current|stale|both|engine|truncated:p=P,k=K|versions",
        unset="both if the loss depends on the sampler's log-probs, else current",
    )
    part: str = _choice(
        "kl",
        ("kl", "policy", "all"),
        "The KL part of the loss, its policy part (the rest), or all of it. The last two are graded by the direction "
        "in which they ascend, claim `expected_reward` (and less `reverse_kl` for all of it) unless --expect says "
        "otherwise, and are held to the checks KL9xx alone.",
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
    select: tuple[str, ...] = _codes("Only these checks: codes or prefixes.")
    ignore: tuple[str, ...] = _codes("All checks but these: codes or prefixes.")
    seed: int = _number(0, forms.whole(0), "Seed of the environments and of padding.")
    timeout: float | None = _number(
        None,
        forms.seconds,
        "Seconds that a target may take.",
        "SECONDS",
        float,
        unset=f"{DEFAULT_TIMEOUT:g} on the command line, none in Python",
    )
    group_size: int | None = _number(None, forms.whole(2), "Rollouts of one prompt in a group.", unset="4")
    batch_size: int | None = _number(
        None, forms.whole(2), "Rollouts in a batch, if the loss couples them.", unset="as many as can be enumerated"
    )
    method: str = _choice(
        "exact",
        ("exact", "sampled"),
        "Enumerate all rollouts, or sample until the verdict is clear; what cannot be enumerated is always sampled.",
    )
    error_rate: float = _number(
        1e-6, forms.positive(below=1.0), "Highest probability of a wrong sampled verdict.", "RATE", float
    )
    margin: float = _number(
        0.05, forms.positive(), "Largest relative bias that a sampled verdict accepts.", "SHARE", float
    )
    samples: int | None = _number(
        None,
        forms.whole(1),
        "Most batches sampled in an instance.",
        unset="200000, or 10000 if each needs a call of its own",
    )
    bound: float | None = _number(
        None,
        forms.positive(),
        "A known bound on the norm of a batch's gradient; without it a sampled verdict is asymptotic.",
        "NORM",
        float,
    )
    strict: bool = _switch("Make errors of all warnings.")
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
    allow_unexpected_passes: bool = _switch("Do not refute a loss if a check passes that is expected to fail.")
    name: str | None = _option(
        None, forms.title, "The name of the loss in the report.", unset="the name of the function", flag=None, key=None
    )

    def __post_init__(self) -> None:
        """Set what is claimed of a part whose claim was not given."""
        if self.expect == OF_KL and self.part in CLAIMS:
            object.__setattr__(self, "expect", CLAIMS[self.part])

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


OF_KL = {"reverse_kl": 1.0}
CLAIMS = {"policy": {"expected_reward": 1.0}, "all": {"reverse_kl": -1.0, "expected_reward": 1.0}}
"""What a part of a loss claims to ascend, unless `--expect` says otherwise."""

Function = TypeVar("Function", bound=Callable[..., Any])


def documented(function: Function) -> Function:
    """Write the options into the function's docstring in place of `{options}`."""
    wrap = textwrap.TextWrapper(104, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    lines = (
        wrap.fill(f"{option.name}: {option.explained(option.in_python or option.help)}") for option in OPTIONS.values()
    )
    # The margin of a docstring is part of it before Python 3.13, and no longer since.
    function.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("    {options}", "\n".join(lines))
    return function

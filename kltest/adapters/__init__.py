"""Adapters to real libraries: their KL terms, whole losses and trainers, graded through their own code.

A library is a file or a folder: its settings as data (`ADAPTER`), the calls of its functions that they need (if long in
`calls`), and `recipes`, code or settings that follow the true gradient. No code of a library is copied, and no library
is imported before it is used.

An adapter is plain data, so that it can be listed without torch and without the library. A setting is a target of
`kltest grade` with its arguments and options: a function of the library itself, or one of the adapter that calls the
library's own loss or trainer. Parameters are filled from the rollout as those of any loss.
"""

import re
import runpy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from kltest.errors import UsageError, did_you_mean
from kltest.version import version_of

NAMES = (
    *("trl", "verl", "openrlhf", "liger", "torchrl", "tunix", "unsloth-zoo", "slime", "nemo-rl", "torchtune"),
    *("skyrl", "roll", "easyr1", "prime-rl", "areal", "tinker-cookbook"),
)


Depth = Literal["function", "loss", "trainer"]
DEPTHS: dict[Depth, str] = {
    "function": "its KL function alone",
    "loss": "its whole loss, from log-probs",
    "trainer": "its trainer, forward pass included",
}
# Options for losses of whole groups: every group is called, some several times; groups of two keep that to seconds.
PAIRS = {"group_size": 2, "timeout": 300}
# Of a call that makes advantages of rewards as it is.
SCORES: tuple[str, Mapping[str, Any]] = ("", {})
# From four rollouts on a group's standard deviation moves with the success rate.
WHOLE_GROUP = 4
# For those that take log-probs of the sampler.
STEP = {"sampler": "both", **PAIRS}
# For those that divide parts of a batch by the tokens of the whole step.
STEP_OF_TOKENS = {**STEP, "ignore": "KL206"}


@dataclass(frozen=True)
class Setting:
    """One way to run a library's KL term.

    Args:
        name: unique in its adapter and no Python identifier (`kl_penalty/k3`, `grpo/loss_type=dapo`), so that
            `LIBRARY:NAME` is never mistaken for `module:function`.
        target: what `kltest grade` grades, `module:function`.
        arguments: values of the target's parameters.
        options: further options of `kltest.grade` (expect, placement, credit, sampler, environment, group_size, …).
        depth: how much of the library is called.
        default: the library's documentation says that this happens once its KL term is switched on and nothing else
            is set.
        coefficient: what says if the term is on if nothing at all is set, and how much: `module:Class.field`,
            `module:function(parameter)` or, of a command line, `module:--option`; words without a colon are shown.
        recipe: kltest proposes this in place of the default.
        source: link to what the library says of it.
        note: one neutral sentence on what had to be assumed.
        since: the first release that has what the setting is about; older ones are not graded in it.
        brought: the releases that brought arguments, or values of them; `variant` reads `since` from it.
        policy: target, "" for its own, and further arguments with which the library makes advantages of rewards itself,
            for the policy part; None if it is only called with advantages that are given to it.
        ascends: the registered policy loss whose advantages its policy part has, "" if none is registered; None if the
            scoreboard has no row of that part.
    """

    name: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    depth: Depth = "function"
    default: bool = False
    recipe: bool = False
    source: str = ""
    note: str = ""
    since: str = ""
    coefficient: str = ""
    brought: Mapping[str, str] = field(default_factory=dict)
    policy: tuple[str, Mapping[str, Any]] | None = None
    ascends: str | None = None

    @classmethod
    def of(
        cls, what: str | Callable[..., Any], arguments: Mapping[str, Any] = MappingProxyType({}), **others: Any
    ) -> Self:
        """Return the setting of a function, called as it is.

        Args:
            what: `module:function` of a KL function of the library, or a function of the adapter that calls a loss.
            arguments: values of its parameters.
            others: other fields, such as another name.
        """
        target = what if isinstance(what, str) else f"{what.__module__}:{what.__name__}"
        usual = {"name": target.rpartition(":")[2], "depth": "function" if isinstance(what, str) else "loss"}
        return cls(**{**usual, "target": target, "arguments": arguments, **others})

    def by_default(self, coefficient: str, arguments: Mapping[str, Any] = MappingProxyType({}), **others: Any) -> Self:
        """Return the variant that is the documented default, "defaults" if it has no arguments and no other name."""
        name = others.pop("name", "" if arguments else "defaults")
        return self.variant(arguments, name, default=True, coefficient=coefficient, **others)

    def variant(self, arguments: Mapping[str, Any] = MappingProxyType({}), name: str = "", **others: Any) -> Self:
        """Return a setting of the same target, called `self.name/name`.

        Args:
            arguments: further arguments.
            name: what tells it from the others, the arguments if empty.
            others: other fields; options are added to those of this setting.
        """
        brought = [self.brought[str(word)] for pair in arguments.items() for word in pair if str(word) in self.brought]
        others.setdefault("since", max([self.since, *brought], key=numbers))
        others["options"] = {**self.options, **others.get("options", {})}
        arguments, name = {**self.arguments, **arguments}, f"{self.name}/{name or label(**arguments)}"
        return replace(self, name=name, arguments=arguments, **others)

    def options_with(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `kltest.grade` for this setting, arguments included; `others` win over its own."""
        arguments = {**self.arguments, **(others.get("arguments") or {})}
        return {**self.options, **others, **({"arguments": arguments} if arguments else {})}

    def has_row(self, part: str) -> bool:
        """Return True if the scoreboard has a row of this part of the loss, "kl" or "policy"."""
        return part == "kl" or self.ascends is not None

    def for_part(self, part: str) -> Self:
        """Return the setting by which a part of the loss is graded; UsageError if its policy part cannot be."""
        if part == "kl":
            return self
        if self.policy is None:
            raise UsageError(
                f"setting {self.name}: kltest calls it with advantages that kltest makes, the reward less its mean, so "
                f"that nothing would be seen of what the library makes of rewards; --part {part} needs a call that "
                "scores whole groups, which this adapter does not have for it. --part kl grades its KL term"
            )
        target, arguments = self.policy
        options = {**self.options, "group_size": WHOLE_GROUP}
        return replace(self, target=target or self.target, arguments={**self.arguments, **arguments}, options=options)


def numbers(version: str) -> list[int]:
    """Return the numbers of a release, by which releases are ordered; [] for ""."""
    return [int(part) for part in re.findall(r"\d+", version)]


def before(version: str, other: str) -> bool:
    """Return True if a release comes before another one."""
    return numbers(version) < numbers(other)


def label(*words: str, **settings: object) -> str:
    """Return the words and settings as a part of a setting's name: `dapo,beta=0.1`."""
    return ",".join([*words, *(f"{name}={value}" for name, value in settings.items())])


@dataclass(frozen=True)
class Adapter:
    """A library and its settings.

    Args:
        name: what the command line calls the library.
        distribution: its name on the package index, or what it would be there.
        version: the version that the settings were tried with.
        installs: calls of `pip install`, in order; `{version}` is replaced by the version to install.
        module: module that must be importable before anything can be graded.
        homepage: link.
        settings: the known settings, documented defaults first.
        since: the oldest release that the adapter covers.
        history: settings that are measured in each release, beside the defaults; they need not be among `settings`.
        changed: for releases that changed a gradient what they say of it, and the link to that; newest first.
        loads: imports the library as its settings do, if `module` cannot be imported plainly.
        imports: modules that most settings need and that take long to import. They are imported once, before the
            processes that grade settings are forked; so no JAX, whose threads do not survive a fork.
        repository: address that git clones the library from, if no package index has it. Its version is a commit then.
        folder: folder of the repository that holds its package.
        python: the version of Python whose wheels are installed; "" for the running one. For a library of Python files
            alone whose wheels are each marked as made for one version.
        standalone: returns a program that shows a setting's gradient with the library and torch (or JAX) alone, or ""
            if there is none; with `batch=2`, in pairs of rollouts. Its last line of output is the gradient with respect
            to logits, (C, V), expected in the environment of `kltest.adapters.standalone`.
    """

    name: str
    distribution: str
    version: str
    installs: tuple[tuple[str, ...], ...]
    module: str
    homepage: str
    settings: tuple[Setting, ...]
    since: str = ""
    history: tuple[Setting, ...] = ()
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    loads: Callable[[], object] | None = None
    imports: tuple[str, ...] = ()
    repository: str = ""
    folder: str = "."
    python: str = ""
    standalone: Callable[..., str] | None = None

    @classmethod
    def cloned(cls, name: str, home: str, commit: str, *loads: Any, **others: Any) -> Self:
        """Return the adapter to a library that no package index has.

        Args:
            name: what the command line calls the library, of which its distribution's name is made.
            home: address of the repository.
            commit: the commit that the settings were tried with.
            loads: arguments of `installed.loaded` that bring the library in.
            others: further fields of the adapter, `module` among them.
        """
        from kltest.adapters.installed import found, loaded
        from kltest.adapters.standalone import program

        usual: dict[str, Any] = {"distribution": name.replace("-", "_"), "installs": (), "homepage": home}
        usual |= {"loads": partial(loaded, *loads), "standalone": partial(program, find=found)}
        return cls(name=name, version=commit, repository=home, **{**usual, **others})

    @property
    def known(self) -> dict[str, Setting]:
        """The settings, and those of the history, by name."""
        return {setting.name: setting for setting in (*self.history, *self.settings)}

    def setting(self, name: str) -> Setting:
        """Return the known setting of that name; UsageError if there is none."""
        if name not in self.known:
            raise UsageError(
                f"{self.name} has no setting {name!r}; {did_you_mean(name, self.known)}"
                f"`kltest libraries --list {self.name}` shows its {len(self.settings)}"
            )
        return self.known[name]

    def load(self) -> None:
        """Import the library; any exception is its own."""
        if self.loads:
            self.loads()
        else:
            import_module(self.module)


def find(name: str) -> Adapter:
    """Return the adapter of that name, or the `ADAPTER` of a Python file.

    Raises:
        UsageError: there is no such adapter, or the file holds none.
    """
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in NAMES:
        raise UsageError(
            f"there is no adapter to {name!r}; {did_you_mean(name, NAMES)}there are {', '.join(NAMES)}, "
            "and a file of your own may hold one: path/to/file.py"
        )
    return import_module(f"kltest.adapters.{name.replace('-', '_')}").ADAPTER


def _from_file(path: Path) -> Adapter:
    if not path.is_file():
        raise UsageError(f"{path} does not exist; an adapter of your own is a Python file with an ADAPTER")
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise UsageError(f"{path} cannot be run: {type(error).__name__}: {error}") from None
    if "ADAPTER" not in names and "DOOR" in names:
        warnings.warn(f"{path}: DOOR is now called ADAPTER", DeprecationWarning, stacklevel=3)
    found = names.get("ADAPTER", names.get("DOOR"))
    if not isinstance(found, Adapter):
        raise UsageError(f"{path} has no ADAPTER of the kind kltest.adapters.Adapter")
    return found


def __getattr__(name: str) -> Any:
    if name != "Door":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("kltest.adapters.Door is now called Adapter", DeprecationWarning, stacklevel=2)
    return _door


def _door(*, reproduction: Any = None, **fields: Any) -> Adapter:
    """An adapter from its former arguments, for one release."""
    return Adapter(standalone=reproduction, **fields)


def installed_settings(library: Adapter, *, history: bool = False) -> tuple[Setting, ...]:
    """Return the settings that the installed version of a library has, known ones first.

    A release that lacks a setting of today has those of the history as well.

    Args:
        library: its adapter.
        history: only defaults and the settings of the history.

    Raises:
        UsageError: the library is not installed.
    """
    _check_installed(library)
    installed = version_of(library.distribution) or library.version
    wanted = [each for each in library.settings if each.default or not history]
    lacks = any(before(installed, each.since) for each in wanted)
    there = [*(library.history if history or lacks else ()), *wanted]
    return tuple({each.name: each for each in there if not before(installed, each.since)}.values())


def _check_installed(library: Adapter) -> None:
    if find_spec(library.module.partition(".")[0]) is None:
        calls = [f"pip install {' '.join(call)}" for call in library.installs]
        calls += [f"git clone {library.repository}, its folder in PYTHONPATH"] if library.repository else []
        pip = " && ".join(calls).format(version=library.version)
        raise UsageError(
            f"{library.name} is not installed here. `kltest libraries {library.name}` grades it in an environment of "
            f"its own; for this one: {pip}"
        )


def split(target: str) -> tuple[str, str | None]:
    """Return the name of a library, or the file of its adapter, and what stands behind a colon, None without one."""
    file, extension, rest = target.strip().partition(".py:")
    name, colon, wanted = (f"{file}.py", ":", rest) if extension else target.strip().partition(":")
    return name, wanted if colon else None


def named(text: str, *, to_grade: bool = False) -> list[tuple[str, Setting]]:
    """Return the settings that a target names: all of a library (`verl`), one (`verl:NAME`), or none.

    Raises:
        UsageError: the library does not have the setting, or is not installed and is named `to_grade`.
    """
    name, wanted = split(text)
    own = name.endswith(".py") and wanted and not wanted.startswith(":")
    if not (own or name in NAMES) or (wanted and all(part.isidentifier() for part in wanted.split("."))):
        return []
    library = find(name)
    if wanted is None:
        return [(f"{name}:{setting.name}", setting) for setting in installed_settings(library)]
    setting = library.setting(wanted)
    if to_grade:
        _check_installed(library)
    return [(f"{name}:{wanted}", setting)]

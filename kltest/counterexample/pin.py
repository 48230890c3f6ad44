"""Test files that pin the gradients that losses follow today: plain torch, without kltest."""

import ast
import builtins
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kltest.counterexample.declared import WEIGHTS, WHOLE, summed
from kltest.counterexample.environment import SmallEnvironment, adds_up, measure
from kltest.counterexample.expectation import ROWS, Expectation
from kltest.counterexample.program import TABLES, executed
from kltest.counterexample.shrink import unrelated
from kltest.counterexample.sources import NoSourceError, imported
from kltest.errors import TargetError
from kltest.files import template
from kltest.identify.findings import Findings
from kltest.loss.frames import describe
from kltest.moments.tolerances import TOLERANCES
from kltest.truth import ATLAS
from kltest.version import VERSION

TEMPLATE = Path(__file__).parent / "templates" / "pin.py.j2"
# Tokens and actions, the largest first, by the name that grading has for environments of that kind.
SIZES = {
    "bandit": ((1, 4), (1, 3), (1, 2)),
    "sequence": ((3, 2), (2, 3), (2, 2)),
    "ragged": ((2, 3), (2, 2)),
}
# Where tokens are almost impossible for one of the two: log-ratios of 3, 8, 13 and 24, beyond what losses clamp.
_RARE, _RARER = (1e-11, 1e-6, 0.999999), (1e-4, 0.5, 0.4999)
FAR = {
    "far": SmallEnvironment(
        policy=((0.25, 0.25, 0.5), _RARE, _RARER, (0.02, 0.49, 0.49)),
        reference=(_RARE, (0.25, 0.25, 0.5), (0.5, 1e-4, 0.4999), (0.49, 0.02, 0.49)),
        sampler=((0.5, 0.25, 0.25), _RARE, (1e-4, 0.25, 0.7499), (0.02, 0.49, 0.49)),
        length=2,
        reward=((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)),
    ),
    "far 1x3": SmallEnvironment(
        policy=((1e-6, 0.5, 0.499999),),
        reference=((0.5, 1e-11, 0.5),),
        sampler=((1e-6, 0.25, 0.749999),),
        reward=((1, 0, 0),),
    ),
}
# Relative difference between gradients that are equal; a constant of 1e-6 in a denominator makes less.
TOLERANCE = 1e-5
# Batches to enumerate in one environment: a tenth of a millisecond to a millisecond each.
MOST_BATCHES = 256
STALE = ", stale"
# Gradients that a file knows by name, in the order of preference. What the atlas says of some has more words than a
# failing test needs.
NAMES = {
    "reverse_kl": "the reverse KL, its whole gradient",
    "local_reverse_kl": "the next-token part of the reverse KL",
    "local_forward_kl": "the forward KL of each next token",
    "forward_kl": "the forward KL of whole rollouts",
    **dict.fromkeys(("zero", "squared_log_ratio", "squared_log_ratio_sum", "local_squared_log_ratio"), ""),
    **dict.fromkeys(("local_chi_square", "local_total_variation"), ""),
    "entropy": "the entropy of whole rollouts",
    "local_entropy": "the entropy of each next token",
    "expected_reward": "",
}
SUFFIXES = {"/T": ", times 1/T"}
STALE_SUFFIXES = {
    "@sampler": ", prefixes of the sampler, tokens weighed by their ratios",
    "@rollouts": ", on rollouts of the sampler, without a ratio",
    "@sampler/T": ", prefixes of the sampler, tokens weighed by their ratios, times 1/T",
    "@rollouts/T": ", on rollouts of the sampler, without a ratio, times 1/T",
}
FORMS = {"scalar": 0, "rows": 1, "tokens": 2}
TENSORS = frozenset({*TABLES, "u", "p", "q"} - {"torch"})
# Names that a file uses itself.
_OWN = (
    "torch call beta importlib json sys combinations product nullcontext load rollouts of_form derivative names named "
    "expected size combination followed measured in_words where check pinned ast builtins suppress bound Lifted"
)
TAKEN = frozenset((*dir(builtins), *TENSORS, *ROWS, *_OWN.split()))
PICKS = ("", "[0]", ".loss", "['loss']")


def quoted(value: Any) -> str:
    """Return texts, numbers, lists and tables of them as Python with double quotes."""
    return json.dumps(value, ensure_ascii=False)


class NotPinnedError(Exception):
    """Raised for a loss that no such file can pin; the message says why, as half a sentence."""


@dataclass(frozen=True)
class Pin:
    """The gradient that one setting of a loss follows, and the lines that compute it.

    Attributes:
        name: What messages call the setting.
        line: The import of the loss.
        call: The lambda that calls it, without its keyword.
        expected: The sum over all batches whose gradient is the expected gradient.
        environments: The small environments by their names in the file.
        tolerance: Relative difference below which gradients are equal.
        follows: What it follows in each environment, as the file states it.
    """

    name: str
    line: str
    call: str
    expected: str
    environments: Mapping[str, SmallEnvironment]
    tolerance: float
    follows: Mapping[str, Any] = field(default_factory=dict)

    @property
    def short(self) -> str:
        """Its name without folders."""
        target, _, arguments = self.name.partition(" ")
        return f"{target.rpartition('/')[2]} {arguments}".strip()

    @property
    def names(self) -> str:
        """The tensors that it reads."""
        return _names(f"(lambda {self.call}), {self.expected}")

    @property
    def words(self) -> list[str]:
        """The gradient that it follows, a text for all environments in which that is the same."""
        places: dict[str, list[str]] = {}
        for environment, what in self.follows.items():
            places.setdefault(in_words(what), []).append(environment)
        if len(places) == 1:
            return list(places)
        return [f"{what} ({'; '.join(where)})" for what, where in places.items()]


def in_words(what: Any) -> str:
    """Return what PINS states in words."""
    if not isinstance(what, dict):
        return "a gradient without a name"
    terms = (name if factor == 1 else f"{factor:.6g} × {name}" for name, factor in what.items())
    return " + ".join(terms).replace("+ -", "- ")


def pin(findings: Findings, name: str, target: str, folder: Path) -> Pin:
    """Return the pin of a loss whose rows were measured, for a file in a folder.

    Args:
        findings: What grading measured.
        name: What messages call the setting.
        target: The loss as the user named it.
        folder: Where the file will lie; a loss in a file is looked up from there.

    Raises:
        NotPinnedError: The loss draws random numbers, couples too many rows, or no plain call of it gives the same.
    """
    loss, observed = findings.loss, findings.observed
    if observed.draws or observed.nondeterministic or observed.unrepeatable:
        raise NotPinnedError("the same batch gives different gradients: it draws random numbers or keeps state (KL507)")
    batch = max((row.batch for row in findings.rows), default=1) if observed.coupled else 1
    environments = dict(_environments(findings.environments, batch))
    far = next((name for name, one in FAR.items() if _is_short(one, batch)), "")
    environments |= {far: FAR[far]} if far else {}
    samplers = {"": "current", STALE: "stale"}
    places = [
        (f"{each}{suffix}", one, sampler)
        for suffix, sampler in samplers.items()
        if sampler in findings.samplers
        for each, one in environments.items()
    ]
    adds = adds_up(loss, places[0][1], places[0][2], batch)
    gradients: dict[str, np.ndarray] = {}
    overflows = False
    for place, one, sampler in places:
        try:
            gradients[place], _, called = measure(loss, one.instance(), sampler, batch, summed=adds)
        except TargetError:
            if one is not FAR.get(far):
                raise
            overflows = True
    if overflows:
        del environments[far]
        gradients = {place: gradient for place, gradient in gradients.items() if not place.startswith(far)}
    form, tolerance = FORMS[called.outcome.returned], max(TOLERANCE, TOLERANCES[called.dtype].gradient)
    problem = "it gives another gradient"
    try:
        source = imported(loss.function, target, folder, TAKEN)
        expectation = Expectation(
            loss,
            source.name,
            batch,
            called.outcome.returned,
            adds,
            named=True,
            masked=True,
            moved=True,
            rewarded=True,
        )
        for pick in PICKS:
            lines = expectation.text(pick, "", lambda call: f"of_form({form}, {call})")
            written = Pin(name, source.lines[0], *lines, environments, tolerance)
            try:
                found, follows = _run(written, list(gradients), folder)
            except Exception as error:
                problem = f"it fails: {describe(error)}"
                continue
            if all(_near(found[each], gradient, tolerance) for each, gradient in gradients.items()):
                return replace(written, follows=follows)
    except NoSourceError as reason:
        why = next(
            (note.partition("importing the file failed: ")[2] for note in loss.notes if "was lifted" in note), ""
        )
        raise NotPinnedError(f"{reason}{why and f' ({why.splitlines()[0]})'}") from None
    raise NotPinnedError(f"a plain call of it cannot be written down: {problem}")


def _environments(names: Collection[str], batch: int) -> Iterator[tuple[str, SmallEnvironment]]:
    """Yield the largest small environment of each kind in which all batches can be enumerated."""
    for name in names:
        if name not in SIZES:
            raise NotPinnedError(f"the environment {name} has no small form; take {', '.join(SIZES)}")
        for number, (length, actions) in enumerate(SIZES[name]):
            one = unrelated(length, actions, ends=name == "ragged", moved=True, rewarded=True)
            if _is_short(one, batch):
                yield f"{name} {length}x{actions}" if number else name, one
                break
        else:
            raise NotPinnedError(
                f"it couples rows and needs batches of {batch}, more of them than a short test can enumerate"
            )


def _is_short(environment: SmallEnvironment, batch: int) -> bool:
    return len(environment.instance().paths) ** batch <= MOST_BATCHES


def _run(pin: Pin, places: Sequence[str], folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Run a file without pins here: the gradient in each environment, and what it follows there."""
    lines = f"found = measured({pin.name!r}, {places!r})\nfollows = followed(found, {pin.tolerance})\n"
    names = executed(file_of([pin]) + lines, {"__file__": str(folder / "pinned.py"), "__name__": "pinned"})
    return {place: gradient.detach().numpy() for place, gradient in names["found"].items()}, names["follows"]


def _near(found: np.ndarray, gradient: np.ndarray, tolerance: float) -> bool:
    return bool(np.linalg.norm(found - gradient) <= tolerance * max(float(np.linalg.norm(gradient)), 1e-3))


def file_of(pins: Sequence[Pin]) -> str:
    """Return the test file of some pins."""
    stale = any(STALE in place for one in pins for place in one.follows) or not all(one.follows for one in pins)
    rewarded = any("reward" in one.names.split(", ") for one in pins)
    left_out = {table for table, needed in (("sampler", stale), ("reward", rewarded)) if not needed}
    known = [name for name in NAMES if rewarded or name != "expected_reward"]
    lines = sorted({one.line for one in pins})
    text = template(TEMPLATE).render(
        pins=dict(zip(_functions(pins), pins, strict=True)),
        imports=[line for line in lines if line.startswith("import ")],
        loads=[line for line in lines if " = load(" in line],
        lifts=[line for line in lines if " = Lifted(" in line],
        environments={
            name: {table: rows for table, rows in _tables(one).items() if table not in left_out}
            for pin in pins
            for name, one in pin.environments.items()
        },
        stale=stale,
        rewarded=rewarded,
        meanings={name: NAMES[name] or ATLAS[name].meaning.replace(", prefixes held fixed", "") for name in known},
        suffixes={**SUFFIXES, **(STALE_SUFFIXES if stale else {})},
        whole=_functions_of(WHOLE, [name for name in known if name not in WEIGHTS]),
        weights=_functions_of(WEIGHTS, known),
        has_stubs=any("SimpleNamespace(" in one.call for one in pins),
        quoted=quoted,
        version=VERSION,
        summed=lambda of: summed(of, "mask"),
        **dict.fromkeys(("masked", "moved", "has_old"), True),
    )
    return str(text).rstrip("\n") + "\n"


def _functions(pins: Sequence[Pin]) -> Iterator[str]:
    """Yield a name for the function of each pin that nothing else in the file has."""
    taken = {*TAKEN, *(one.line.split()[-1 if one.line.startswith("import ") else 0] for one in pins)}
    for one in pins:
        name = re.sub(r"\W+", "_", one.name.partition(":")[2]).strip("_").lower()
        while name in taken or not name.isidentifier():
            name = f"pinned_{name}"
        taken.add(name)
        yield name


def _tables(environment: SmallEnvironment) -> dict[str, Any]:
    tables = {name: [list(row) for row in getattr(environment, name)] for name in ("policy", "reference", "sampler")}
    reward = [[int(number) for number in row] for row in environment.reward or ()]
    return {"length": environment.length, "ends": environment.ends, **tables, "reward": reward}


def _functions_of(table: Mapping[str, str], bases: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the tensors that each expression reads, and the expression."""
    sums = {each: f"({each} * mask).sum(-1)" for each in ("logp", "ref_logp", "old_logp")}
    texts = {name: table[name].format(**sums) for name in bases if name in table}
    return {name: (_names(text), text) for name, text in texts.items()}


def _names(expression: str) -> str:
    read = {one.id for one in ast.walk(ast.parse(expression)) if isinstance(one, ast.Name)}
    return ", ".join(sorted(read & TENSORS))

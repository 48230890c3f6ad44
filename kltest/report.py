"""Reports and their counter-examples as plain data, in the shape of the published JSON (schema kltest.grade/2)."""

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kltest.errors import KltestError
from kltest.files import as_json, finite

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = "kltest.grade/2"
# Schemas of earlier reports that can be compared with.
READABLE = ("kltest.grade/1", SCHEMA)
Verdict = Literal["confirmed", "refuted", "inconclusive", "error"]
Status = Literal["pass", "fail", "skip", "inconclusive"]
Level = Literal["error", "warning"]
LOCAL = ("seconds", "calling", "source", "beside")
"""Attributes of a report that its JSON leaves out."""
WORST_FIRST: tuple[Verdict, ...] = ("error", "refuted", "inconclusive", "confirmed")
EXIT_CODES: dict[str, int] = {"confirmed": 0, "refuted": 1, "error": 3, "inconclusive": 4}


class RefutedError(KltestError, AssertionError):
    """Raised by Report.raise_for_failure: the gradient is not the declared one, or could not be graded."""

    exit_code = 1


class Published:
    """What a command found, as a dataclass with a verdict: its JSON has the schema `SCHEMA`, which is published."""

    SCHEMA: ClassVar[str]
    CODES: ClassVar[Mapping[str, int]] = EXIT_CODES
    verdict: str

    @property
    def exit_code(self) -> int:
        """The exit code of the command line."""
        return self.CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite are None."""
        return {"schema": self.SCHEMA, **finite(asdict(self))}  # type: ignore[call-overload]

    def to_json(self) -> str:
        """Return the JSON text."""
        return as_json(self.to_dict())

    def _repr_html_(self) -> str:
        """Return the text as a notebook shows it."""
        text = getattr(self, "to_text", self.__repr__)
        return f"<pre>{html.escape(text())}</pre>"


@dataclass(frozen=True)
class GradientRow:
    """The expected gradient in one environment under one sampler; numbers are the worst over the instances.

    `identified` is the combination of named gradients that was found, None if there is none, and `expected` the one
    that was declared. `agrees` tells if the two are equal, None if that is inconclusive. `batch` is the number of
    rollouts in a batch: 1, or more if a loss couples the rows of a batch. `excused` holds the codes of the expected
    failures that account for a disagreement, which then does not refute. `scale` is 1 if the gradient is the declared
    one, c if it is c times that and agrees up to scale, else None; `expected` is the declared one times that c.

    If the method is "sampled", the relative bias lies in `interval` except with probability `error_rate` (for all rows
    together; in the limit of many samples if `asymptotic`), and the row agrees if the interval ends below `margin`. At
    most `samples` batches were drawn in an instance.
    """

    environment: str
    sampler: str
    identified: dict[str, float] | None
    relative_bias: float
    cosine: float | None
    residual: float
    relative_variance: float
    method: str
    instances: int
    rollouts: int
    expected: dict[str, float] = field(default_factory=dict)
    agrees: bool | None = None
    batch: int = 1
    note: str = ""
    excused: tuple[str, ...] = ()
    error_rate: float | None = None
    margin: float | None = None
    samples: int | None = None
    interval: tuple[float, float] | None = None
    asymptotic: bool | None = None
    scale: float | None = None

    @property
    def refutes(self) -> bool:
        """True if the row disagrees and no expected failure excuses it."""
        return self.agrees is False and not self.excused


@dataclass(frozen=True)
class ValueRow:
    """The logged value in one environment under one sampler, as an estimate of the KL."""

    environment: str
    sampler: str
    matches: str | None
    relative_bias: float | None = None
    relative_std: float | None = None


@dataclass
class Reach:
    """The extent to which the gradient was compared with the declared one; nothing is claimed beyond.

    `tokens` are those of the longest rollout, `rows` those of the largest batch; `reference` and `sampler` are the
    largest absolute log-ratios of a token to either. `vocabulary` is the largest one, and `probability` the policy's
    largest of a token whose log-ratio to the reference is not zero. `holes` tells if masked positions between live
    tokens were tried.
    """

    tokens: int = 1
    rows: int = 1
    reference: float = 0.0
    sampler: float = 0.0
    vocabulary: int = 2
    probability: float = 0.0
    holes: bool = False


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: `message` says what happened and why it matters, `fix` what to change.

    The `level` of a failure is "error" if the expected gradient or the logged value is wrong on ordinary input, and
    "warning" if only extreme input, low precision, noise or efficiency is at stake: warnings do not refute. `excused`
    is the reason why a failure was expected. A check that fails as expected does not refute; one that passes
    unexpectedly does.
    """

    code: str
    name: str
    status: Status
    message: str = ""
    fix: str = ""
    excused: str = ""
    level: Level = "error"

    @property
    def words(self) -> str:
        """The finding and the fix, on lines of their own."""
        return "\n".join(part for part in (f"{self.code} {self.name}: {self.message}", self.fix) if part)

    @property
    def warns(self) -> bool:
        """True if a failure only warns."""
        return self.level == "warning"

    @property
    def passed_unexpectedly(self) -> bool:
        """True if the check was expected to fail and passes."""
        return self.status == "pass" and bool(self.excused)

    @property
    def refutes(self) -> bool:
        """True if the check fails as an error that is not excused, or passes although it was expected to fail."""
        return self.passed_unexpectedly or (self.status == "fail" and not self.excused and not self.warns)


@dataclass(frozen=True)
class Fix:
    """A change of a loss's source with which it is confirmed.

    `text` replaces the lines from `first` to `last` of `file` (it is inserted before `first` if `last` is less), a file
    with the SHA-256 `digest`; `diff` is the same as a unified diff. `words` says what changes, `value` what becomes of
    the number that is returned. `variance` is the relative variance of a rollout's gradient, if it was measured;
    `needs_logits` tells if whole next-token distributions enter the term.
    """

    file: str
    first: int
    last: int
    text: str
    diff: str
    words: str
    value: str
    variance: float | None
    needs_logits: bool
    digest: str


@dataclass(frozen=True)
class Prefix:
    """One context of a small environment: the probability of each action, and derivatives with respect to its logit.

    `sampler` is None if rollouts come from the policy, `reward` if there are no rewards. `std` is the standard
    deviation of the derivative that one batch gives.
    """

    prefix: str
    policy: list[float]
    reference: list[float]
    sampler: list[float] | None
    reward: list[float] | None
    truth: list[float]
    found: list[float]
    std: list[float]


@dataclass(frozen=True)
class CounterExample:
    """A small token sequence with its policies, the declared gradient and the one that a loss follows there.

    `length` tokens of `actions`; with `ends`, at most that many, and the last action ends the rollout. Batches of
    `batch` rollouts are drawn from the policy ("current") or from the sampler ("stale"). `returned` says if the loss
    gave a scalar, a number per row or a number per token. If `summed`, the loss adds up the rows of a batch, and its
    gradient was divided by their number. `code` is a program that computes both gradients without kltest; `note` says
    why there is none.
    """

    environment: str
    sampler: str
    length: int
    actions: int
    ends: bool
    batch: int
    returned: str
    summed: bool
    contexts: list[Prefix]
    code: str = ""
    note: str = ""

    @property
    def drawn_from_sampler(self) -> bool:
        """True if rollouts are drawn from another policy than the graded one."""
        return any(place.sampler is not None for place in self.contexts)

    @property
    def setting(self) -> str:
        """Description of the environment in words."""
        actions = f"{self.actions} actions" + (f", the last of which ({self.actions - 1}) ends" if self.ends else "")
        length = "1 token" if self.length == 1 else f"{self.length} tokens{' at most' * self.ends}"
        drawn = "drawn from the sampler" if self.drawn_from_sampler else "drawn from π"
        batches = f", in batches of {self.batch}" if self.batch > 1 else ""
        batches += f", which are added up: divided by {self.batch}" if self.summed else ""
        unpaid = any(place.reward for place in self.contexts) and not any(any(p.reward or ()) for p in self.contexts)
        reward = "; every reward is 0" if unpaid else ""
        return f"{length} of {actions}; rollouts {drawn}{batches}{reward}; derivatives with respect to logits"

    def table(self) -> list[tuple[str, ...]]:
        """Return the numbers as text, a row per action, the head first."""
        has_sampler = self.drawn_from_sampler
        has_reward = any(place.reward and any(place.reward) for place in self.contexts)
        head = ("prefix", "action", "π", "ref", *("sampler",) * has_sampler, *("reward",) * has_reward)
        rows = [(*head, "true gradient", "expected gradient")]
        for place in self.contexts:
            tables = [place.policy, place.reference]
            tables += [place.sampler or place.policy] * has_sampler + [place.reward or []] * has_reward
            for action in range(self.actions):
                cells = (f"{numbers[action]:g}" for numbers in tables)
                derivatives = (format_cell(place.truth[action]), format_cell(place.found[action]))
                rows.append((place.prefix, str(action), *cells, *derivatives))
        return rows


def format_cell(cell: str | float) -> str:
    """Return a cell of a table as text: numbers with six decimals, or six digits if that would show nothing of them."""
    if isinstance(cell, str):
        return cell
    if not math.isfinite(cell):
        return str(cell)
    small, large = abs(cell) < 1e-4, abs(cell) >= 1e7
    text = f"{cell:.6g}" if cell != 0 and (small or large) else f"{cell:.6f}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of texts as lines, padded to equal columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


# Functions that show a report, as "text" and as "html"; `kltest.render`, a layer above, puts its functions in.
FORMS: "dict[str, Callable[..., str]]" = {}


@dataclass(frozen=True)
class Variant:
    """Another variant of a loss that was read: what it follows, or why it was not graded, and why it does not count."""

    target: str
    verdict: Verdict
    follows: str
    why: str

    @property
    def words(self) -> str:
        """The same as a sentence."""
        configuration = self.target.partition(" ")[2] or self.target
        counts = f" does not count ({self.why})" if self.why else ""
        return f"{configuration}{counts}: {self.verdict}, {self.follows}"


@dataclass(frozen=True, repr=False)
class Report:
    """Everything that grading found about one target.

    Attributes:
        target: Name of the loss, as the user gave it.
        expect: The declared gradient, as `--expect` takes it.
        placement: "loss", "reward", "shaped-reward" or "both".
        seed: Seed of the instances and of the padding.
        versions: Versions of kltest, Python, NumPy and torch; they make numbers reproducible.
        verdict: "confirmed", "refuted", "inconclusive" or "error".
        reduction: How the rows of a batch combine: "mean", "sum", "per-row" or "coupled".
        dtype: Precision in which the loss computes.
        gradients: The expected gradients, a row per environment and sampler.
        value: The logged value, a row per environment and sampler; empty if the loss logs none.
        checks: Every check that was selected, in the order of the codes.
        credit: Credit of a term in the reward, else None.
        notes: Remarks on how the loss was called.
        reach: How far the gradient was compared with the declared one; None if it was not.
        fixes: Changes of the source that are confirmed, the smallest first; empty if none was asked for or found.
        read: How the source of the loss was read, if it was not called.
        variants: Other variants of what was read. Those that decide nothing say why: they are neither the default nor
            used by a call site.
        beside: Why this is such a variant; not in the JSON.
        advice: Why no fix was found, if one was asked for.
        filled: What each parameter of the loss got, in words: a field, a value, or its default.
        smallest: The smallest environment in which the gradient differs from the declared one, if one was found.
        example: The gradient in a small environment, if nothing is wrong with it.
        error: Why the loss could not be graded, with the frame in which it failed.
        traceback: Empty; a key of the JSON.
        unfinished: What was not reached in time; empty if everything was.
        calls: Number of calls of the loss.
        seconds: Time that grading took; not in the JSON, which is the same in every rerun.
        calling: The part of it that calls of the loss and backward passes through them took; not in the JSON either.
        source: File and line of the loss, or of the line in which it failed; not in the JSON, which is the same
            wherever the checkout lies.
    """

    target: str
    expect: str
    placement: str
    seed: int
    versions: dict[str, str]
    verdict: Verdict
    reduction: str
    dtype: str
    gradients: list[GradientRow] = field(default_factory=list)
    value: list[ValueRow] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    credit: str | None = None
    notes: list[str] = field(default_factory=list)
    smallest: CounterExample | None = None
    example: CounterExample | None = None
    error: str = ""
    traceback: str = ""
    reach: Reach | None = None
    filled: dict[str, str] = field(default_factory=dict)
    fixes: list[Fix] = field(default_factory=list)
    advice: str = ""
    read: str = ""
    variants: list[Variant] = field(default_factory=list)
    beside: str = ""
    unfinished: str = ""
    calls: int = 0
    seconds: float = field(default=0.0, compare=False)
    calling: float = field(default=0.0, compare=False)
    source: tuple[str, int] | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the verdict: 0 confirmed, 1 refuted, 3 error, 4 inconclusive."""
        return EXIT_CODES[self.verdict]

    @property
    def failed(self) -> list[CheckResult]:
        """The checks that failed and were not expected to: errors first, then warnings, each in the order of codes."""
        failed = [check for check in self.checks if check.status == "fail" and not check.excused]
        return sorted(failed, key=lambda check: check.warns)

    @property
    def errors(self) -> list[CheckResult]:
        """The checks that refute by failing."""
        return [check for check in self.failed if not check.warns]

    @property
    def warnings(self) -> list[CheckResult]:
        """The checks that failed and only warn."""
        return [check for check in self.failed if check.warns]

    @property
    def expected_failures(self) -> list[CheckResult]:
        """The checks that failed as expected."""
        return [check for check in self.checks if check.status == "fail" and check.excused]

    @property
    def unexpected_passes(self) -> list[CheckResult]:
        """The checks that were expected to fail and pass."""
        return [check for check in self.checks if check.passed_unexpectedly]

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists; non-finite numbers are None."""
        found = {"schema": SCHEMA, **finite(asdict(self))}
        return {key: value for key, value in found.items() if key not in LOCAL}

    def to_json(self) -> str:
        """Return the report as JSON: keys in a fixed order, the same bytes for the same findings."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_frame(self) -> "DataFrame":
        """Return the gradient rows as a pandas DataFrame, so that those of many reports can be concatenated.

        Returns:
            A frame with a row per environment and sampler. Its columns are `target`, `verdict` and the fields of
            `GradientRow`. `identified` and `expected` are text that `--expect` takes, `identified` is missing if there
            is no such combination; `coefficients` is the dictionary behind `identified`.
        """
        import pandas as pd

        from kltest.truth import plain

        rows = []
        for row in self.gradients:
            cells = {"target": self.target, "verdict": self.verdict, **asdict(row)}
            cells["identified"] = None if row.identified is None else plain(row.identified)
            cells["expected"] = plain(row.expected) if row.expected else None
            rows.append({**cells, "coefficients": row.identified})
        names = [one.name for one in fields(GradientRow)]
        return pd.DataFrame(rows, columns=["target", "verdict", *names, "coefficients"])

    def __repr__(self) -> str:
        codes = [check.code for check in (*self.failed, *self.unexpected_passes)]
        failed = f", failed: {' '.join(codes)}" if codes else ""
        return f"<Report {self.target!r}: {self.verdict}, declared {self.expect}{failed}>"

    def to_text(self, *, verbose: bool = False) -> str:
        """Return the report for people: the first screen, or everything if `verbose`."""
        return FORMS["text"](self, verbose) if FORMS else repr(self)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return FORMS["html"](self) if FORMS else html.escape(repr(self))

    def raise_for_failure(self) -> None:
        """Raise RefutedError with the whole report as text, unless the verdict is confirmed."""
        if self.verdict != "confirmed":
            raise RefutedError(self.to_text(verbose=True))

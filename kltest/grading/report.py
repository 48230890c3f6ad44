"""What grading found: plain data, in the shape of the published JSON (schema kltest.grade/1)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kltest.errors import KltestError

SCHEMA = "kltest.grade/1"
Verdict = Literal["confirmed", "refuted", "inconclusive", "error"]
EXIT_CODES: dict[str, int] = {"confirmed": 0, "refuted": 1, "error": 3, "inconclusive": 4}


class RefutedError(KltestError, AssertionError):
    """Raised by Report.raise_for_failure: the gradient is not the one that was declared, or could not be graded."""

    exit_code = 1


@dataclass(frozen=True)
class GradientRow:
    """The expected gradient in one world under one sampler; numbers are the worst over the instances.

    `expected` is what the declared target asks for there; `agrees` whether the gradient met it (None: not to be said).
    `batch` is the number of rollouts in a batch: 1, or more where a loss couples the rows of a batch.
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


@dataclass(frozen=True)
class ValueRow:
    """The logged value in one world under one sampler, as an estimate of the KL."""

    environment: str
    sampler: str
    matches: str | None
    relative_bias: float | None = None
    relative_std: float | None = None


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check: `message` says what happened and why it matters, `fix` what to change."""

    code: str
    name: str
    status: Literal["pass", "fail", "skip", "inconclusive"]
    message: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that grading found about one target."""

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
    error: str = ""
    traceback: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def failed(self) -> list[CheckResult]:
        """The checks that failed, in the order of their codes."""
        return [check for check in self.checks if check.status == "fail"]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists; non-finite numbers are None."""
        return {"schema": SCHEMA, **_finite(asdict(self))}

    def to_json(self) -> str:
        """The report as JSON, keys in a fixed order, the same bytes for the same findings."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def raise_for_failure(self) -> None:
        """Raise RefutedError unless the verdict is confirmed."""
        if self.verdict != "confirmed":
            lines = [f"{self.target}: {self.verdict} (declared {self.expect})", *self.notes]
            lines += [f"{check.code} {check.name}: {check.message} {check.fix}".strip() for check in self.failed]
            raise RefutedError("\n".join([*lines, self.error] if self.error else lines))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

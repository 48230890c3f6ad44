"""Rows of the scoreboard as they are recorded in the package: nothing is measured here."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kltest.adapters import NAMES
from kltest.reproduce.frames import Row
from kltest.scoreboard import history, recorded
from kltest.scoreboard.classes import class_of, finite_class, limit_class, limit_names, names_one_length_only
from kltest.scoreboard.rows import factor, of_batches
from kltest.scoreboard.table import as_batches_grow, defaults
from kltest.scoreboard.timeline import is_default
from kltest.sweeps.settings import Settings

from ..records import content

PARTS = {
    # Gradients that each library follows by default, once its KL term is on.
    "defaults": (),
    # Settings of the same function or trainer, kltest's among them, that follow ∇KL(π‖ref).
    "instead": (),
    # Gradients that earlier releases followed.
    "history": (),
}
SETTINGS = Settings(
    title="The gradients that libraries follow by default",
    tags=("exact", "gradient", "libraries"),
    parts=PARTS,
    values={"part": tuple(PARTS)},
)

# The other side of a default's KL: the reference as a penalty, a teacher, whose KL is the objective, or neither.
PENALTY, DISTILLATION, NEITHER = "penalty", "distillation", "no KL to a reference"
# How a default that is switched off by its coefficient or its switch begins, if nothing is set.
OFF = "no KL, "
# Relative bias that rounding leaves: libraries compute in float32.
ROUNDING = 1e-3


ROOMS = ("adapters", "scoreboard")


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Add what the record is: rows change with it."""
    for one in configurations:
        path = history.PATH if one["part"] == "history" else recorded.PATH
        yield {**one, "_content": content(path)}


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """The rows of a part of the record."""
    part = configuration["part"]
    return [{"part": part, **row} for row in {"defaults": _defaults, "instead": _instead, "history": _history}[part]()]


def _defaults() -> Iterator[Row]:
    for line in defaults(recorded.read()).to_dict("records"):
        row = line.pop("row")
        own = {name: line[name] for name in ("library", "version", "setting", "kind", "unset")}
        about = {"purpose": _purpose(row), "off": line["unset"].startswith(OFF), "off_policy": line["stale"]}
        yield {**own, **about, **_on_sequences(row), **_of_large_batches(row)}


def _instead() -> Iterator[Row]:
    for line in defaults(recorded.read()).to_dict("records"):
        for each in line["instead"]:
            about = {"library": line["library"], "default": line["setting"], "setting": each["setting"]}
            yield {**about, "kind": each["kind"], "ours": each["mark"] == "recipe", **_on_sequences(each["row"])}


def _history() -> Iterator[Row]:
    lines = history.lines(recorded.read(history.PATH))
    for (library, setting), releases in sorted(lines.items(), key=lambda each: (NAMES.index(each[0][0]), each[0])):
        for earlier, row in zip([releases[0], *releases], releases, strict=False):
            yield {
                "library": library,
                "setting": setting,
                "default": is_default(library, setting),
                "purpose": _purpose(row),
                "version": row["version"],
                "released": row["released"],
                "kind": class_of(row),
                "dead_zone": any(check["code"] == history.DEAD_ZONE for check in row["failed"]),
                "changed": history.followed(row) != history.followed(earlier),
                "class_changed": class_of(row) != class_of(earlier),
            }


def _purpose(row: Mapping[str, Any]) -> str:
    """Return the purpose of its KL, as the note of its setting and the library's own default say."""
    if "teacher" in row["note"]:
        return DISTILLATION
    return NEITHER if NEITHER in row["unset"] else PENALTY


def _on_sequences(row: Mapping[str, Any]) -> Row:
    """Its gradient and bias on sequences, in the largest batch that was enumerated, and its largest bias off-policy."""
    there = {
        who: [one for one in row["gradients"] if (one["environment"], one["sampler"]) == ("sequence", who)]
        for who in ("current", "stale")
    }
    alone, whole = there["current"][0]["identified"] or {}, max(there["current"], key=lambda one: one["batch"])
    terms = {} if whole["identified"] is None else whole["identified"]

    def lawful(name: str, one: float) -> bool:
        """True if the law of a coefficient is not that of a rollout alone, or if it is the same here."""
        return of_batches(row, name) or alone.get(name) == one

    return {
        "gradient": {
            name: "−" * (one < 0) + (factor(row, name, abs(one)) if lawful(name, one) else f"{abs(one):.2g}")
            for name, one in terms.items()
        },
        "equal_lengths": names_one_length_only(row),
        "relative_bias": whole["relative_bias"],
        "cosine": whole["cosine"],
        "stale_bias": max((one["relative_bias"] for one in there["stale"]), default=None),
    }


def _of_large_batches(row: Mapping[str, Any]) -> Row:
    """What its gradient comes to as batches or groups grow, empty if that was not measured, and how far it is off.

    `off_by` is the largest share of the gradient that the limit leaves, times the size; `left` is that share in the
    largest batches that were sampled, with the end of its interval.
    """
    known = row["limits"] if limit_class(row) else []
    last = [one["sampled"][max(one["sampled"], key=int)] for one in known]
    return {
        "finite_kind": finite_class(row),
        "couples": row["reduction"] == "coupled",
        "limit_kind": limit_class(row) or "",
        "limit": as_batches_grow(row),
        "limit_of": row["limits"][0]["of"] if row["limits"] else "",
        "limit_names": sorted({name for one in known for name in limit_names(one)}),
        "off_by": max((one["rate"] for one in known), default=None),
        "left": max((one[0] for one in last), default=None),
        "left_high": max((one[2] for one in last), default=None),
    }

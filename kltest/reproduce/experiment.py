"""One experiment: a folder with settings, what to compute for a configuration, and an analysis of all rows.

`settings.py`     plain data: TITLE, and whatever the other two read
`experiment.py`   tasks(scale) → configurations; compute(configuration) → rows
`analysis.py`     tidy(rows) → rows; claims(rows) → [Claim]; tables(rows) → {name: rows}; numbers(rows) → {name: value}
`README.md`       the claim, the setting, the expected shape, what was found
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Literal

import kltest
from kltest.errors import UsageError
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.claims import Claim
from kltest.reproduce.files import as_csv, as_json, as_markdown, write
from kltest.sweeps.run import Configuration, Failure, run
from kltest.sweeps.store import Row, Store, digest

Scale = Literal["quick", "full"]

# A result depends on these; whatever else changes (the command line, the outputs) leaves finished results valid.
ROOMS = ("environments", "truth", "estimators", "targets", "moments", "grading", "training")
MODULES = ("policies.py", "rollout.py")
LIBRARIES = ("numpy", "scipy", "torch")


@dataclass(frozen=True)
class Outcome:
    """What is known after a run. `failures` are configurations without rows; their claims are not run."""

    claims: Sequence[Claim]
    failures: Sequence[Failure]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Experiment:
    """An experiment of a checkout, by its folder's name."""

    checkout: Checkout
    name: str

    @classmethod
    def find(cls, checkout: Checkout, name: str) -> Experiment:
        """UsageError, with the names that exist, if there is none of that name."""
        known = checkout.experiments()
        if name not in known:
            raise UsageError(f"there is no experiment called {name!r}; there are: {', '.join(known) or 'none'}")
        return cls(checkout, name)

    @property
    def folder(self) -> Path:
        return self.checkout.root / "experiments" / self.name

    @cached_property
    def version(self) -> str:
        """Changes with anything that a result depends on, so that no result of other code is ever reused."""
        package = Path(kltest.__file__).parent
        sources = [*self.folder.glob("*.py"), *(package / module for module in MODULES)]
        sources += [path for room in ROOMS for path in (package / room).rglob("*.py")]
        contents = sorted((path.name, sha256(path.read_bytes()).hexdigest()) for path in sources)
        return digest(contents, {library: metadata.version(library) for library in LIBRARIES})

    def configurations(self, scale: Scale) -> list[Configuration]:
        return list(self.checkout.load("experiments", self.name, "experiment").tasks(scale))

    def run(self, output: Path, scale: Scale) -> Outcome:
        """Compute what is missing, then write all files of the experiment to output/NAME/."""
        analysis = self.checkout.load("experiments", self.name, "analysis")
        folder = output / self.name
        folder.mkdir(parents=True, exist_ok=True)
        configurations = self.configurations(scale)
        with Store(folder / "runs.jsonl", self.version) as store:
            compute = partial(compute_one, self.checkout, self.name)
            failures = run(compute, configurations, store, label=self.name)
            finished = [store.rows(configuration) for configuration in configurations]
        rows: list[Row] = analysis.tidy([row for found in finished if found is not None for row in found])
        claims = analysis.claims(rows)
        write(folder / f"{self.name}.csv", as_csv(rows))
        write(folder / f"{self.name}.json", as_json(rows))
        write(folder / "numbers.json", as_json(analysis.numbers(rows)))
        write(folder / "claims.json", as_json([claim.row() for claim in claims]))
        for title, table in analysis.tables(rows).items():
            write(folder / f"{title}.md", as_markdown(table))
            write(folder / f"{title}.csv", as_csv(table))
        notes = [f"{store.path}, line {number}: not a result of kltest, passed over" for number in store.foreign_lines]
        return Outcome(claims, failures, notes)


def compute_one(checkout: Checkout, name: str, configuration: Configuration) -> list[Row]:
    """The rows of one configuration; a function of the module, so that another process can be told to call it."""
    return checkout.load("experiments", name, "experiment").compute(configuration)

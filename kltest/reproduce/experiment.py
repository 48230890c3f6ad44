"""One experiment: a folder with settings, what to compute for a configuration, and an analysis of all rows.

`experiment.py`   `SETTINGS`, a `kltest.sweeps.settings.Settings`; `compute(configuration)` gives
                  rows; or, if many configurations are one tensor program, `BATCHING` (a
                  `kltest.sweeps.run.Batching`) and `compute_batch(configurations)`, rows for each;
                  `tasks(configurations)`, if settings cannot say all, replaces the grid's configurations;
                  `ROOMS` and `LIBRARIES` name what rows depend on beside what those of every experiment do
`claims.py`       `tidy(rows)` gives a data frame; of it `claims(frame)` gives Claims (`kltest.reproduce.claims`),
                  `numbers(frame)`, if the paper cites some, a table of them (`kltest.reproduce.numbers`), and
                  `tables(frame)`, if the paper shows some, {name: rows}
`README.md`       the claim, the setting, the expected shape, what was found
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from kltest.errors import UsageError
from kltest.files import PACKAGE, as_csv, as_json, as_markdown, write
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.claims import Claim, score
from kltest.reproduce.frames import records
from kltest.reproduce.numbers import Numbers, number
from kltest.sweeps.run import Batching, Configuration, run
from kltest.sweeps.settings import Settings
from kltest.sweeps.store import Failure, Row, Store, digest
from kltest.version import version_of

SCALES = ("quick", "full")
# Names that experiments had before they became a part of another.
ALIASES = dict.fromkeys(("comedy", "value-versus-gradient"), "differentiate-the-estimate")


@dataclass(frozen=True)
class Request:
    """Options of a run: which part, and on which machines. UsageError if a value is not possible."""

    scale: str = "quick"
    changes: Sequence[str] = ()
    seeds: int | None = None
    workers: int | None = None
    cluster: str | None = None
    retry_failed: bool = False

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise UsageError(f"there is no scale {self.scale!r}; there are: {', '.join(SCALES)}")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers must be at least 1, not {self.workers}")

    @property
    def variation(self) -> str:
        """Return the changes that set this run apart from the one that the figures and the paper read; perhaps none."""
        seeds = [] if self.seeds is None else [f"seeds={self.seeds}"]
        return ";".join(sorted(change.replace(" ", "") for change in self.changes) + seeds)


# A result depends on these; whatever else changes (the command line, the outputs) leaves finished results valid.
ROOMS = ("environments", "truth", "estimators", "loss", "moments", "identify", "checks", "training")
MODULES = ("rollout.py",)
LIBRARIES = ("numpy", "scipy", "torch")


@dataclass(frozen=True)
class Computed:
    """Rows that a run computed. `failures` are configurations without rows; their claims are not run."""

    claims: Sequence[Claim]
    failures: Sequence[Failure]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Experiment:
    """An experiment of a checkout, by its folder's name."""

    checkout: Checkout
    name: str

    @classmethod
    def find(cls, checkout: Checkout, name: str) -> Self:
        """UsageError, with the names that exist, if there is none of that name."""
        known = checkout.experiments()
        name = name if name in known else ALIASES.get(name, name)
        if name not in known:
            raise UsageError(f"there is no experiment called {name!r}; there are: {', '.join(known) or 'none'}")
        return cls(checkout, name)

    @cached_property
    def version(self) -> str:
        """Changes with anything that a result depends on, so that no result of other code is ever reused."""
        package, experiments = PACKAGE, self.checkout.root / "experiments"
        # Claims and tables do not change the rows.
        sources = [path for path in (experiments / self.name).glob("*.py") if path.name != "claims.py"]
        sources += experiments.glob("*.py")  # what experiments share
        module = self.checkout.load("experiments", self.name, "experiment")
        rooms = (*ROOMS, *getattr(module, "ROOMS", ()))
        sources += [package / one for one in MODULES]
        sources += [path for room in rooms for path in (package / room).rglob("*.py")]
        contents = sorted((path.name, sha256(path.read_bytes()).hexdigest()) for path in sources)
        libraries = {library: metadata.version(library) for library in LIBRARIES}
        # None if it is not installed: an experiment may do without.
        own = {name: version_of(name) or None for name in getattr(module, "LIBRARIES", ())}
        return digest(contents, libraries | own)

    @property
    def settings(self) -> Settings:
        """SETTINGS of its folder."""
        return self.checkout.load("experiments", self.name, "experiment").SETTINGS

    def configurations(self, request: Request) -> list[Configuration]:
        """Return the configurations to compute; UsageError if settings are not possible."""
        configurations = self.settings.configurations(self._grid(request))
        module = self.checkout.load("experiments", self.name, "experiment")
        tasks = module.tasks(configurations) if hasattr(module, "tasks") else configurations
        return list({digest(one): one for one in tasks}.values())

    def _grid(self, request: Request) -> Mapping[str, Any]:
        return self.settings.grid(request.scale, request.changes, request.seeds)

    def run(self, output: Path, request: Request = Request(), label: str = "") -> Computed:
        """Compute what is missing, then write all files of the experiment to output/NAME/.

        `label` is what its progress is called, its name if empty.
        With settings or seeds of a person's own they go to output/NAME@THESE/, where no figure and no paper looks.
        """
        claims_of = self.checkout.load("experiments", self.name, "claims")
        module = self.checkout.load("experiments", self.name, "experiment")
        configurations = self.configurations(request)
        folder = output / (f"{self.name}@{request.variation}" if request.variation else self.name)
        folder.mkdir(parents=True, exist_ok=True)
        with Store(folder / "runs.jsonl", self.version) as store:
            failures = run(
                partial(compute_all, self.checkout, self.name),
                configurations,
                store,
                label=label or self.name,
                batching=getattr(module, "BATCHING", Batching()),
                workers=request.workers,
                cluster=request.cluster,
                retry_failed=request.retry_failed,
            )
            finished = [store.result(configuration) for configuration in configurations]
        rows = claims_of.tidy([row for found in finished if isinstance(found, list) for row in found])
        claims, table = claims_of.claims(rows), records(rows)
        cited = getattr(claims_of, "numbers", Numbers())(rows)
        data = {
            "settings": {"scale": request.scale, **self._grid(request)},
            self.name: table,
            "numbers": [*records(cited), number("score", score(claims))],
            "claims": [asdict(claim) for claim in claims],
            "failures": [asdict(failure) for failure in failures],
        }
        files = {f"{title}.json": as_json(value) for title, value in data.items()}
        files[f"{self.name}.csv"] = as_csv(table)
        for title, lines in claims_of.tables(rows).items() if hasattr(claims_of, "tables") else ():
            files |= {f"{title}.md": as_markdown(lines), f"{title}.csv": as_csv(lines)}
        for name, content in files.items():
            write(folder / name, content)
        notes = []
        if lines := store.foreign_lines:
            more = f" and {len(lines) - 1} more are" if len(lines) > 1 else " is"
            notes = [f"{store.path}: line {lines[0]}{more} not as kltest wrote it and passed over"]
        return Computed(claims, failures, notes)


def compute_all(checkout: Checkout, name: str, batch: Sequence[Configuration]) -> list[list[Row]]:
    """The rows of each configuration; a function of the module, so that another process can be told to call it."""
    module = checkout.load("experiments", name, "experiment")
    if hasattr(module, "compute_batch"):
        return module.compute_batch(batch)
    return [module.compute(configuration) for configuration in batch]

"""The files that `kltest init` writes into a checkout; nothing that stands is changed but the end of pyproject.toml."""

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from kltest.errors import UsageError
from kltest.files import template
from kltest.grading.configuration import Configuration, read
from kltest.integration.losses import Held
from kltest.scanning.declarations import Rules, rules

PROJECT, WORKFLOWS, HOOKS = Path("pyproject.toml"), Path(".github/workflows"), Path(".pre-commit-config.yaml")
WORKFLOW, BASELINE, TEST = WORKFLOWS / "kltest.yml", Path("kltest-scan.json"), "test_kl_gradient.py"
TEMPLATES = Path(__file__).parent / "templates"
NOBODY = "https://github.com/OWNER/kltest"
"""What stands for the address of kltest's repository where it is not known."""


@dataclass(frozen=True)
class File:
    """A file that is to be written: its whole text, and the part of it that is new and shown."""

    path: Path
    text: str
    shown: str


@dataclass
class Plan:
    """What is to be written into a checkout, the present folder, and sentences on what is left alone.

    `repository` and `revision` say where kltest is installed from in CI.
    """

    repository: str
    revision: str
    files: list[File] = field(default_factory=list)
    standing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.configuration = read(PROJECT) if PROJECT.is_file() else Configuration()
        self.configured = PROJECT.is_file() and "kltest" in tomllib.loads(PROJECT.read_text("utf-8")).get("tool", {})
        self.test = Path("tests", TEST) if Path("tests").is_dir() else Path(TEST)

    @property
    def rules(self) -> Rules:
        """What is said of files by `[tool.kltest.scan]`: as it stands, else as it is to be written."""
        if self.configured:
            return rules(self.configuration.scan, PROJECT.resolve())
        return Rules(Path.cwd(), exclude=tuple(self._excluded()))

    @property
    def takes_baseline(self) -> bool:
        """Return True if the findings of today may be written as a baseline."""
        return not self.configured or (bool(self.rules.baseline) and not Path(self.rules.baseline).exists())

    @property
    def complete(self) -> bool:
        """Return True if nothing is left to be written."""
        test = self.test.exists() or not self.configuration.targets
        return self.configured and test and not self.takes_baseline and HOOKS.exists() and bool(self._workflow())

    def make(self, losses: Sequence[Held], baseline: str) -> None:
        """Fill in the files for losses and the text of a baseline, which is empty if there is none."""
        if self.configured:
            self.standing.append(f"{PROJECT} has [tool.kltest]: left alone")
            known = Path(self.rules.baseline) if self.rules.baseline else None
        else:
            known = BASELINE if baseline else None
            self.files.append(self._configuration(losses, known))
        if known and known.exists():
            self.standing.append(f"{known} stands: left alone")
        elif known and baseline:
            self.files.append(
                File(known, baseline, f"{len(baseline):,} bytes: the findings of today, which fail nothing")
            )
        targets = bool(self.configuration.targets if self.configured else losses)
        if targets:
            self._new(self.test, "test_kl_gradient.py.j2")
        if flow := self._workflow():
            self.standing.append(f"{flow} runs kltest: left alone")
        else:
            self._new(WORKFLOW, "workflow.yml.j2", targets=targets)
        self._new(HOOKS, "pre-commit.yaml.j2")

    def _new(self, path: Path, name: str, **given: object) -> None:
        """Add a file made of a template, unless one stands there."""
        text = template(TEMPLATES / name).render(repository=self.repository, revision=self.revision, **given)
        if path.exists():
            add = (
                ": left alone"
                if path != HOOKS or "kltest" in path.read_text("utf-8", "replace")
                else f"; add to it:\n{text}"
            )
            self.standing.append(f"{path} stands{add}")
        else:
            self.files.append(File(path, text, text))

    def _configuration(self, losses: Sequence[Held], baseline: Path | None) -> File:
        """Return pyproject.toml with `[tool.kltest]` at its end."""
        before = PROJECT.read_bytes().decode("utf-8") if PROJECT.is_file() else ""
        given = {"losses": losses, "baseline": baseline, "exclude": list(self._excluded()), "quoted": _quoted}
        added = template(TEMPLATES / "pyproject.toml.j2").render(**given)
        gap = "" if not before else "\n" if before.endswith("\n") else "\n\n"
        end = (gap + added).replace("\n", "\r\n" if "\r\n" in before else "\n")
        try:
            old, new = tomllib.loads(before), tomllib.loads(text := before + end)
        except tomllib.TOMLDecodeError:
            raise UsageError(f"{PROJECT} takes no table at its end; write into it yourself:\n{added}") from None
        del new["tool"]["kltest"]
        assert {**old, "tool": old.get("tool", {})} == new
        return File(PROJECT, text, added)

    def _excluded(self) -> Iterator[str]:
        yield from (f"{name}/*" for name in ("test", "tests") if Path(name).is_dir())

    def _workflow(self) -> Path | None:
        """Return the workflow that runs kltest."""
        flows = sorted(WORKFLOWS.glob("*.y*ml"))
        return next((one for one in flows if one == WORKFLOW or "kltest" in one.read_text("utf-8", "replace")), None)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def installed_from() -> tuple[str, str]:
    """Return the repository and the revision that the installed kltest is from, as pip notes them."""
    try:
        noted = json.loads(metadata.distribution("kltest").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        noted = {}
    commit = noted.get("vcs_info", {}).get("commit_id", "")
    return (noted["url"], commit) if commit else (NOBODY, "main")

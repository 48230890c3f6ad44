"""The pytest plugin: a marker, a line in the header, a summary of graded losses, and `[tool.kltest]` by `--kltest`.

It loads neither torch nor the checks unless a test uses them. Losses are graded in pytest's own process.
"""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kltest.version import VERSION, version_of

if TYPE_CHECKING:
    from kltest.parametrize import GradedCheck

# Attribute of an item's report that reaches the process that writes the summary (with pytest-xdist another one).
CARRIED = "kltest_graded"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --kltest."""
    parser.getgroup("kltest").addoption(
        "--kltest", action="store_true", help="Also grade the targets of [tool.kltest] in pyproject.toml, as tests."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; with --kltest, add the pyproject.toml of the root to the arguments."""
    config.addinivalue_line("markers", "kltest: grades a loss with kltest (set by kltest on its own items)")
    if config.getoption("kltest"):
        path = config.rootpath / "pyproject.toml"
        if not path.is_file():
            raise pytest.UsageError(f"--kltest: there is no pyproject.toml in {config.rootpath}")
        named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
        if path.resolve() not in named:
            config.args.append(str(path))


def pytest_report_header() -> str:
    """Return the versions of kltest and torch."""
    return f"kltest: {VERSION}, torch {version_of('torch') or 'not installed'}; losses are graded in this process"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the items that grade a loss."""
    if _check(item) is not None:
        item.add_marker("kltest")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the targets of a pyproject.toml with --kltest."""
    if file_path.name == "pyproject.toml" and parent.config.getoption("kltest"):
        return ConfiguredTargets.from_parent(parent, path=file_path)
    return None


class ConfiguredTargets(pytest.File):
    """The targets of a pyproject.toml, an item for each target and check."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item for each configured target and check."""
        import kltest.scanning.reading  # noqa: F401  which reads what cannot be called
        from kltest.errors import KltestWarning, UsageError
        from kltest.grading.configuration import read
        from kltest.grading.options import merged
        from kltest.parametrize import graded_checks

        try:
            configuration = read(self.path)
        except UsageError as error:
            raise self.CollectError(str(error)) from None
        for words in configuration.deprecated:
            warnings.warn(words, KltestWarning, stacklevel=1)
        if not configuration.targets:
            raise self.CollectError(f"--kltest: {self.path} lists no targets in [tool.kltest]")
        if str(self.path.parent) not in sys.path:
            sys.path.append(str(self.path.parent))
        for target in configuration.targets:
            for check in graded_checks(target.text, target.text, merged(configuration.options, target.options)):
                yield ConfiguredCheck.from_parent(self, name=f"{target.text}-{check.code}", check=check)


class ConfiguredCheck(pytest.Item):
    """One check of one configured target."""

    def __init__(self, *, check: "GradedCheck", **node: Any) -> None:
        super().__init__(**node)
        self.check = check

    def runtest(self) -> None:
        """Grade the loss, or read its grading, and judge this check."""
        self.check(self.check.grading.loss)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return an error of kltest as its message alone."""
        from kltest.errors import KltestError

        return str(excinfo.value) if isinstance(excinfo.value, KltestError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the file and the name, as pytest prints them."""
        return self.path, None, self.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Put verdict and failed codes on the report of an item that grades a loss."""
    report = yield
    check = _check(item) if call.when == "call" else None
    if check is not None and (found := check.grading.known) is not None:
        codes = [f"{one.code} (warns)" if one.warns else one.code for one in found.failed]
        codes += [f"{one.code} (unexpected pass)" for one in found.unexpected_passes]
        where = f"{item.parent.nodeid if item.parent else ''}::{getattr(item, 'originalname', '')}"
        setattr(report, CARRIED, [where, found.target, found.verdict, codes])
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line for each graded loss."""
    reports = (report for kind in terminalreporter.stats.values() for report in kind)
    graded = {tuple(found[:2]): found[2:] for report in reports if (found := getattr(report, CARRIED, None))}
    if not graded:
        return
    from kltest.render.text import STYLES

    terminalreporter.section("kltest")
    width = max(len(verdict) for verdict, _ in graded.values())
    for (_, target), (verdict, codes) in graded.items():
        terminalreporter.write(verdict.ljust(width), **{STYLES[verdict]: True})
        terminalreporter.write_line(f"  {target}{'  ' if codes else ''}{', '.join(codes)}")


def _check(item: pytest.Item) -> "GradedCheck | None":
    """The check that an item makes, if it makes one; none was ever made if their module is not loaded."""
    module = sys.modules.get("kltest.parametrize")
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    check = item.check if isinstance(item, ConfiguredCheck) else parameters.get("check")
    return check if module and isinstance(check, module.GradedCheck) else None

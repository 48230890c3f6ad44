"""The public face: what the README, the citation and the constraints say is so."""

import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from processes import ran
from typer.testing import CliRunner

import kltest
from kltest.checks import CHECKS
from kltest.cli import app
from kltest.estimators import registry
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.experiment import Experiment, Request

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURE = next(line for line in README.split("\n\n") if line.startswith("!["))


def _hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = _hooks()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def blocks(text: str) -> dict[str, str]:
    """The marked parts of a page by name."""
    return dict(re.findall(r"<!-- begin: ([\w-]+) -->\n(.*?)<!-- end: \1 -->", text, flags=re.DOTALL))


def test_the_readmes_tables_are_those_of_the_code():
    assert hooks.readme(README) == README, "python docs/hooks.py renews them"
    assert hooks.readme(README.replace("∇KL(ref‖π)", "∇KL(π‖ref)", 1)) == README


def test_the_readme_is_an_entrance():
    assert len(README.splitlines()) <= 150
    assert re.findall(r"\[[^\]]*\]\((?!https?:)[^)]*\)", README) == [PICTURE.removeprefix("!")]


def test_every_experiment_has_a_page_and_what_was_run_has_its_claims_settings_and_pictures(tmp_path):
    names = {path.parent.name for path in (ROOT / "experiments").glob("*/README.md")}
    bare = hooks.result_pages(tmp_path)
    assert bare.keys() == {f"results/{name}.md" for name in (*names, "index")}
    assert "## Settings" not in bare["results/groups.md"]
    claim = {"claim": "a_b | c", "expected": "x < 1", "found": "0.5", "tolerance": "rounding"}
    made = {
        "groups/claims.json": json.dumps([claim]),
        "groups/settings.json": json.dumps({"beta": [1.0]}),
        "groups/table.csv": "title\nseven_7\n",
        "figures/groups.png": "not a picture",
    }
    for path, text in made.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    pages = hooks.result_pages(tmp_path)
    page = pages["results/groups.md"]
    assert page.startswith(bare["results/groups.md"].rstrip())
    for text in (
        r"| a\_b \∣ c | x \< 1 | 0.5 | rounding |",
        r"| `beta` | \[1.0\] |",
        r"| seven\_7 |",
        "![groups](groups.png)",
    ):
        assert text in page
    assert pages["results/groups.png"] == b"not a picture"


@pytest.fixture(scope="module")
def pages():
    return hooks.check_pages()


@pytest.mark.scheduled
def test_pages_say_everything_and_are_listed_once_in_their_family(pages):
    assert pages.keys() == {f"checks/{name}.md" for name in (*CHECKS, "index")}
    index = pages["checks/index.md"]
    for code, check in CHECKS.items():
        page = pages[f"checks/{code}.md"]
        assert page.startswith(f"# {code} `{check.name}`\n")
        for code_block in (check.wrong_code, check.fixed_code):
            assert f"```python\n{code_block}\n```" in page
        for text in (check.what, check.why, check.example, check.fix):
            assert hooks.escaped(text) in page
        assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
        assert index.count(f"[{code}]({code}.md)") == 1
        family = index[: index.index(f"[{code}]")].rsplit("## ", 1)[1]
        assert family.startswith(f"{code[2]}xx ")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation, built strictly from the checkout: a broken link or a page that fails is an error.

    A job of its own on every push, as the pages and examples are that take long.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "1"}
    done = ran(*command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.scheduled
def test_the_site_has_a_page_for_everything(site):
    for code, check in CHECKS.items():
        assert check.name in (site / "checks" / f"{code}.html").read_text(encoding="utf-8")
    estimators = (site / "estimators.html").read_text(encoding="utf-8")
    assert all(name in estimators for name in registry())
    api = (site / "api" / "grading.html").read_text(encoding="utf-8")
    assert all(f"kltest.{name}" in api for name in ("grade", "Report", "parametrize_with_checks"))
    described = {name for name in inspect.signature(kltest.grade).parameters if f"<code>{name}</code>" in api}
    assert described == {*inspect.signature(kltest.grade).parameters}
    for page in site.rglob("*.html"):
        assert not hooks.MARK.search(page.read_text(encoding="utf-8")), page


@pytest.mark.scheduled
def test_the_site_loads_nothing_from_the_network(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(https?://[^\"]+)", page.read_text(encoding="utf-8")
        )
        assert [address for address in loaded if "canonical" not in address] == [], page


@pytest.mark.scheduled
def test_the_notebook_was_executed(site):
    page = (site / "notebook.html").read_text(encoding="utf-8")
    assert "0.2218070977" in page  # p(1 − p)·log 4
    assert "forward_kl" in page


PAGES = (
    "quickstart.md",
    "guides/policy.md",
    "concepts/sampler.md",
    "guides/same.md",
    "concepts/placements.md",
    "guides/your-own-loss.md",
    "guides/distillation.md",
)


@pytest.mark.scheduled
@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_shows_happens(name, tmp_path, monkeypatch):
    """Titled blocks are files, other Python is run, and each command prints the lines below it, in that order."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    shown = 0
    for kind, title, block in re.findall(r'```(python|console)(?: title="([^"]+)")?\n(.*?)```', text, flags=re.DOTALL):
        if title:
            Path(title).write_text(block, encoding="utf-8")
        elif kind == "python":
            exec(block, {})
        else:
            for command, expected in re.findall(r"\$ kltest (.*)\n((?:(?!\$ ).*\n)*)", block):
                printed = CliRunner().invoke(app, shlex.split(command)).output
                for line in expected.splitlines():
                    assert line in printed, f"{command}\n{printed}"
                    printed = printed[printed.index(line) :]
                    shown += 1
    assert shown >= 3


def test_the_page_on_what_is_missed_computes_what_it_says_and_counts_all_cases():
    text = (ROOT / "docs" / "concepts" / "missed.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(block, {})
    cases = re.findall(r"^\| (?:below \d|above \d|\d+ to).*? \| (\d+) \|", text, flags=re.MULTILINE)
    every = Experiment(Checkout(ROOT), "coefficients").configurations(Request(scale="full", changes=("part=bound",)))
    assert sum(map(int, cases)) == len(list(every)) == 850


def test_the_readmes_python_says_what_happens():
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "my_loss" in block)
    names: dict = {}
    exec(code.split("report.verdict")[0], names)
    report = names["report"]
    told = dict(re.findall(r"^report\.(\S+)\s+# (?:'(\w+)')?", code, flags=re.MULTILINE))
    assert report.verdict == told["verdict"] == "refuted"
    assert report.gradients[1].environment == "sequence"
    assert report.gradients[1].identified == pytest.approx({"local_reverse_kl": 1.0}, abs=1e-9)
    with pytest.raises(AssertionError, match="KL201"):
        report.raise_for_failure()


def test_ci_runs_exactly_the_readmes_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    extract = next(line for line in script.splitlines() if line.startswith("command="))
    done = ran("bash", "-c", f'{extract}; printf %s "$command"', cwd=ROOT, check=True)
    assert f"```bash\n{done.stdout}\n```\n" == blocks(README)["test-command"]
    assert "pytest" in done.stdout
    assert "constraints.txt" in done.stdout
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert {"run": ".ci/run"} in workflow["jobs"]["tests"]["steps"]


def test_ci_ends_as_the_command_ends(tmp_path):
    """The script beside a README with another command, and a python that only pretends to make an environment."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nmkdir -p "$3/bin" && : > "$3/bin/activate"\n')
    python.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())

    def run(page: str) -> subprocess.CompletedProcess:
        (tmp_path / "README.md").write_text(page)
        return ran("bash", script, env={**os.environ, "PYTHON": str(python)})

    for command, code, last in (
        ("echo all passed", 0, "all passed"),
        ("echo 1 failed && exit 7", 7, "1 failed"),
        ("false && echo never", 1, "+ false && echo never"),
    ):
        done = run(f"<!-- begin: test-command -->\n```bash\n{command}\n```\n<!-- end: test-command -->\n")
        assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last), done.stderr
    assert run("no marks").returncode == 2


def test_the_citation_is_valid_and_of_this_version():
    """The keys that Citation File Format 1.2.0 requires, and those whose content can be held to something."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"message", "title", "authors"} <= citation.keys()
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    assert citation["version"] == kltest.__version__ == metadata.version("kltest")
    assert citation["license"] == PROJECT["license"]


@cache
def pins() -> dict[str, str]:
    """Versions of what is installed with this Python: a pin that only some need says which, by a marker."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    written = [Requirement(line) for line in lines]
    assert all(re.fullmatch(r"==[0-9][0-9A-Za-z.]*", str(each.specifier)) for each in written), "NAME==VERSION"
    here = [each for each in written if each.marker is None or each.marker.evaluate()]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in here}


@cache
def needed(extras: str = "paper,test") -> dict[str, list[Requirement]]:
    """Everything that the README's two commands install, by following the installed packages' own requirements."""
    found: dict[str, list[Requirement]] = {}
    waiting = [Requirement(f"kltest[{extras}]")]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append(requirement)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        for text in metadata.requires(name) or []:
            child = Requirement(text)
            extras = ["", *requirement.extras]
            if name == "torch" and "platform_system" in str(child.marker):
                continue  # libraries of accelerators, which this wheel of torch brings and another does not
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(child)
    found.pop("kltest")
    return found


def test_constraints_cover_everything_that_is_installed():
    required = needed()
    # Extras of this checkout may be newer than the installed metadata, so the project's own file is what counts.
    # JAX (400 MB) and the site are in extras that neither the tests nor the paper ask for: what needs JAX is skipped.
    extras = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name not in ("docs", "jax")}
    own = [*PROJECT["dependencies"], *(line for lines in extras.values() for line in lines)]
    assert {canonicalize_name(Requirement(line).name) for line in own} - {"kltest"} <= required.keys()
    assert required.keys() - pins().keys() == set()


@pytest.mark.scheduled
def test_constraints_cover_the_site_and_nothing_else():
    assert pins().keys() == needed("docs,paper,test").keys()


def test_constraints_meet_what_is_asked_for():
    for name, requirements in needed().items():
        for requirement in requirements:
            if name in pins():
                assert requirement.specifier.contains(pins()[name], prereleases=True), f"{requirement} against the pin"


def test_pins_can_be_installed_with_the_oldest_python():
    (oldest,) = SpecifierSet(PROJECT["requires-python"])
    assert oldest.operator == ">="
    assert f"Python {oldest.version} or later" in README
    asked = {name: metadata.metadata(name).get("Requires-Python") or "" for name in needed()}
    same = {name for name in asked if metadata.version(name).split("+")[0] == pins()[name]}
    assert {name for name in same if not SpecifierSet(asked[name]).contains(oldest.version)} == set()


def test_this_environment_is_the_pinned_one():
    """The README's command installs with the constraints; elsewhere than in CI other versions are fine, but said."""
    installed = {name: metadata.version(name).split("+")[0] for name in needed()}
    different = {name: (version, pins()[name]) for name, version in installed.items() if version != pins()[name]}
    assert not (different and os.environ.get("CI")), different
    if different:
        pytest.skip(f"other versions than the pinned ones: {different}")


EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.scheduled
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, monkeypatch, capsys):
    if name.startswith("test_"):
        assert pytest.main(["-q", "-p", "no:cacheprovider", str(ROOT / "examples" / f"{name}.py")]) == 0
    else:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        assert capsys.readouterr().out

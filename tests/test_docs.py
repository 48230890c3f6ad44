"""The public face: what the README, the citation and the constraints say is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kltest
from kltest import docs
from kltest.checks import CHECKS
from kltest.errors import UsageError

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def fresh():
    return {name: make() for name, make in docs.BLOCKS.items()}


@pytest.mark.parametrize("name", sorted(docs.BLOCKS))
def test_generated_parts_of_the_readme_are_in_step(fresh, name):
    assert docs.NOISE.sub("0", docs.blocks(README)[name]) == docs.NOISE.sub("0", fresh[name])


@pytest.fixture(scope="module")
def pages():
    return docs.check_pages()


def test_every_check_has_its_page_in_step_and_there_is_no_other(pages):
    folder = ROOT / docs.PAGES
    assert {f"{docs.PAGES}/{file.name}" for file in folder.glob("*")} == pages.keys()
    assert pages.keys() == {f"{docs.PAGES}/{name}.md" for name in (*CHECKS, "README")}
    for path, content in pages.items():
        written = (ROOT / path).read_text(encoding="utf-8")
        assert docs.NOISE.sub("0", written) == docs.NOISE.sub("0", content), f"python -m kltest.docs --write: {path}"


def test_the_scoreboard_is_in_step_and_no_program_is_left_over():
    """The page, the same for a browser, and the program of every row that has one."""
    fresh = docs.library_pages()
    programs = {path for path in fresh if path.startswith(docs.PROGRAMS)}
    assert {"docs/libraries.md", "docs/libraries.html"} == fresh.keys() - programs
    assert {f"{docs.PROGRAMS}/{file.name}" for file in (ROOT / docs.PROGRAMS).glob("*")} == programs
    for path, content in fresh.items():
        assert (ROOT / path).read_text(encoding="utf-8") == content, f"python -m kltest.docs --write: {path}"


def test_pages_say_everything_and_are_listed_once_in_their_family(pages):
    index = pages[f"{docs.PAGES}/README.md"]
    for code, check in CHECKS.items():
        page = pages[f"{docs.PAGES}/{code}.md"]
        assert page.startswith(f"# {code} `{check.name}`\n")
        for code_block in (check.wrong_code, check.mended_code):
            assert f"```python\n{code_block}\n```" in page
        for text in (check.what, check.why, check.example, check.fix):
            assert docs.escaped(text) in page
        assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
        assert index.count(f"[{code}]({code}.md)") == 1
        family = index[: index.index(f"[{code}]")].rsplit("## ", 1)[1]
        assert family.startswith(f"{code[2]}xx ")


def test_pages_out_of_step_are_noticed_and_mended(tmp_path, monkeypatch, capsys):
    """A checkout in which one page is missing, one changed and one left over from a check that is gone."""
    kept = dict(list(docs.check_pages().items())[:3])
    monkeypatch.setattr(docs, "check_pages", lambda: kept)
    monkeypatch.setattr(docs, "library_pages", dict)
    monkeypatch.setattr(docs, "stale", lambda text: {})
    monkeypatch.setattr(docs.Checkout, "find", lambda: docs.Checkout(tmp_path))
    (tmp_path / docs.PAGES).mkdir(parents=True)
    (tmp_path / "README.md").write_text("as it is\n")
    missing, changed, right = kept
    (tmp_path / changed).write_text(kept[changed].replace("the", "teh", 1))
    (tmp_path / right).write_text(kept[right])
    (tmp_path / docs.PAGES / "KL999.md").write_text("gone\n")
    assert docs.main([]) == 1
    said = capsys.readouterr().out
    assert missing in said
    assert changed in said
    assert "KL999" in said
    assert right not in said
    assert docs.main(["--write"]) == 0
    assert docs.main([]) == 0
    assert {f"{docs.PAGES}/{file.name}": file.read_text() for file in (tmp_path / docs.PAGES).iterdir()} == kept


def test_prose_is_not_taken_for_markup():
    assert docs.escaped("a_b * [c](d) <e> `f` |g| $h$") == r"a\_b \* \[c\](d) \<e\> \`f\` \|g\| \$h\$"


def test_a_changed_number_in_the_readme_is_noticed(fresh, monkeypatch):
    monkeypatch.setattr(docs, "BLOCKS", {name: (lambda text=text: text) for name, text in fresh.items()})
    assert docs.stale(README.replace("0.474", "0.475")).keys() == {"grade"}
    assert docs.stale(README.replace("| `k1-loss` | loss | 0 |", "| `k1-loss` | loss | 1 |")).keys() == {"estimators"}


def test_rounding_noise_is_no_change_but_a_number_is():
    assert docs.NOISE.sub("0", "bias 6.16e-16, std 1.82e-3") == "bias 0, std 1.82e-3"


def test_a_part_is_replaced_and_nothing_else():
    page = "a\n<!-- begin: x -->\nold\n<!-- end: x -->\nb\n<!-- begin: y -->\n<!-- end: y -->\n"
    assert docs.replace(page, "x", "new\n") == page.replace("old", "new")
    assert docs.blocks(page) == {"x": "old\n", "y": ""}
    with pytest.raises(UsageError, match="begin: z"):
        docs.replace(page, "z", "")


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


def test_every_link_and_picture_of_the_pages_exists():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"(?<!\\)\]\(([^)\s]+)\)", text):
            reached = page.parent / target.split("#")[0]
            assert target.startswith("http") or reached.exists(), f"{page.name} points to {target}"


def test_ci_runs_exactly_the_readmes_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    extract = next(line for line in script.splitlines() if line.startswith("command="))
    done = subprocess.run(
        ["bash", "-c", f'{extract}; printf %s "$command"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"```bash\n{done.stdout}\n```\n" == docs.blocks(README)["test-command"]
    assert "pytest" in done.stdout
    assert "constraints.txt" in done.stdout


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
        environment = {**os.environ, "PYTHON": str(python)}
        return subprocess.run(["bash", script], capture_output=True, text=True, env=environment, check=False)

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
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["type"] in ("software", "dataset")
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    assert citation["version"] == PROJECT["version"] == kltest.__version__
    assert citation["license"] == PROJECT["license"]
    assert isinstance(citation["version"], str)
    known = {"cff-version", "message", "type", "title", "abstract", "authors", "version", "license", "keywords", "url"}
    known |= {"repository-code", "date-released", "doi", "identifiers", "references", "preferred-citation"}
    assert citation.keys() <= known


def test_the_workflow_runs_the_ci_script():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert {"run": ".ci/run"} in workflow["jobs"]["tests"]["steps"]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    matches = {line: re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][0-9A-Za-z.]*)", line) for line in lines}
    assert all(matches.values()), "every line is NAME==VERSION"
    return {canonicalize_name(match[1]): match[2] for match in matches.values() if match}


def needed() -> dict[str, list[Requirement]]:
    """Everything that the README's two commands install, by following the installed packages' own requirements."""
    found: dict[str, list[Requirement]] = {}
    waiting = [Requirement("kltest[paper,test]")]
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
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(child)
    found.pop("kltest")
    return found


def is_pinned_by_its_user(requirements: list[Requirement]) -> bool:
    """Wheels of torch for accelerators ask for exact versions of their own, which needs no second pin."""
    return any(str(requirement.specifier).startswith("==") for requirement in requirements)


def test_constraints_cover_everything_that_is_installed_and_nothing_else():
    required = needed()
    # Extras of this checkout may be newer than the installed metadata, so the project's own file is what counts.
    # JAX (400 MB) is in an extra that neither the tests nor the paper ask for: what needs it is skipped without it.
    extras = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name != "jax"}
    own = [*PROJECT["dependencies"], *(line for lines in extras.values() for line in lines)]
    assert {canonicalize_name(Requirement(line).name) for line in own} - {"kltest"} <= required.keys()
    assert {name for name, asked in required.items() if not is_pinned_by_its_user(asked)} - pins().keys() == set()
    assert pins().keys() - required.keys() == set()


def test_constraints_meet_what_is_asked_for():
    for name, requirements in needed().items():
        for requirement in requirements:
            if name in pins():
                assert requirement.specifier.contains(pins()[name], prereleases=True), f"{requirement} against the pin"


def test_this_environment_is_the_pinned_one():
    """The README's command installs with the constraints; elsewhere than in CI other versions are fine, but said."""
    installed = {name: metadata.version(name).split("+")[0] for name in pins()}
    different = {name: (version, pins()[name]) for name, version in installed.items() if version != pins()[name]}
    assert not (different and os.environ.get("CI")), different
    if different:
        pytest.skip(f"other versions than the pinned ones: {different}")


def test_the_pages_say_nothing_of_the_python_that_is_not_so():
    assert PROJECT["requires-python"] == ">=3.11"
    assert "Python 3.11 or later" in README
    assert sys.version_info >= (3, 11)

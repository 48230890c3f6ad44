"""Nothing heavy is loaded where it is not used: by commands, by tables that are listed, by a report that is shown."""

import sys

import pytest
from processes import ran
from trial import CHECKOUT

from kltest.adapters import NAMES, find
from kltest.cli.application import COMMANDS

HEAVY = {"torch", "numpy", "scipy", "pandas", "matplotlib"}
LIBRARIES = {find(name).module.partition(".")[0] for name in NAMES}
WORDS = "from kltest.checks import CHECKS; [(c.title, c.what, c.wrong_code, c.remedy()) for c in CHECKS.values()]"
GRADED = "report = kltest.grade('k3-loss', environment='bandit', select='KL101'); str(report); repr(report)"
# Words of the command line, or Python, and what must not be loaded by them: after one another in one process.
STEPS = [
    (["--help"], HEAVY | {f"kltest.cli.{module}" for module, _ in COMMANDS.values()}),
    ("from kltest.truth import ATLAS, parse, render; render(parse('-entropy'))", HEAVY),
    (["grade", "--help"], HEAVY),
    (["grade", "k3-loss", "--sampler", "x"], HEAVY),
    ("from kltest.estimators import registry; registry()", {"torch"}),
    (
        "from kltest.checks import CHECKS; [(c.title, c.what, c.wrong_code, c.remedy()) for c in CHECKS.values()]",
        {"torch"},
    ),
    ("from kltest.cli.libraries import listing; listing()", {"torch", "jax", "transformers", *LIBRARIES}),
    (["grade", "k3-los"], {"torch"}),
    (["grade", "k3-loss", "--diff", "missing.json"], {"torch"}),
    (["grade", "losses.py:truth", "--output", "json:missing/x.json"], {"torch"}),
    (["explain", "KL102"], {"torch", "pandas", "matplotlib"}),
    (["list"], {"torch", "pandas", "matplotlib"}),
    (["grade", "losses.py:truth", "--environment", "bandit"], {"pandas", "matplotlib", "joblib", "scipy.stats"}),
    (["scan", "losses.py"], {"pandas", "matplotlib", "joblib"}),
    ("import torch", set()),
    (GRADED, {"pandas", "matplotlib"}),
    ("import kltest.grading.grader, kltest.loss.jax", {"jax"}),
    (["finetune", "--list"], {"transformers"}),
]
SCRIPT = f"""
import contextlib, io, sys
import kltest
from typer.testing import CliRunner
from kltest.cli import app

for step, forbidden in {STEPS!r}:
    before = set(sys.modules)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(step) if isinstance(step, str) else CliRunner().invoke(app, step)
    assert not forbidden & (sys.modules.keys() - before), (step, forbidden & sys.modules.keys())
print(kltest.grade, kltest.Report, dir(kltest))
"""


@pytest.mark.scheduled
def test_nothing_heavy_is_imported_where_it_is_not_used(tmp_path):
    (tmp_path / "losses.py").write_text("def truth(logp, ref_logp):\n    return (logp - ref_logp).sum(-1) ** 2 / 2\n")
    run = ran(sys.executable, "-c", SCRIPT, cwd=tmp_path)
    assert "function grade" in run.stdout, run.stderr


@pytest.mark.parametrize(("words", "library"), [(["libraries", "--list"], "pandas"), (["figures"], "joblib")])
def test_a_command_says_which_library_it_lacks(words, library):
    """An installation for grading alone may leave them out."""
    program = (
        f"import sys; sys.modules[{library!r}] = None; from kltest.cli import main; sys.argv[1:] = {words!r}; main()"
    )
    run = ran(sys.executable, "-c", program, cwd=CHECKOUT.root)
    assert run.returncode == 2
    said = f"this command needs {library}, which is not installed here; `python -m pip install {library}`"
    assert run.stderr.endswith(f"kltest: {said}\n")

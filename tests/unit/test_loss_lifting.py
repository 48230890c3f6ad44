"""Lifting functions out of files that cannot be imported."""

from __future__ import annotations

import pytest
from called import RAGGED, WRITTEN, follows

import kltest
from kltest.errors import TargetError, UsageError
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve

BROKEN = "import no_such_accelerator\n"


@pytest.fixture
def write(write):
    """Write a file that cannot be imported, unless another head is given."""
    return lambda name, text, head=BROKEN: write(name, text, head)


LIBRARY = (WRITTEN / "library.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["library.py", "library"])
@pytest.mark.parametrize(
    "name", ["uses_everything", "with_config", "decorated", "is_even", "needs_it_elsewhere", "chosen"]
)
def test_what_can_be_lifted(form, name, write):
    write("library.py", LIBRARY)
    loss = resolve(f"{form}:{name}")
    assert "lifted out of library.py" in loss.notes[0]
    assert "No module named 'no_such_accelerator'" in loss.notes[0]
    follows(loss)


def test_a_lifted_method_on_a_stand_in(write):
    write("library.py", LIBRARY)
    loss = resolve("library.py:Trainer.loss", Call(arguments={"self.beta": 1.5}))
    follows(loss, 3)
    assert any("Trainer was lifted without no_such_accelerator.Trainer" in note for note in loss.notes)
    assert any("bare" in note for note in loss.notes)
    with pytest.raises(UsageError, match=r"--arg self.beta=@beta"):
        resolve("library.py:Trainer.loss")(RAGGED)


def test_decorators_that_are_left_out_are_named_and_the_others_kept(write):
    write("library.py", LIBRARY)
    loss = resolve("library.py:never_differentiated")
    assert any("@no_such_accelerator.jit(fast=True) of never_differentiated" in note for note in loss.notes)
    assert not loss(RAGGED).objective.requires_grad


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("needs_it", "return no_such_accelerator.reduce(logp)", "No module named 'no_such_accelerator'"),
        ("needs_a_constant", "return logp * BAD", "math domain error"),
    ],
)
def test_a_name_that_cannot_be_had_is_named_with_the_line_that_uses_it(name, source, words, write):
    path = write("library.py", LIBRARY)
    with pytest.raises(TargetError) as refused:
        resolve(f"library.py:{name}")(RAGGED)
    frame = refused.value.frame
    assert frame.file == str(path)
    assert frame.source == source
    assert path.read_text().splitlines()[frame.line - 1].strip() == source
    assert "is not available to the lifted function" in str(refused.value)
    assert words in str(refused.value)


def test_a_function_that_cannot_be_defined(write):
    write("library.py", LIBRARY)
    with pytest.raises(TargetError, match=r"bad_default could not be lifted.*no_such_accelerator"):
        resolve("library.py:bad_default")


def test_a_name_that_is_not_there(write):
    write("library.py", LIBRARY)
    with pytest.raises(UsageError, match=r"did you mean masked_mean.*importing it failed"):
        resolve("library.py:masked_meen")
    with pytest.raises(UsageError, match=r"Trainer.*has no 'los'.*did you mean loss"):
        resolve("library.py:Trainer.los")


def test_only_what_is_needed_runs(write, capsys):
    write(
        "library.py",
        """
        print("ran")
        open("must-not-exist", "w")
        raise SystemExit(3)
        def loss(logp, ref_logp):
            return (logp - ref_logp) ** 2 / 2
        """,
        head="",
    )
    loss = resolve("library.py:loss")
    assert "SystemExit" in loss.notes[0]
    follows(loss)
    assert capsys.readouterr().out == "ran\n", "once, at the import that was tried first"


@pytest.mark.parametrize("target", ["pack.models.utils:compute", "pack/models/utils.py:compute"])
def test_a_package_whose_init_fails(target, write):
    """What OpenRLHF's layout asks for: the module itself is harmless, its parents are not."""
    write("pack/__init__.py", "")
    write("pack/models/__init__.py", "from .actor import Actor\n")
    write("pack/models/actor.py", "class Actor: pass\n")
    write("pack/models/constants.py", "HALF = 0.5\nclass Never(no_such_accelerator.X): pass\n")
    write("pack/models/helpers.py", "from .constants import *\ndef half(x):\n    return HALF * x\n")
    write("pack/other.py", "def square(x):\n    return x ** 2\n")
    write("pack/late.py", "def one():\n    return 1.0\n")
    write(
        "pack/models/utils.py",
        """
        from typing import Optional
        from .helpers import half as halved
        from . import constants
        from pack.other import square
        from .. import other

        def compute(log_probs, log_probs_base: Optional[int] = None):
            from ..late import one
            assert constants.HALF == 0.5 and other.square(2) == 4
            return halved(square(log_probs - log_probs_base)) * one()
        """,
    )
    loss = resolve(target)
    assert "lifted out of utils.py" in loss.notes[0]
    follows(loss)


def test_a_sibling_that_lacks_the_name(write):
    write("pack/__init__.py", "")
    write("pack/helpers.py", "")
    write("pack/utils.py", "from .helpers import gone\ndef loss(logp):\n    return gone(logp)\n")
    with pytest.raises(TargetError) as refused:
        resolve("pack/utils.py:loss")(RAGGED)
    assert refused.value.frame.source == "return gone(logp)"
    assert "line 2 of utils.py" in str(refused.value)


CONDITIONAL = """
    try:
        import no_such_accelerator.fused as backend
        from no_such_accelerator import half
    except Exception:
        from math import pi
        half = 0.5
        backend = None

    def loss(logp, ref_logp):
        assert backend is None
        return half * (logp - ref_logp) ** 2
"""
FAILING_BLOCK = """
    if True:
        half = 0.5
        import no_such_accelerator.fused
        whole = 1.0

    def loss(logp, ref_logp):
        return half * (logp - ref_logp) ** 2

    def other(logp, ref_logp):
        return whole * loss(logp, ref_logp)
"""
CHANGED_LATER = """
    if True:
        half, scale = 0.5, 3.0
    scale = scale / 3

    def loss(logp, ref_logp):
        return half * scale * (logp - ref_logp) ** 2
"""
CIRCLE = """
    from .b import second
    def first(x):
        return x
    def loss(logp, ref_logp):
        return second(logp, ref_logp)
"""
SECOND = "from .a import first\ndef second(x, y):\n    return first((x - y) ** 2 / 2)\n"
TOTAL = "def total(x, y):\n    return (x - y) ** 2 / 2\n"


def of_total(imports, name):
    return f"{imports}\ndef loss(logp, ref_logp):\n    return {name}total(logp, ref_logp)\n"


@pytest.mark.parametrize(
    ("files", "target"),
    [
        ({"library.py": CONDITIONAL}, "library.py"),
        ({"library.py": FAILING_BLOCK}, "library.py"),
        ({"library.py": CHANGED_LATER}, "library.py"),
        ({"pack/__init__.py": "", "pack/a.py": CIRCLE, "pack/b.py": SECOND}, "pack/a.py"),
        # Python remembers where it found a package, so each is called otherwise.
        *(
            (
                {
                    f"{tree}/loss.py": of_total(lines.format(tree), name.format(tree)),
                    f"{tree}/utils.py": TOTAL,
                    f"{tree}/inner/utils.py": TOTAL,
                    **dict.fromkeys([f"{tree}/__init__.py", f"{tree}/inner/__init__.py"] if package else [], ""),
                },
                f"{tree}/loss.py",
            )
            for package in (True, False)
            for number, (lines, name) in enumerate(
                [
                    ("from {} import utils", "utils."),
                    ("from {}.inner import utils", "utils."),
                    ("import {}.utils as utils", "utils."),
                    ("import {0}.inner.utils", "{0}.inner.utils."),
                ]
            )
            for tree in [f"tree{number}{package}"]
        ),
        *(
            (
                {
                    f"repository/{inner}{package}/__init__.py": "",
                    f"repository/{inner}{package}/ops.py": TOTAL,
                    "repository/apps/train/main.py": of_total(f"from {package}.ops import total", ""),
                },
                "repository/apps/train/main.py",
            )
            for inner, package in (("", "beside"), ("src/", "in_src"))
        ),
    ],
)
def test_trees_of_files_that_cannot_be_imported(files, target, write):
    for name, text in files.items():
        write(name, text)
    follows(resolve(f"{target}:loss"))


def test_a_block_that_fails_leaves_what_it_did_not_bind(write):
    write("library.py", FAILING_BLOCK)
    with pytest.raises(TargetError, match=r"whole is not available to the lifted function: line 3 of library"):
        resolve("library.py:other")(RAGGED)


def test_a_compiled_function_is_not_compiled_for_its_program_either(tmp_path, monkeypatch):
    """Compiling tiny batches takes minutes: neither grading nor running the program without kltest does it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compiled_terms.py").write_text(
        "import torch\n\n\ndef refuse(graph, inputs):\n    raise RuntimeError('it was compiled')\n\n\n"
        "@torch.compile(backend=refuse, dynamic=True)\n"
        "def penalty(logp, ref_logp):\n    return (logp - ref_logp).exp() - 1 - (logp - ref_logp)\n"
    )
    report = kltest.grade("compiled_terms.py:penalty", environment="bandit", select="KL1")
    assert report.verdict == "refuted"
    assert "penalty(" in report.smallest.code

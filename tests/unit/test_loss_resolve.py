"""From the text of a target to a loss: registered names, modules, files, methods, and everything that is none."""

from __future__ import annotations

import pytest
import torch
from called import RAGGED, WRITTEN, by_hand, follows, gradient, u

from kltest.errors import TargetError, UsageError
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve

PLAIN = (WRITTEN / "plain.py").read_text(encoding="utf-8")
NAMED = {"log_p": "@logp", "log_q": "@ref_logp", "kind": "mse"}
TRAINER = """
    class Trainer:
        def loss(self, per_token_logps, ref_per_token_logps):
            self.seen = "written on the stand-in"
            return -per_token_logps.exp() + self.args.beta * (per_token_logps - ref_per_token_logps) ** 2 / 2
"""


# --- registered names


@pytest.mark.parametrize("text", ["k3-loss", "k3_loss", "K3-Loss", "k3", " k3-loss "])
def test_registered_names_and_aliases(text):
    loss = resolve(text)
    assert (loss.name, loss.spec.name) == ("k3-loss", "k3-loss")
    torch.testing.assert_close(gradient(loss), by_hand(RAGGED, 1 - (-u(RAGGED)).exp()))


def test_the_specs_placement_and_credit_are_the_defaults():
    assert resolve("k1-reward").placement == "reward"
    assert resolve("k1-reward-to-go").credit == "to-go"
    assert resolve("k1-reward-to-go", Call(credit="immediate")).credit == "immediate"
    assert resolve("k3-loss", Call(placement="reward")).placement == "reward"
    to_go = (u(RAGGED) * RAGGED.peek("mask")).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(gradient(resolve("k1-reward-to-go")), by_hand(RAGGED, to_go))


# --- modules and files


@pytest.mark.parametrize(
    ("names", "arguments", "scale"),
    [
        ("k2", {}, 1),
        ("Losses.static", {}, 1),
        ("Losses.of_class", {}, 1),
        ("Losses.Inner.deep", {}, 1),
        ("instance.plain", {}, 1),
        ("named", NAMED, 1),
        ("Losses.plain", {"self.beta": 3.0, "self.one": 1}, 3),
    ],
)
@pytest.mark.parametrize("where", ["mine", "mine.py", "./mine.py", "{folder}/mine.py", "{folder}/folder/random.py"])
def test_functions_and_methods_of_a_module_and_of_a_file(where, names, arguments, scale, write, tmp_path):
    """Of a file that is called like a standard module too; none runs as a script."""
    write("mine.py", PLAIN)
    write("folder/random.py", PLAIN)
    where = where.format(folder=tmp_path)
    loss = resolve(f"{where}:{names}", Call(arguments=arguments))
    assert (loss.name, len(loss.notes)) == (f"{where}:{names}", int(names == "Losses.plain"))
    follows(loss, scale)


@pytest.mark.parametrize(
    ("files", "target"),
    [
        ({f"{name}.py": "" for name in ("pack/__init__", "pack/sub/__init__")}, "pack/sub/loss.py"),
        ({}, "folder/loss.py"),
    ],
)
def test_a_file_may_import_its_neighbours_as_part_of_its_package_or_not(files, target, write):
    folder, dot = target.rpartition("/")[0], "." if files else ""
    for name, text in files.items():
        write(name, text)
    write(f"{folder}/helpers.py", PLAIN)
    write(target, f"from {dot}helpers import k2\ndef loss(logp, ref_logp):\n    return k2(logp, ref_logp)\n")
    loss = resolve(f"{target}:loss")
    assert loss.notes == []
    follows(loss)


def test_a_target_may_be_written_as_pytest_writes_it(write):
    write("mine.py", PLAIN)
    follows(resolve("mine.py::Losses::static"))


def test_the_coefficient_may_come_through_self(write):
    write("trainer.py", TRAINER)
    loss = resolve("trainer:Trainer.loss", Call(arguments={"self.args.beta": "@beta"}, beta=0.25))
    assert loss.takes == {"logp", "ref_logp", "beta"}
    follows(loss)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("k3-los", "did you mean k3-loss"),
        ("nowhere.to.be:found", "no module 'nowhere.to.be'"),
        ("kltest.nothing:found", "kltest has no submodule 'nothing'"),
        ("kltest.estimator:k3", "did you mean estimators"),
        ("mine:k3", "did you mean k2"),
        ("mine:Losses.sttic", "did you mean static"),
        ("mine:zzz", "it defines k2, Losses"),
        ("mine:number", "mine:number is an int and cannot be called"),
        ("mine:", "is no loss"),
        (":k2", "is no loss"),
        ("mine:k2:k2", "is no loss"),
        ("a b:c", "is no loss"),
        ("mine.k2", "behind a colon, mine:k2"),
        ("mine:named", "log_p"),
        ("mine:Losses.plain", "'beta'; give it with --arg self.beta=@beta"),
        ("mine.py:Losses.plain", "'beta'; give it with --arg self.beta=@beta"),
        ("folder/mine.py", "name a function of it, mine.py:FUNCTION; k2, Losses.static"),
        ("folder/mine.py:3x", "name a function"),
        ("folder/main.py:k2", "no file folder/main.py; did you mean mine.py"),
        (f"{'x' * 5000}.py:k2", "there is no file"),
        ("other/mine.py:k2", "folder other does not exist"),
        ("folder/mine:k2", "looks like a path"),
        ("C:\\code\\mine.py:k2", "no file"),
        ("C:\\code\\mine:k2", "looks like a path"),
        ("a.py:k2", "is a folder"),
    ],
)
def test_targets_that_are_none(target, words, write):
    for name in ("mine.py", "folder/mine.py", "a.py/inside.py"):
        write(name, PLAIN)
    with pytest.raises(UsageError) as refused:
        resolve(target)(RAGGED)
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_module_that_fails_and_cannot_be_lifted_shows_its_frame(write):
    path = write("broken.py", "import math\n\nx = math.sqrt(-1)\n")
    with pytest.raises(UsageError, match="has no 'loss'") as refused:
        resolve("broken:loss")
    assert isinstance(refused.value.__cause__, ValueError)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("def loss(logp):\n    return logp +\n", TargetError, r"(?s):2, in .*return logp \+"),
        ("return 3\n", TargetError, "outside function"),
        ("\0\1", TargetError, "null bytes"),
        ("def __getattr__(name):\n    raise RuntimeError('needs a GPU')\n", TargetError, "needs a GPU"),
        ("raise KeyboardInterrupt\n", KeyboardInterrupt, None),
    ],
)
@pytest.mark.parametrize("target", ["odd:loss", "odd.py:loss"])
def test_modules_and_files_that_fail(text, error, words, target, write):
    write("odd.py", text)
    with pytest.raises(error, match=words):
        resolve(target)

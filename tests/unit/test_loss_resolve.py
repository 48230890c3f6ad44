"""From the text of a target to a loss: registered names, modules, files, methods, and everything that is none."""

from __future__ import annotations

import sys

import pytest
import torch
from called import RAGGED, by_hand, follows, gradient, u

from kltest.errors import TargetError, UsageError
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve

PLAIN = """
    def k2(logp, ref_logp):
        return (logp - ref_logp) ** 2 / 2

    class Losses:
        scale = 1.0

        @staticmethod
        def static(logp, ref_logp):
            return k2(logp, ref_logp)

        @classmethod
        def of_class(cls, logp, ref_logp):
            return cls.scale * k2(logp, ref_logp)

        def plain(self, logp, ref_logp):
            return self.beta * self._helper(logp, ref_logp) * self.scale * self.unit

        def _helper(self, logp, ref_logp):
            return k2(logp, ref_logp)

        @property
        def unit(self):
            return self.one

        class Inner:
            @staticmethod
            def deep(logp, ref_logp):
                return k2(logp, ref_logp)

    instance = Losses()
    number = 3
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


def test_a_name_that_is_nearly_registered():
    with pytest.raises(UsageError, match="did you mean k3-loss"):
        resolve("k3-los")


# --- modules


@pytest.mark.parametrize("target", ["k2", "Losses.static", "Losses.of_class", "Losses.Inner.deep"])
def test_functions_and_methods_of_a_module_in_the_current_directory(target, write):
    write("mine.py", PLAIN)
    loss = resolve(f"mine:{target}")
    assert loss.name == f"mine:{target}"
    assert loss.notes == []
    follows(loss)


@pytest.mark.parametrize("where", ["mine:", "mine.py:"])
def test_a_plain_method_gets_a_stand_in_for_self(where, write):
    write("mine.py", PLAIN)
    follows(resolve(f"{where}Losses.plain", Call(arguments={"self.beta": 3.0, "self.one": 1})), 3)
    with pytest.raises(UsageError, match=r"'beta'; give it with --arg self.beta=@beta"):
        resolve(f"{where}Losses.plain")(RAGGED)
    with pytest.raises(UsageError, match=r"--arg self.one=VALUE"):
        resolve(f"{where}Losses.plain", Call(arguments={"self.beta": 3.0}))(RAGGED)


def test_the_coefficient_may_come_through_self(write):
    write(
        "trainer.py",
        """
        class Trainer:
            def loss(self, per_token_logps, ref_per_token_logps):
                self.seen = "written on the stand-in"
                return -per_token_logps.exp() + self.args.beta * (per_token_logps - ref_per_token_logps) ** 2 / 2
        """,
    )
    loss = resolve("trainer:Trainer.loss", Call(arguments={"self.args.beta": "@beta"}, beta=0.25))
    assert loss.takes == {"logp", "ref_logp", "beta"}
    follows(loss)


def test_a_bound_method_of_a_module_level_object(write):
    write("mine.py", PLAIN + "    instance.beta = 2.0\n    instance.one = 1.0\n")
    follows(resolve("mine:instance.plain"), 2)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.to.be:found", "no module 'nowhere.to.be'"),
        ("kltest.nothing:found", "kltest has no submodule 'nothing'"),
        ("kltest.estimator:k3", "did you mean estimators"),
        ("mine:k3", "did you mean k2"),
        ("mine:Losses.sttic", "did you mean static"),
        ("mine:zzz", "it defines k2, Losses"),
        ("mine:number", "mine:number is an int and cannot be called"),
        ("mine:Losses.scale", "mine:Losses.scale is a float"),
        ("mine:", "is no loss"),
        (":k2", "is no loss"),
        ("mine:k2:k2", "is no loss"),
        ("a b:c", "is no loss"),
        ("mine.k2", "behind a colon, mine:k2"),
    ],
)
def test_modules_that_do_not_have_it(target, words, write):
    write("mine.py", PLAIN)
    with pytest.raises(UsageError) as refused:
        resolve(target)
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_module_that_fails_and_cannot_be_lifted_shows_its_frame(write):
    path = write("broken.py", "import math\n\nx = math.sqrt(-1)\n")
    with pytest.raises(UsageError, match="has no 'loss'") as refused:
        resolve("broken:loss")
    assert isinstance(refused.value.__cause__, ValueError)
    assert str(path) in str(refused.value)


def test_a_module_with_a_syntax_error(write):
    write("typo.py", "def loss(logp):\n    return logp +\n")
    for target in ("typo:loss", "typo.py:loss"):
        with pytest.raises(TargetError) as refused:
            resolve(target)
        assert refused.value.frame.line == 2
        assert "return logp +" in str(refused.value)


def test_a_lazy_attribute_that_fails(write):
    write("lazy.py", "def __getattr__(name):\n    raise RuntimeError('needs a GPU')\n")
    with pytest.raises(TargetError, match="needs a GPU"):
        resolve("lazy:loss")


def test_prints_at_import_are_left_alone(write, capsys):
    write("chatty.py", "print('hello')\ndef loss(logp):\n    return logp\n")
    resolve("chatty:loss")
    assert capsys.readouterr().out == "hello\n"


def test_an_interrupt_at_import_passes(write):
    write("stop.py", "raise KeyboardInterrupt\n")
    for target in ("stop:loss", "stop.py:loss"):
        with pytest.raises(KeyboardInterrupt):
            resolve(target)


# --- files


@pytest.mark.parametrize("target", ["k2", "Losses.static", "Losses.of_class"])
@pytest.mark.parametrize("form", ["relative", "dotted", "absolute"])
def test_functions_and_methods_of_a_file(target, form, write):
    path = write("folder/mine.py", PLAIN)
    text = {"relative": "folder/mine.py", "dotted": "./folder/mine.py", "absolute": str(path)}[form]
    loss = resolve(f"{text}:{target}")
    assert loss.notes == []
    follows(loss)


def test_a_file_is_imported_as_part_of_its_package(write):
    write("pack/__init__.py", "")
    write("pack/sub/__init__.py", "")
    write("pack/sub/helpers.py", PLAIN)
    write("pack/sub/loss.py", "from .helpers import k2\ndef loss(logp, ref_logp):\n    return k2(logp, ref_logp)\n")
    loss = resolve("pack/sub/loss.py:loss")
    assert loss.notes == []
    assert sys.modules["pack.sub.loss"].loss is not None
    follows(loss)


def test_a_file_may_import_its_neighbours(write):
    write("folder/beside_it.py", PLAIN)
    write("folder/mine.py", "from beside_it import k2\ndef loss(logp, ref_logp):\n    return k2(logp, ref_logp)\n")
    follows(resolve("folder/mine.py:loss"))


def test_a_file_does_not_run_as_a_script(write):
    write("script.py", PLAIN + "    if __name__ == '__main__':\n        raise SystemExit('ran')\n")
    loss = resolve("script.py:k2")
    assert loss.notes == []


def test_a_file_named_like_a_standard_module(write):
    write("random.py", PLAIN)
    follows(resolve("random.py:k2"))
    import random

    assert hasattr(random, "randint")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("folder/mine.py", ["name a function", "k2, Losses.static"]),
        ("folder/mine.py:", ["name a function"]),
        ("folder/mine.py:k3", ["did you mean k2"]),
        ("folder/mine.py:3x", ["name a function"]),
        ("folder/main.py:k2", ["no file folder/main.py", "did you mean mine.py"]),
        ("other/mine.py:k2", ["folder other does not exist"]),
        ("folder/mine:k2", ["looks like a path"]),
        ("C:\\code\\mine.py:k2", ["no file"]),
        ("C:\\code\\mine:k2", ["looks like a path"]),
        ("a.py:k2", ["is a folder"]),
    ],
)
def test_files_that_do_not_have_it(target, words, write):
    write("folder/mine.py", PLAIN)
    write("a.py/inside.py", PLAIN)
    with pytest.raises(UsageError) as refused:
        resolve(target)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_file_that_is_no_python(write, tmp_path):
    (tmp_path / "binary.py").write_bytes(b"\x00\x01\xff")
    with pytest.raises(TargetError):
        resolve("binary.py:loss")


# --- arguments through a target


def test_arguments_reach_the_function(write):
    write("mine.py", "def loss(log_p, log_q, kind):\n    return (log_p - log_q) ** 2 / 2 if kind == 'mse' else None\n")
    arguments = {"log_p": "@logp", "log_q": "@ref_logp", "kind": "mse"}
    loss = resolve("mine:loss", Call(arguments=arguments))
    assert loss.call.arguments == arguments
    follows(loss)
    with pytest.raises(UsageError, match="log_p"):
        resolve("mine:loss")


def test_an_argument_for_self_where_there_is_none(write):
    write("mine.py", PLAIN)
    with pytest.raises(UsageError, match=r"Class\.method"):
        resolve("mine:k2", Call(arguments={"self.beta": 1}))

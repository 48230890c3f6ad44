"""Objects built from the defaults of their class, and the message that names every parameter that nothing fills."""

from __future__ import annotations

import sys

import pytest
import torch
from called import RAGGED, WRITTEN, follows

import kltest
from kltest.errors import UsageError
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve

CLASSES = (WRITTEN / "classes.py").read_text(encoding="utf-8")


@pytest.fixture
def classes(write):
    return write("mine.py", CLASSES)


@pytest.mark.parametrize(
    ("target", "weight", "note"),
    [
        ("OfDefaults.loss", 2, "self is OfDefaults(), built from its defaults"),
        ("OfAConfig.loss", 3, "self is OfAConfig(), built from its defaults"),
        ("Module.penalty", 2, "self is Module()"),
        ("Child.loss", 4, "self is Child()"),
        ("typed", 6, "config is Config(), built from its defaults"),
        ("quoted", 5, "cfg is Settings()"),
        ("positional", 5, "settings is Settings()"),
        ("optional", 1, None),
        ("Fails.loss", 4, None),
    ],
)
def test_objects_are_built_from_defaults(target, weight, note, classes):
    loss = resolve(f"mine.py:{target}")
    follows(loss, weight)
    assert [note in text for text in loss.notes] == ([] if note is None else [True]), loss.notes


@pytest.mark.parametrize(
    ("target", "arguments", "weight"),
    [
        ("OfDefaults.loss", {"self.weight": 7.0}, 7),
        ("OfAConfig.loss", {"self.config.kl.weight": 7.0}, 7),
        ("OfAConfig.loss", {"self.config": "@rollout", "self.config.kl": 1}, None),
        ("Module.penalty", {"self.config.scale": 0.5}, 0.5),
        ("Child.loss", {"self.weight": "@beta"}, 2),
        ("typed", {"config.kl.weight": 0.5}, 1),
        ("typed", {"config.scale": "@beta"}, 3),
        ("quoted", {"cfg.weight": 0.25}, 0.25),
        ("optional", {"config.scale": 0.1}, 0.1),
        ("Unset.loss", {"self.weight": 3.0}, 3),
        ("Unset.loss", {"self.config.weight": 3.0}, 3),
        ("needs", {"config.weight": 3.0}, 3),
    ],
)
def test_dotted_arguments_win(target, arguments, weight, classes):
    if weight is None:
        with pytest.raises(UsageError, match="one of the two"):
            resolve(f"mine.py:{target}", Call(arguments=arguments))
        return
    follows(resolve(f"mine.py:{target}", Call(arguments=arguments)), weight)


def test_an_attribute_that_the_object_lacks(classes):
    with pytest.raises(UsageError, match=r"Unset\(\) and has no 'weight'; give it with --arg self.weight=VALUE"):
        resolve("mine.py:Unset.loss")(RAGGED)
    with pytest.raises(UsageError, match=r"config.scal=…: a Config has no 'scal'; did you mean scale"):
        resolve("mine.py:typed", Call(arguments={"config.scal": 1.0}))(RAGGED)


def test_a_method_given_in_python(classes):
    resolve("mine:k2", Call(arguments={"weight": 1.0}))
    module = sys.modules["mine"]
    follows(bind(module.OfAConfig.loss), 3)
    follows(bind(module.OfDefaults.loss, Call(arguments={"self.weight": 7.0})), 7)


def test_a_configuration_is_lifted_with_its_function(write):
    write("pack/__init__.py", "")
    write(
        "pack/config.py",
        "import nowhere\n\nclass Config:\n    def __init__(self, weight=3.0):\n        self.weight = weight\n",
    )
    write(
        "pack/losses.py",
        """
        from __future__ import annotations
        import nowhere
        from .config import Config

        def loss(logp, ref_logp, config: Config):
            return config.weight * (logp - ref_logp) ** 2 / 2
        """,
    )
    loss = resolve("pack/losses.py:loss")
    assert "config is Config()" in " ".join(loss.notes)
    follows(loss, 3)


def test_what_is_random_in_an_object_is_the_same_in_every_run(classes):
    one, other = (resolve("mine.py:Module.penalty").arguments.receiver.built for _ in range(2))
    assert one is not other
    assert torch.equal(one.noise, other.noise)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "model",
            [
                "the parameters 'policy', 'data', 'u', 'ref' and 'prev_logprobs'",
                "did you mean old_logp",
                "--arg NAME.ATTRIBUTE=VALUE",
            ],
        ),
        ("whole", ["the parameters 'data' and 'group_advantage' of", "(Batch is not built by its defaults)"]),
        (
            "needs",
            ["the parameter 'config' of ", "(Needs is not built by its defaults)", "--arg config.ATTRIBUTE=VALUE"],
        ),
    ],
)
def test_all_that_cannot_be_filled_is_named_at_once(target, words, classes):
    with pytest.raises(UsageError) as refused:
        resolve(f"mine.py:{target}")
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert "'logp'" not in str(refused.value)


def test_the_report_of_a_method_says_how_its_object_was_made(classes):
    report = kltest.grade("mine.py:Child.loss", environment="bandit", select="KL101")
    assert report.gradients[0].identified == {"reverse_kl": pytest.approx(4)}
    assert "built from its defaults" in " ".join(report.notes)

"""`kltest pin`: files that are green today, and red with the right sentence once a gradient moves."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner
from weekly import first

from kltest.cli import app
from kltest.counterexample.pin import NAMES, STALE_SUFFIXES, SUFFIXES
from kltest.grading.isolated import Child, without_kltest
from kltest.grading.pinning import MOST_BYTES, MOST_SECONDS
from kltest.truth import ATLAS

LOSSES = """
import torch


def k3(logp, ref_logp, mask):
    log_ratio = ref_logp - logp
    kl = log_ratio.exp() - log_ratio - 1
    return (kl * mask).sum(-1).mean()


def per_token(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2


def charged(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).exp()
    return (ratio * (logp - ref_logp).detach() * mask).sum(-1)


def kl(logp, ref_logp, mask, kind="k1", coef=0.1):
    u = logp - ref_logp
    each = {"k1": u, "k2": u**2 / 2, "k3": (-u).exp() + u - 1}[kind]
    return coef * (each * mask).sum(-1).mean()
"""
TARGETS = ("losses.py:k3", "losses.py:per_token", "losses.py:charged")
# A change of LOSSES, the test that fails, and what its message says: the next-token forms are those of kltest's atlas.
NEXT_TOKEN = "local_reverse_kl (the next-token part of the reverse KL)"
FORWARD = "local_forward_kl (the forward KL of each next token"
CHANGES = {
    "k3 to k2": (
        "log_ratio.exp() - log_ratio - 1",
        "log_ratio**2 / 2",
        "k3",
        FORWARD,
        f"now it follows 1 × {NEXT_TOKEN}",
    ),
    "no ratio": (
        *(
            "ratio * (logp",
            "(1 + logp - logp.detach()) * (logp",
            "charged",
            f"(ragged, stale) followed 1 × {NEXT_TOKEN[:16]}",
        ),
        "now it follows 1 × local_reverse_kl@rollouts",
    ),
    "another form": (
        *("(logp - ref_logp) ** 2 / 2", "((logp - ref_logp) ** 2 / 2).sum()", "per_token"),
        *("it returned a number per token", "returns now a tensor of shape ()"),
    ),
    "a parameter": ("def k3(logp,", "def k3(log_probs_new,", "k3", "losses.py:k3: it can no longer be called", "logp"),
}
SAME = {
    "another formula": ("(logp - ref_logp) ** 2 / 2", "logp * (logp - ref_logp).detach()"),
    "ratio by its value": ("ratio * (logp", "(logp - old_logp.clone()).exp() * (logp"),
    "a helper": (
        *("    kl = log_ratio.exp() - log_ratio - 1", "    kl = each(log_ratio)"),
        *("def per_token", "def each(x):\n    return x.exp() - x - 1\n\n\ndef per_token"),
    ),
}


def pin(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["pin", *words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text(LOSSES, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def pinned(tmp_path_factory) -> str:
    """The file of TARGETS."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("pinned")
        patch.chdir(home)
        Path("losses.py").write_text(LOSSES, encoding="utf-8")
        printed = pin(*TARGETS, "--output", "test_kl.py")
        assert "3 pins" in printed
        assert sorted(path.name for path in home.glob("*.py")) == ["losses.py", "test_kl.py"]
        return Path("test_kl.py").read_text(encoding="utf-8")


def run(folder: Path, text: str, losses: str) -> str:
    """The message with which the file fails; empty if it is green."""
    (folder / "losses.py").write_text(losses, encoding="utf-8")
    (folder / "test_kl.py").write_text(text, encoding="utf-8")
    with Child(without_kltest, str(folder / "test_kl.py"), str(folder)) as child:
        step = child.step(60)
    return "" if step.kind == "value" else step.message


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_moves_the_gradient_is_red_and_says_what_is_followed(folder, pinned, name):
    before, after, test, *words = CHANGES[name]
    assert before in LOSSES
    message = run(folder, pinned, LOSSES.replace(before, after))
    assert f"losses.py:{test}" in message, message
    for each in words:
        assert each in message, message


@pytest.mark.parametrize("name", SAME)
def test_a_change_that_keeps_the_gradient_is_green(folder, pinned, name):
    losses = LOSSES
    for before, after in zip(SAME[name][::2], SAME[name][1::2], strict=True):
        assert before in losses
        losses = losses.replace(before, after)
    assert run(folder, pinned, losses) == ""


def test_the_sentence_says_how_far_off_and_where_and_what_to_write(folder, pinned):
    message = run(folder, pinned, LOSSES.replace("** 2 / 2", "** 2"))
    assert re.search(r"off by 98\.72%, most for token \d (after \d|at the start): -?0\.\d+, where it was", message), (
        message
    )
    row = re.search(r'write ("ragged": \{.*?\}) into PINS', message)
    assert row is not None
    assert row[1] == '"ragged": {"local_reverse_kl": 2.0}'


def test_what_the_sentence_asks_for_makes_it_green(folder, pinned):
    changed = pinned.replace('"sequence": {"local_reverse_kl": 1.0}', '"sequence": {"local_reverse_kl": 2.0}', 1)
    for each in ("ragged", "far"):
        changed = changed.replace(f'"{each}": {{"local_reverse_kl": 1.0}}', f'"{each}": {{"local_reverse_kl": 2.0}}', 1)
    assert run(folder, changed, LOSSES.replace("** 2 / 2", "** 2")) == ""


def test_the_file_stands_alone(pinned):
    tree = ast.parse(pinned, feature_version=(3, 10))
    imports = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imports |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imports == {"importlib", "json", "sys", "contextlib", "itertools", "pathlib", "torch"}
    assert "import kltest" not in pinned
    assert len(pinned.encode()) < MOST_BYTES
    assert "losses.py:k3 follows local_forward_kl" in pinned
    assert "is meant to follow reverse_kl" in pinned


@pytest.mark.scheduled
def test_pytest_runs_the_file(folder, pinned):
    (folder / "test_kl.py").write_text(pinned, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_kl.py"]
    assert "4 passed" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_file_is_fast(folder, pinned):
    began = time.process_time()
    assert run(folder, pinned, LOSSES) == ""
    assert time.process_time() - began < MOST_SECONDS


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"losses.py:k3": {', '"losses.py:k9": {', "PINS and the functions differ"),
        ('"ragged": {"local_forward_kl"', '"raged": {"local_forward_kl"', "raged"),
        ('{"local_forward_kl": 1.0}', '{"local_forwards_kl": 1.0}', "local_forwards_kl"),
    ],
)
def test_unknown_keys_of_the_table_fail(folder, pinned, before, after, words):
    assert words in run(folder, pinned.replace(before, after, 1), LOSSES)


def test_the_names_are_those_of_the_atlas():
    assert set(NAMES) <= set(ATLAS)
    assert not {*SUFFIXES, *STALE_SUFFIXES} & set(ATLAS)


@pytest.mark.scheduled
def test_two_values_of_an_argument_are_two_settings(folder):
    printed = pin("losses.py:kl", "--arg", "kind=k2", "--arg", "kind=k3", "--output", "test_kl.py")
    assert "losses.py:kl kind=k2 follows 0.1 × local_reverse_kl\n" in printed
    assert "losses.py:kl kind=k3 follows 0.1 × local_forward_kl\n" in printed
    text = Path("test_kl.py").read_text(encoding="utf-8")
    assert run(folder, text, LOSSES) == ""
    assert "kind=k2) followed" not in run(folder, text, LOSSES.replace("(-u).exp() + u - 1", "u**2 / 2"))
    assert "losses.py:kl kind=k3" in run(folder, text, LOSSES.replace("(-u).exp() + u - 1", "u**2 / 2"))


REFUSED = {
    "an object": (
        "class Model:\n    def __init__(self):\n        self.scale = torch.nn.Linear(1, 1)\n\n"
        "    def loss(self, logp, ref_logp):\n        return (logp - ref_logp) ** 2 + 0 * self.scale.bias\n"
        "def loss(logp, ref_logp, model: Model):\n    return model.loss(logp, ref_logp)",
        "cannot be written down",
    ),
    "random numbers": (
        "def loss(logp, ref_logp):\n    return torch.rand(logp.shape) * (logp - ref_logp)",
        "random numbers",
    ),
    "many rows": (
        "def loss(logp, ref_logp, advantage):\n    assert len(logp) % 8 == 0, 'groups of 8, a batch size'\n"
        "    return ((logp - ref_logp).sum(-1) - (logp - ref_logp).sum(-1).mean()) ** 2",
        "more of them than a short test",
    ),
}


@pytest.mark.parametrize("name", first(1, REFUSED))
def test_what_cannot_be_pinned_is_refused_and_nothing_is_written(folder, name):
    text, words = REFUSED[name]
    (folder / "losses.py").write_text(f"import torch\n{text}\n", encoding="utf-8")
    batch = ("--group-size", "8") if name == "many rows" else ()
    message = pin("losses.py:loss", "--output", "test_kl.py", *batch, code=2)
    assert words in message
    assert len(message.splitlines()) <= 3, message
    assert [path.name for path in folder.glob("*.py")] == ["losses.py"]


def test_an_existing_file_stays_unless_forced(folder):
    (folder / "test_kl.py").write_text("mine", encoding="utf-8")
    assert "--force" in pin("losses.py:k3", "--output", "test_kl.py", code=2)
    assert (folder / "test_kl.py").read_text(encoding="utf-8") == "mine"
    pin("losses.py:k3", "--output", "test_kl.py", "--force")
    assert "losses.py:k3" in (folder / "test_kl.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["losses.py:k3", "--output", "test_kl.txt"], "no Python file"),
        (["losses.py:k3", "--output", "losses.py/none/test_kl.py"], "cannot be written"),
        (["losses.py:k4"], "k4"),
        (["k3-loss"], "part of kltest"),
        (["losses.py:k3", "--environment", "mdp"], "mdp"),
        (["losses.py:kl", "--arg", "kind"], "NAME=VALUE"),
    ],
)
def test_bad_input_is_refused(folder, words, said):
    assert said in pin(*words, code=2)
    assert [path.name for path in folder.glob("*.py")] == ["losses.py"]


def test_a_folder_that_is_missing_is_made(folder):
    pin("losses.py:k3", "--output", "none/yet/test_kl.py")
    assert "losses.py:k3" in (folder / "none/yet/test_kl.py").read_text(encoding="utf-8")


def test_a_file_that_is_red_on_the_day_is_not_left_behind(folder):
    """The loss knows if kltest is there, which the file does without."""
    text = LOSSES + "\n\ndef two_faced(logp, ref_logp):\n    import sys\n"
    text += "    return (logp - ref_logp) ** 2 * (1 if sys.modules.get('kltest') else 2)\n"
    (folder / "losses.py").write_text(text, encoding="utf-8")
    assert "not green" in pin("losses.py:two_faced", "--output", "test_kl.py", code=3)
    assert [path.name for path in folder.glob("*.py")] == ["losses.py"]


@pytest.mark.scheduled
def test_a_module_and_a_file_of_another_folder(folder):
    (folder / "package").mkdir()
    (folder / "package/__init__.py").touch()
    (folder / "package/helper.py").write_text("def square(x):\n    return x**2\n", encoding="utf-8")
    loss = "from .helper import square\n\n\nclass Trainer:\n    def loss(self, logp, ref_logp):\n"
    loss += "        return square(logp - ref_logp) / 2\n"
    (folder / "package/losses.py").write_text(loss, encoding="utf-8")
    (folder / "tests").mkdir()
    pin("package/losses.py:Trainer.loss", "--output", "tests/test_kl.py")
    text = (folder / "tests/test_kl.py").read_text(encoding="utf-8")
    assert 'load("..", "package.losses")' in text
    assert str(folder) not in text
    pin("package.losses:Trainer.loss", "--output", "tests/test_kl.py", "--force")
    assert "import package.losses as package_losses" in (folder / "tests/test_kl.py").read_text(encoding="utf-8")


OTHERS = """
import torch


def policy_loss(logp, ref_logp, old_logp, advantages, mask, beta=0.04):
    ratio = (logp - old_logp).exp()
    kl = (ref_logp - logp).exp() - (ref_logp - logp) - 1
    surrogate = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return (((surrogate + beta * kl) * mask).sum(-1) / mask.sum(-1)).mean()


def group_baseline(logp, ref_logp, reward, mask):
    penalty = ((logp - ref_logp).detach() * mask).sum(-1)
    return ((penalty - penalty.mean()) * (logp * mask).sum(-1)).mean()


def over_the_batch(logp, ref_logp, mask):
    return ((logp - ref_logp) ** 2 / 2 * mask).sum() / mask.sum()


def next_tokens(logits, ref_logits, mask):
    log_p, log_r = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return ((log_p.exp() * (log_p - log_r)).sum(-1) * mask).sum(-1).mean()


def half_precision(logp, ref_logp):
    return ((logp - ref_logp).to(torch.bfloat16) ** 2 / 2).float()


@torch.compile(dynamic=True)
def compiled(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2 + 0.0


def with_configuration(logp, ref_logp, mask, config):
    return (config.beta * (logp - ref_logp) ** 2 / 2 * mask).sum(-1).mean(), {"kl": 0.0}
"""
FOLLOWED = {
    # Distributions and an object; groups stand in one file with others below.
    "next_tokens": ((), "local_reverse_kl", ("(log_p.exp()", "(log_p.detach().exp()")),
    "with_configuration": (
        ("--arg", "config.beta=0.5"),
        "0.5 × local_reverse_kl",
        ("config.beta *", "2 * config.beta *"),
    ),
    # More of the same kinds.
    "group_baseline": ((), "0.75 × reverse_kl", ("penalty - penalty.mean()", "penalty - 2 * penalty.mean()")),
    "policy_loss": ((), "local_forward_kl/T", ("beta * kl", "2 * beta * kl")),
    "over_the_batch": ((), "a gradient without a name (ragged)", ("/ mask.sum()", "/ (mask * mask).sum() * 2")),
    "half_precision": ((), "local_reverse_kl", ("** 2 / 2).float()", "** 2).float()")),
    "compiled": ((), "local_reverse_kl", ("** 2 / 2 + 0.0", "** 2 + 0.0")),
}


@pytest.mark.scheduled
@pytest.mark.parametrize("name", FOLLOWED)
def test_other_forms_of_losses_are_pinned(folder, name):
    options, words, (before, after) = FOLLOWED[name]
    (folder / "losses.py").write_text(OTHERS, encoding="utf-8")
    assert words in pin(f"losses.py:{name}", *options, "--output", "test_kl.py")
    text = Path("test_kl.py").read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert run(folder, text, OTHERS) == ""
    assert before in OTHERS
    assert f"losses.py:{name}" in run(folder, text, OTHERS.replace(before, after))


CLAMPED = """
def loss(logp, ref_logp):
    r = ref_logp - logp
    return r**2 / 2
"""


@pytest.mark.scheduled
def test_a_clamp_is_red_far_from_the_reference_and_nowhere_else(folder):
    """A limit that some log-ratio of `far` is beyond, and one that none is (of another length, as Python would take the
    bytecode of the file before).
    """
    (folder / "losses.py").write_text(CLAMPED, encoding="utf-8")
    pin("losses.py:loss", "--output", "test_kl.py")
    text = Path("test_kl.py").read_text(encoding="utf-8")
    message = run(folder, text, CLAMPED.replace("r**2 / 2", "(r**2 / 2).clamp(max=50)"))
    assert re.findall(r"\((\w+)\) followed", message) == ["far"]
    assert run(folder, text, CLAMPED.replace("r**2 / 2", "(r**2 / 2).clamp(max=450.0)")) == ""


def test_a_loss_that_overflows_far_from_the_reference_is_pinned_without_that(folder):
    loss = "def loss(logp, ref_logp):\n    return (40 * (ref_logp - logp)).exp() + (logp - ref_logp) ** 2\n"
    (folder / "losses.py").write_text(loss, encoding="utf-8")
    pin("losses.py:loss", "--output", "test_kl.py")
    assert '"far":' not in Path("test_kl.py").read_text(encoding="utf-8")


BLOCKED = """
import torch


@torch.no_grad()
def cost(logp, ref_logp, kind="k1"):
    u = logp - ref_logp
    return {"k1": u, "k2": u**2 / 2}[kind]
"""


@pytest.mark.scheduled
def test_a_value_without_a_gradient_is_pinned_as_a_cost_in_the_reward(folder):
    """Another value is red, and so is a gradient that the value gets."""
    (folder / "losses.py").write_text(BLOCKED, encoding="utf-8")
    assert "losses.py:cost follows reverse_kl\n" in pin("losses.py:cost", "--output", "test_kl.py")
    text = Path("test_kl.py").read_text(encoding="utf-8")
    assert run(folder, text, BLOCKED) == ""
    assert "followed 1 × reverse_kl" in run(folder, text, BLOCKED.replace('"k1": u,', '"k1": u**2,'))
    pin("losses.py:cost", "--arg", "kind=k2", "--output", "test_k2.py")
    text = Path("test_k2.py").read_text(encoding="utf-8")
    assert "followed" in run(folder, text, BLOCKED.replace("@torch.no_grad()\n", ""))
    pin("losses.py:cost", "--placement", "loss", "--output", "test_loss.py")
    assert '"sequence": {"zero": 1.0}' in Path("test_loss.py").read_text(encoding="utf-8")


@pytest.mark.scheduled
def test_a_mixture_of_names_is_one_in_all_environments(folder):
    """In a small environment alone two names nearly add up to a small gradient that is none of them."""
    loss = "import torch\ndef loss(logits, ref_logits, mask):\n    p, q = logits.softmax(-1), ref_logits.softmax(-1)\n"
    loss += "    kl = lambda a: (a * (a / ((p + q) / 2)).log()).sum(-1)\n    return (kl(p) + kl(q)) / 2 * mask\n"
    (folder / "losses.py").write_text(loss, encoding="utf-8")
    assert "follows a gradient without a name\n" in pin("losses.py:loss", "--output", "test_kl.py")


LIFTED = """
from missing_module import Base, decorator
import textwrap
import torch

LIMIT = {}
LIMIT["low"] = -10
try:
    from another_missing_module import clamp
except ImportError:
    def clamp(x):
        return x.clamp(min=LIMIT["low"])


@decorator
def half_square(x):
    return x**2 / 2


class Trainer(Base):
    unused: int = textwrap.dedent("0")

    def method(self):
        pass

    @staticmethod
    def loss(logp, ref_logp) -> torch.Tensor:
        return half_square(clamp(logp - ref_logp))


def used_elsewhere(x: Base):
    return Base(x)
"""


@pytest.mark.scheduled
def test_a_function_of_a_file_that_cannot_be_imported_is_lifted(folder):
    """A missing package, or another function of the file that changes, is no alarm; a gradient that moves is one."""
    (folder / "losses.py").write_text(LIFTED, encoding="utf-8")
    assert "follows local_reverse_kl" in pin("losses.py:Trainer.loss", "--output", "test_kl.py")
    text = Path("test_kl.py").read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 10))
    assert len(text.encode()) < MOST_BYTES
    assert run(folder, text, LIFTED) == ""
    assert run(folder, text, LIFTED.replace("return Base(x)", "return missing(x)")) == ""
    assert "now it follows 2 × local_reverse_kl" in run(folder, text, LIFTED.replace("x**2 / 2", "x**2"))
    assert "(far) followed" in run(folder, text, LIFTED.replace("= -10", "= -5"))
    assert "can no longer be called" in run(folder, text, LIFTED.replace("clamp(logp", "Base(logp"))


@pytest.mark.scheduled
def test_batches_of_one_and_of_groups_stand_in_one_file(folder):
    """They have environments of other sizes, and tolerances of their own."""
    (folder / "losses.py").write_text(OTHERS, encoding="utf-8")
    pin(
        *(f"losses.py:{name}" for name in ("group_baseline", "next_tokens", "half_precision")), "--output", "test_kl.py"
    )
    text = Path("test_kl.py").read_text(encoding="utf-8")
    assert '"sequence 2x2"' in text
    assert '"sequence"' in text
    assert "losses.py:next_tokens" in run(
        folder, text, OTHERS.replace("sum(-1).mean()\n", "sum(-1).mean() * 1.001\n", 1)
    )


@pytest.mark.scheduled
def test_the_guide_shows_what_happens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loss = "def kl_penalty(logp, ref_logp, mask, kind='k1'):\n    u = logp - ref_logp\n"
    loss += "    kl = u if kind == 'k1' else (-u).exp() + u - 1\n    return (kl * mask).sum(-1).mean()\n"
    (tmp_path / "my_trainer").mkdir()
    losses, file = tmp_path / "my_trainer/losses.py", tmp_path / "test_kl.py"
    losses.write_text(loss, encoding="utf-8")
    pin("my_trainer/losses.py:kl_penalty", "--arg", "kind=k3", "--output", "test_kl.py")
    guide = (Path(__file__).parents[2] / "docs/guides/pin.md").read_text(encoding="utf-8")
    table, message = (re.search(rf"```{kind}\n(.*?)```", guide, re.DOTALL)[1] for kind in ("python", "text"))
    assert table in file.read_text(encoding="utf-8")
    losses.write_text(loss.replace("(kl * mask).sum(-1)", "((kl * mask).sum(-1) / mask.sum(-1))"), encoding="utf-8")
    with Child(without_kltest, str(file), str(tmp_path)) as child:
        assert " ".join(message.split()) in child.step(60).message

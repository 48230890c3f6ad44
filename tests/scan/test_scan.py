"""`kltest scan` as its users meet it: what is lifted, what it follows, comments, baselines, formats and exit codes."""

import json
from pathlib import Path

import pytest
from scan.reading import found, parameters, variants
from typer.testing import CliRunner

from kltest.cli.application import app
from kltest.scanning.judge import filled
from kltest.scanning.rows import UNMASKED
from kltest.scanning.search import Search
from kltest.scanning.sources import contents
from kltest.scanning.store import Store

SMALL = """import torch

from helpers import masked_mean


def kl_penalty(logprobs, ref_logprobs, kind="k1"):
    log_ratio = logprobs - ref_logprobs
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio ** 2 / 2
    raise ValueError(kind)


class Trainer:
    def __init__(self, beta=0.0, scale=2.0):
        self.beta = beta
        self.scale = scale

    def compute_loss(self, model, inputs):
        per_token_logps = self.get_logps(model, inputs["ids"])
        ref_per_token_logps = inputs["ref_per_token_logps"]
        per_token_loss = -inputs["advantages"] * per_token_logps
        if self.beta != 0.0:
            d = ref_per_token_logps - per_token_logps
            per_token_kl = torch.exp(d) - d - 1
            per_token_loss = per_token_loss + self.beta * per_token_kl
        loss = masked_mean(per_token_loss, inputs["completion_mask"])
        return loss

    def make_rewards(self, scores, logprobs, ref_logprobs, kl_coef):
        kl = kl_penalty(logprobs, ref_logprobs)
        rewards = scores - kl_coef * kl
        return rewards

    def penalize(self, logprobs, ref_logprobs):
        self.loss = kl_penalty(logprobs, ref_logprobs).mean()
"""
HELPERS = """def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trainer.py").write_text(SMALL)
    (tmp_path / "helpers.py").write_text(HELPERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLTEST_SCAN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_every_configuration_of_a_helper_is_told_with_what_it_becomes(small: Path) -> None:
    (_, helped), (_, inline) = found(small)
    assert [(each.place, each.name, each.formula) for each in helped] == [
        ("loss", "", "mean(log π − log ref)"),
        ("reward", "", "β·(log π − log ref)"),
        ("helper", "", "(log π − log ref)² / 2"),
    ]
    assert [each.called for each in helped] == [True, True, False]
    (only,) = inline
    assert (only.why, parameters(only)) == ("", {"logp", "ref_logp", "beta", "mask"})
    assert "beta is filled as the coefficient" in only.notes


def test_an_option_keeps_its_default_and_is_said(tmp_path: Path) -> None:
    text = """
class Loss:
    def __init__(self, share=0.25):
        self.share = share

    def forward(self, logits, ref_logits, mask):
        p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        mixed = torch.log(self.share * p.exp() + (1 - self.share) * q.exp())
        return ((p.exp() * (p - mixed)).sum(-1) * mask).sum()
"""
    (only,) = variants(tmp_path, text)
    assert "0.25" in only.program
    assert only.notes == ["share keeps its default, 0.25"]


def test_a_method_is_not_what_it_gives_and_a_term_ends_where_it_is_differentiated(tmp_path: Path) -> None:
    text = """
class Trainer:
    def logps(self, model, ids):
        return model(ids).logits.log_softmax(-1).gather(2, ids[..., None]).squeeze(-1)

    def step(self, batch):
        logps = self.logps(self.policy, batch["ids"])
        with torch.no_grad():
            ref_logps = self.logps(self.ref, batch["ids"])
        loss = self.beta * ((logps - ref_logps).square() * batch["mask"]).sum(-1).mean()
        loss.backward()
        return {"loss": loss.item()}
"""
    (only,) = variants(tmp_path, text)
    assert (only.why, parameters(only)) == ("", {"logp", "ref_logp", "beta", "mask"})


def test_a_share_of_an_interpolation_is_no_coefficient(tmp_path: Path) -> None:
    text = """
def jsd_loss(student_logits, teacher_logits, beta=0.5):
    s, t = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    one = F.kl_div(s, t, reduction="none", log_target=True).sum(-1)
    other = F.kl_div(t, s, reduction="none", log_target=True).sum(-1)
    return (beta * one + (1 - beta) * other).mean()
"""
    assert all("beta" not in parameters(variant) for variant in variants(tmp_path, text))


def scan(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["scan", *arguments])
    return done.exit_code, done.stdout or done.output


@pytest.mark.scheduled
def test_the_command_names_gradients_and_exits_1(small: Path) -> None:
    code, text = scan(
        "--output",
        "json:scan.json",
        "--output",
        "sarif:scan.sarif",
        "--output",
        "github:scan.txt",
        "--output",
        "markdown:scan.md",
        "--output",
        "text",
    )
    assert code == 1, text
    written = json.loads(Path("scan.json").read_text())
    assert written["schema"] == "kltest.scan/1"
    told = {(term["function"], term["place"]): term for term in written["terms"]}
    # One method puts the helper's value into its loss, another one into rewards: it is graded as both.
    assert told["kl_penalty", "loss"]["gradients"]["current"] == "zero"
    assert told["kl_penalty", "reward"]["gradients"]["current"] == "reverse_kl"
    other = told["kl_penalty", "helper"]["gradients"]
    assert other == {"current": "local_reverse_kl", "stale": "local_reverse_kl@rollouts"}
    loss = told["Trainer.compute_loss", "loss"]
    assert loss["gradients"]["current"].startswith("local_forward_kl (its size moves")
    assert "KL102" in loss["errors"]
    assert (loss["file"], loss["line"]) == (
        "trainer.py",
        SMALL.splitlines().index("            d = ref_per_token_logps - per_token_logps") + 1,
    )

    sarif = json.loads(Path("scan.sarif").read_text())
    (run,) = sarif["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in run["results"]} == rules >= {"KL101", "KL102", "KL301"}
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    assert {place["artifactLocation"]["uri"] for place in places} == {"trainer.py"}
    assert all(1 <= place["region"]["startLine"] <= place["region"]["endLine"] for place in places)

    annotations = Path("scan.txt").read_text().splitlines()
    assert all(
        line.startswith(("::error file=trainer.py,line=", "::notice file=trainer.py,line=")) for line in annotations
    )
    assert "local_forward_kl" in Path("scan.md").read_text()
    assert "KL terms in 2 files" in text

    # With its own report as the baseline nothing new is found, and nothing is graded again.
    code, text = scan("--baseline", "scan.json")
    assert code == 0, text
    assert "known" in text


NEEDS_ITS_TREE = """import torch

from .deep.weights import Weigher

SCALE = 3.0


def loss(logp, ref_logp):
    return Weigher().weigh(SCALE * (logp - ref_logp).square().mean())
"""
WEIGHTS = """class Weigher:
    def weigh(self, x):
        open("mark", "w").close()
        return 2 * x
"""


def test_nothing_of_the_tree_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "package" / "deep"
    deep.mkdir(parents=True)
    (deep.parent / "losses.py").write_text(NEEDS_ITS_TREE)
    (deep / "weights.py").write_text(WEIGHTS)
    monkeypatch.chdir(tmp_path)
    code, text = scan("package", "--no-cache", "--run", "--output", "json:scan.json")
    assert "kltest: --run does nothing" in text
    (term,) = json.loads(Path("scan.json").read_text())["terms"]
    assert term["gradients"]["current"].endswith("local_reverse_kl"), term
    assert (code, Path("mark").exists()) == (0, False)


@pytest.mark.parametrize(("residual", "state"), [(1e-12, "finding"), (1e-6, "unnamed")])
def test_three_gradients_that_only_nearly_fit_are_no_name(residual: float, state: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def loss(logp, ref_logp):\n    return (logp - ref_logp).pow(2).mean()\n")
    (only,) = Search(list(contents([tmp_path], [])), Store(None))
    named = {"local_reverse_kl": 1.0, "local_squared_log_ratio": -0.06, "local_chi_square": -0.1}
    row = {"environment": "sequence", "sampler": "current", "identified": named, "residual": residual}
    assert filled(only, {"verdict": "refuted", "gradients": [row], "checks": []}).status == state


MASKS = {
    "of which nothing is known": ("def kd(logits, teacher_logits):\n", False),
    "seen but not applied": ("def kd(logits, teacher_logits, attention_mask):\n", True),
}


@pytest.mark.parametrize("masks", MASKS)
def test_padding_is_held_against_nobody_whose_caller_may_leave_it_out(masks: str, tmp_path: Path) -> None:
    head, told = MASKS[masks]
    body = "    return F.kl_div(logits.log_softmax(-1), teacher_logits.softmax(-1), reduction='batchmean')\n"
    (tmp_path / "code.py").write_text(f"import torch.nn.functional as F\n\n{head}{body}")
    (only,) = Search(list(contents([tmp_path], [])), Store(None))
    assert any("no mask is known" in note for note in only.notes) != told
    row = {"environment": "sequence", "sampler": "current", "identified": {"local_reverse_kl": 1.0}}
    check = {"code": "KL501", "status": "fail", "level": "error", "message": ""}
    report = {"verdict": "refuted", "gradients": [row], "checks": [check]}
    assert filled(only, report).status == ("finding" if told else "passed")


@pytest.mark.scheduled
def test_comments_declare_and_excuse(small: Path) -> None:
    text = SMALL.replace(
        "    log_ratio = logprobs - ref_logprobs", "    # kltest: expect=zero\n    log_ratio = logprobs - ref_logprobs"
    )
    Path("trainer.py").write_text(
        text[: text.index("class Trainer")].replace('    if kind == "k2":\n        return log_ratio ** 2 / 2\n', "")
    )
    code, output = scan("--output", "json")
    (term,) = json.loads(output)["terms"]
    # Only stale rollouts, of which nothing here says anything, would make it another one.
    assert (term["declared"], term["status"], code) == ("zero", "passed", 0)
    assert (term["gradients"], term["errors"]) == ({"current": "zero", "stale": "-from_sampler_kl"}, [])
    Path("trainer.py").write_text(Path("trainer.py").read_text().replace("expect=zero", "ignore[KL101] logged only"))
    code, output = scan("--output", "json")
    (term,) = json.loads(output)["terms"]
    assert term["ignored"] == {"KL101": "logged only"}
    assert (term["status"], code) == ("passed", 0)


PPO = """class PPOTrainer:
    def make_rewards(self, scores, old_logprobs, ref_logprobs, kl_coef):
        kl = old_logprobs - ref_logprobs
        rewards = scores - kl_coef * kl
        return rewards


def exact_kl_loss(logits, ref_logits, mask):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return (kl * mask).sum(-1).mean()
"""


@pytest.mark.scheduled
def test_a_textbook_ppo_is_green_and_is_told_what_stale_rollouts_would_do(small: Path) -> None:
    Path("trainer.py").write_text(PPO)
    code, text = scan("--output", "json")
    reward, loss = json.loads(text)["terms"]
    assert (code, reward["status"], loss["status"]) == (0, "passed", "passed")
    assert reward["gradients"]["current"] == "reverse_kl"
    assert reward["gradients"]["stale"] == "reverse_kl@rollouts - to_sampler_kl@rollouts"
    assert loss["gradients"] == {"current": "local_reverse_kl", "stale": "local_reverse_kl@sampler"}
    assert (reward["noted"], loss["noted"]) == (["KL305"], ["KL301", "KL303"])
    text = " ".join(scan()[1].split())
    assert "k1 in the reward is fine: ∇KL(π‖ref); KL305 once rollouts are stale" in text
    assert "is fine: next-token part of ∇KL(π‖ref); KL301, KL303 once rollouts are stale" in text
    assert text.endswith("2 of 2 variants graded")


DIRECTIONS = [("-", "against ∇KL(π‖ref), cosine down to -"), ("", "cosine with ∇KL(π‖ref) at least 0.")]


@pytest.mark.scheduled
@pytest.mark.parametrize(("sign", "told"), DIRECTIONS)
def test_a_gradient_without_a_name_has_a_direction(small: Path, sign: str, told: str) -> None:
    lines = ["def kl_loss(logp, ref_logp, mask):", "    kl = (logp - ref_logp) ** 4"]
    Path("trainer.py").write_text("\n".join([*lines, f"    return {sign}(kl * mask).sum(-1).mean()\n"]))
    code, output = scan("--output", "text", "--output", "json:scan.json")
    (term,) = json.loads(Path("scan.json").read_text())["terms"]
    cosines = term["directions"]
    assert set(cosines) == {"reverse_kl", "local_reverse_kl", "forward_kl", "local_forward_kl"}
    assert all(0.3 < abs(each) < 1 and (each < 0) == (sign == "-") for each in cosines.values()), cosines
    assert (code, term["status"], told in output) == (4, "unnamed", True), output


def test_no_term_is_5_and_bad_input_is_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert scan()[0] == 5
    assert scan("missing")[0] == 2
    assert scan("--output", "xml")[0] == 2
    assert scan("--baseline", "missing.json")[0] == 2
    assert scan("--expect", "nothing_of_this_name")[0] == 2


WEIGHTED = """
def kl_of(logprobs, ref_logprobs, loss_weights):
    return (0.5 * (logprobs - ref_logprobs) ** 2 * loss_weights).sum()

class Context:
    def loss_fn(self, logprobs, ids, given):
        valid_mask = ids != self.config.ignored
        entropy = (logprobs.detach() * valid_mask).mean()
        return kl_of(logprobs, given.ref_logprobs, given.kl_loss_weight), entropy
"""


@pytest.mark.scheduled
def test_weights_of_tokens_may_be_a_mask(tmp_path: Path) -> None:
    """Padding is no finding where nothing says that a weight is none, and a use that says KL is recognised."""
    (tmp_path / "losses.py").write_text(WEIGHTED.replace("def loss_fn", "def kl_loss_fn"), encoding="utf-8")
    done = CliRunner().invoke(app, ["scan", str(tmp_path), "--output", "json"])
    (only,) = (told := json.loads(done.stdout))["terms"]
    assert UNMASKED in only["notes"]
    assert "KL501" not in only["errors"]
    assert not told["unread"]

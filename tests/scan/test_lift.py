"""What is lifted out of a function computes what the function does; what cannot be is refused with its reason."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kltest.scanning.follow import tree_of
from kltest.scanning.lift import NAME, Lifted, lifted
from kltest.scanning.sources import sources
from kltest.scanning.terms import terms

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"
Fields = dict[str, torch.Tensor]


def k3(given: Fields) -> torch.Tensor:
    return torch.exp(given["ref_logp"] - given["logp"]) - (given["ref_logp"] - given["logp"]) - 1


def k2(given: Fields) -> torch.Tensor:
    return (given["logp"] - given["ref_logp"]) ** 2 / 2


def gap(given: Fields) -> torch.Tensor:
    return (given["logp"] - given["ref_logp"]).abs()


def live(value: Callable[[Fields], torch.Tensor]) -> Callable[[Fields], torch.Tensor]:
    return lambda given: (value(given) * given["mask"]).sum()


def forward_kl(given: Fields) -> torch.Tensor:
    return (given["ref_logits"].exp() * (given["ref_logits"] - given["logits"])).sum()


def row_means(value: Callable[[Fields], torch.Tensor]) -> Callable[[Fields], torch.Tensor]:
    return lambda given: ((value(given) * given["mask"]).sum(1) / given["mask"].sum(1)).mean()


def rollouts() -> Fields:
    """Five rollouts of four tokens over three, masks of several lengths; full fields are log-probs."""
    random = torch.Generator().manual_seed(0)
    whole = {
        f"{who}logits": torch.randn(5, 4, 3, generator=random, dtype=torch.float64).log_softmax(-1)
        for who in ("", "ref_", "old_")
    }
    tokens = torch.randint(3, (5, 4), generator=random)
    sampled = {
        name.replace("logits", "logp"): value.gather(-1, tokens[..., None])[..., 0] for name, value in whole.items()
    }
    mask = (torch.arange(4) < torch.tensor([[1], [2], [4], [3], [4]])).double()
    return {**whole, **sampled, "tokens": tokens, "mask": mask, "beta": torch.tensor(0.7), "reward": torch.randn(5)}


def variants(folder: Path, text: str, *, logged: bool = False, **more: str) -> list[Lifted]:
    for name, other in {"code": HEAD + text, **more}.items():
        file = folder / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(other)
    tree = tree_of(list(sources([folder], [])))
    return [variant for term in terms(tree, logged=logged) for variant in lifted(tree, term)]


def value_of(variant: Lifted) -> torch.Tensor:
    assert variant.refused == ""
    names: dict[str, object] = {}
    exec(HEAD + "import math\nimport torch as jnp\n\n" + variant.source, names)
    return names[NAME](**{name: rollouts()[name] for name in variant.fields})  # type: ignore[operator,no-any-return]


def of_rollouts(value: Callable[..., torch.Tensor], *, mean: bool = False) -> Callable[[Fields], torch.Tensor]:
    """A formula of the sums, or means, of a rollout's log-probs over its live tokens."""

    def taken(given: Fields) -> torch.Tensor:
        count = given["mask"].sum(1) if mean else 1
        return value(*((given[f"{who}logp"] * given["mask"]).sum(1) / count for who in ("", "ref_", "old_")))

    return taken


EMPTY = {
    "an empty batch": "    return kl.mean() if mask.any() else kl.sum() * 0.0",
    "a number of tokens": "    total = count(mask)\n    return kl.mean() if total else torch.tensor(0.0)",
    "a return before": "    if not mask.any():\n        return logp.sum() * 0.0\n    return kl.mean()",
    "numbers that are not finite": "    kl = kl.mean()\n    if not torch.isfinite(kl):\n        kl *= 2\n    return kl",
    "zeros": "    if fits(mask):\n        kl = kl.mean()\n    else:\n        kl = torch.zeros_like(kl)\n    return kl",
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_batch_of_which_nothing_is_left_is_no_configuration(name: str, tmp_path: Path) -> None:
    text = f"def loss(logp, ref_logp, mask):\n    kl = (logp - ref_logp).abs() * mask\n{EMPTY[name]}\n"
    (only,) = variants(tmp_path, text)
    torch.testing.assert_close(value_of(only), live(gap)(rollouts()) / 20)


def sections(name: str) -> list[tuple[str, str, str]]:
    """(title, words, code) of each section of a file beside this one."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return re.findall(r"^## (.+?)\n\n`(.+?)`\n\n```python\n(.+?)```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("name", "formula", "text"), sections("lifted.md"))
def test_what_is_lifted_computes_what_the_function_does(name: str, formula: str, text: str, tmp_path: Path) -> None:
    *helpers, only = variants(tmp_path, text)
    assert all(each.place == "helper" for each in helpers)
    torch.testing.assert_close(value_of(only), eval(formula)(rollouts()))


TABLES = {
    "a table": """
def k1(a, b):
    return a - b

KINDS = {"k1": k1, "k2": lambda a, b: (a - b) ** 2 / 2}
""",
    "a registry": """
KINDS = {}

def register(name):
    def wrap(function):
        KINDS[name] = function
        return function
    return wrap

@register("k1")
def plain(a, b):
    return a - b

@register("k2")
def squared(a, b):
    return (a - b) ** 2 / 2
""",
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_functions_makes_a_variant_of_each(name: str, tmp_path: Path) -> None:
    loss = """
def loss(logp, ref_logp, mask, kind):
    return (KINDS[kind](logp, ref_logp) * mask).sum()
"""
    found = {variant.variant: value_of(variant) for variant in variants(tmp_path, TABLES[name] + loss)}
    assert sorted(found) == ["kind='k1'", "kind='k2'"]
    torch.testing.assert_close(found["kind='k2'"], live(k2)(rollouts()))
    torch.testing.assert_close(found["kind='k1'"], live(lambda given: given["logp"] - given["ref_logp"])(rollouts()))


def test_a_match_statement_makes_a_variant_of_each_case(tmp_path: Path) -> None:
    text = """
def kl_penalty(logp, ref_logp, kind):
    d = logp - ref_logp
    match kind:
        case "k1" | "kl":
            return d
        case "k2":
            return d.square() / 2
        case _:
            raise ValueError(kind)
"""
    found = {variant.variant: value_of(variant) for variant in variants(tmp_path, text)}
    assert sorted(found) == ["kind='k1'", "kind='k2'"]
    torch.testing.assert_close(found["kind='k2'"], k2(rollouts()))


@pytest.mark.parametrize(
    ("names", "call", "place", "fields"),
    [
        ("a b", 'log_probs_a=batch["logprobs"], log_probs_b=batch["init_logprobs"]', "reward", "logp ref_logp"),
        ("1 2", 'batch["init_logprobs"], batch["logprobs"]', "reward", "ref_logp logp"),
        ("1 2", 'batch["old_logprobs"], batch["logprobs"]', "reward", "old_logp logp"),
        ("a b", "", "helper", "logp ref_logp"),
        ("s t", "", "helper", "logp ref_logp"),
    ],
)
def test_twins_of_names_are_whose_their_callers_say(
    names: str, call: str, place: str, fields: str, tmp_path: Path
) -> None:
    one, other = (f"log_probs_{mark}" for mark in names.split())
    text = f"def kl_penalty({one}, {other}):\n    return ({one} - {other}).abs()\n"
    if call:
        text += (
            f"def collect(batch):\n    rewards_with_kl = batch.rewards - kl_penalty({call})\n    return rewards_with_kl"
        )
    (only,) = variants(tmp_path, text)
    assert (only.place, only.fields) == (place, tuple(fields.split()))


def test_twins_that_callers_give_both_ways_are_left(tmp_path: Path) -> None:
    text = """
def kl_of(logits_1, logits_2):
    return (logits_1.softmax(-1) * (logits_1.log_softmax(-1) - logits_2.log_softmax(-1))).sum()

def loss(logits, teacher_logits):
    return kl_of(logits, teacher_logits) + 2 * kl_of(teacher_logits, logits)
"""
    (only,) = variants(tmp_path, text)
    given = rollouts()
    back = (given["logits"].exp() * (given["logits"] - given["ref_logits"])).sum()
    torch.testing.assert_close(value_of(only), back + 2 * forward_kl(given))


def test_each_return_of_an_estimator_is_a_variant(tmp_path: Path) -> None:
    text = """
def kl_penalty(logprob, ref_logprob, config, kind=None):
    if kind is None:
        kind = config.kind
    if kind == "abs":
        return (logprob - ref_logprob).abs()
    if kind == "k3":
        d = ref_logprob - logprob
        if isinstance(d, torch.Tensor):
            return torch.exp(d) - d - 1
        raise ValueError(d)
    if kind == "k2":
        return 0.5 * (logprob - ref_logprob).square()
    raise NotImplementedError
"""
    found = {variant.variant: value_of(variant) for variant in variants(tmp_path, text)}
    assert sorted(found) == ["kind='abs'", "kind='k2'", "kind='k3'"]
    for kind, value in (("abs", gap), ("k2", k2), ("k3", k3)):
        torch.testing.assert_close(found[f"kind='{kind}'"], value(rollouts()))


def test_a_helper_is_that_of_the_module_it_is_imported_from(tmp_path: Path) -> None:
    text = """
from .right import bend as form

def loss(logp, ref_logp, mask):
    return (form(logp - ref_logp) * mask).sum()
"""
    shape = "def bend(d):\n    return d.{}()\n"
    # Another one of that name stands in a file before it.
    more = {"package.__init__": "", "package.a": shape.format("square"), "package.right": shape.format("abs")}
    found = variants(tmp_path, "", **more, **{"package.use": HEAD + text})
    (only,) = found
    torch.testing.assert_close(value_of(only), live(gap)(rollouts()))
    starred = text.replace("from .right import bend as form", "from .b import *").replace("form(", "bend(")
    (tmp_path / "package" / "use.py").write_text(HEAD + starred)
    (only,) = variants(tmp_path, "")
    assert "several functions" in only.refused


def test_no_gradient_of_a_helper_is_kept(tmp_path: Path) -> None:
    text = """
@torch.no_grad()
def bend(d):
    return d.abs()

def loss(logp, ref_logp, mask):
    return (bend(logp - ref_logp) * mask).sum()
"""
    (only,) = variants(tmp_path, text)
    assert "torch.no_grad()" in only.source


@pytest.mark.parametrize(("name", "reason", "text"), sections("refused.md"))
def test_what_cannot_be_lifted_says_why(name: str, reason: str, text: str, tmp_path: Path) -> None:
    found = variants(tmp_path, text)
    assert found
    for variant in found:
        if variant.term is found[-1].term:  # and none of a helper before it
            assert reason in variant.refused, variant.source


MANY = """
class Trainer:
    def _compute_loss(self, model, inputs, logps):
        per_token_logps, mask = logps, inputs["completion_mask"]
        if self.kind == "token":
            ratio = torch.exp(per_token_logps - inputs["old_per_token_logps"])
        elif self.kind == "sequence":
            ratio = torch.exp((per_token_logps - inputs["old_per_token_logps"]).sum(-1, keepdim=True))
        else:
            raise ValueError(self.kind)
        log_ratio = inputs["ref_per_token_logps"] - per_token_logps
        kl = torch.exp(log_ratio) - log_ratio - 1
        if self.corrected:
            kl = kl * ratio
        loss = -(ratio * inputs["advantages"] * mask).sum()
OTHERS
        loss = loss + self.beta * (kl * mask).sum()
        policy_loss = loss.detach()
        self.metrics["loss"] = policy_loss.item()
        return loss
"""


def test_a_choice_that_matters_is_found_among_many_that_do_not(tmp_path):
    """Twelve conditions that change the rest of the loss would be 4,096 configurations; three are the term's."""
    others = "\n".join(f"        if self.option_{n}:\n            loss = loss * self.scale_{n}" for n in range(12))
    found = [each for each in variants(tmp_path, MANY.replace("OTHERS", others)) if not each.refused]
    given = rollouts()
    ratio = torch.exp(given["logp"] - given["old_logp"])
    whole = torch.exp((given["logp"] - given["old_logp"]).sum(-1, keepdim=True))
    ratios = {"not corrected": 1.0, "'token', corrected": ratio, "'sequence', corrected": whole}
    for name, each in ratios.items():
        (one,) = [variant for variant in found if name in variant.variant]
        torch.testing.assert_close(value_of(one), given["beta"] * (each * k3(given) * given["mask"]).sum())
    assert len(found) == 3


def test_each_average_is_told_of_the_first_variant(tmp_path: Path) -> None:
    """Three estimators times four averages are seven rows, and averages that are the same are one."""
    text = """
class Trainer:
    def compute_loss(self, logps, inputs):
        ref_logps, mask = inputs["ref_logps"], inputs["completion_mask"]
        if self.kind == "k3":
            kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
        elif self.kind == "k2":
            kl = (logps - ref_logps) ** 2 / 2
        else:
            kl = (logps - ref_logps).abs()
        if self.average == "rows":
            loss = ((kl * mask).sum(-1) / mask.sum(-1)).mean()
            loss = loss / (self.accumulation_steps if self.training else 1.0)
        elif self.average in ("tokens", "dapo"):
            loss = (kl * mask).sum() / (inputs["num_items"] / self.accelerator.num_processes)
        elif self.average == "constant":
            loss = (kl * mask).sum() / (kl.size(0) * self.max_length)
        else:
            loss = unknown(kl, mask)
        return self.beta * loss
"""
    found = variants(tmp_path, text)
    given = rollouts()
    expected = {
        "kind='k3'": k3(given),
        "kind='k2'": k2(given),
        "kind otherwise": gap(given),
        "kind='k3', average='rows'": row_means(k3)(given),
        "kind='k3', average='tokens' or 'dapo'": live(k3)(given) / given["mask"].sum(),
        "kind='k3', average='constant'": live(k3)(given) / (5 * 8),
    }
    assert {each.variant for each in found} == expected.keys()
    for each in found:
        scale = 0.7 if "average" in each.variant else 1.0
        torch.testing.assert_close(value_of(each), scale * expected[each.variant])


def test_an_optional_ratio_makes_two_variants(tmp_path: Path) -> None:
    text = """
def kl_of(logp, ref_logp, importance_ratio=None):
    kl = (logp - ref_logp).abs()
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl
"""
    found = variants(tmp_path, text)
    given = rollouts()
    ratio = torch.exp(given["logp"] - given["old_logp"])
    expected = {"with importance_ratio": ratio * gap(given), "without importance_ratio": gap(given)}
    assert {each.variant for each in found} == expected.keys()
    for each in found:
        torch.testing.assert_close(value_of(each), expected[each.variant])


KL, K2 = "live(logp - ref_logp, mask).mean()", "live((logp - ref_logp).square() / 2, mask).mean()"
LOGGED = {
    "an item of a metric": (f"metrics['kl'] = {KL}.item()", KL),
    "a call that logs": (f"mean_kl = {KL}.item()\n    self.log('train/kl', mean_kl, bar=True)", KL),
    "under a key that says KL": (f"wandb.log({{'loss': loss.item(), 'kl': float({KL})}})", KL),
    "appended": (f"self.stats['kl'].append(self.accelerator.gather({K2}).tolist())", K2),
    "under another name, of what is called KL": (
        "kl = live(logp - ref_logp, mask)\n    self.log('gap', kl.mean())",
        KL,
    ),
    "beside the loss": (f"return loss, {{'loss': loss, 'kl': {KL}}}", KL),
    "to the sampler": (f"metrics['approx_kl'] = {KL}.item()".replace("ref_", "old_"), ""),
    "called no KL": (f"metrics['gap'] = {KL}.item()", ""),
    "of a preference": (f"metrics['kl'] = {KL}.item()".replace("ref_logp", "chosen_logps"), ""),
    "in the loss as well": (f"kl = {KL}\n    metrics['kl'] = kl.item()\n    loss = loss + kl", ""),
}
"""Statements that log, and the value that they log; the empty string if that is no KL to the reference alone."""


@pytest.mark.parametrize("name", LOGGED)
def test_what_is_only_logged_is_lifted_if_it_is_asked_for(name: str, tmp_path: Path) -> None:
    text, value = LOGGED[name]
    text = f"""
def live(value, mask):
    return (value * mask).sum(-1)

def step(self, logp, ref_logp, old_logp, mask, advantages, metrics):
    loss = -(advantages * logp * mask).sum()
    {text}
    return loss
"""
    assert "logged" not in [each.place for each in variants(tmp_path, text)]
    found = [each for each in variants(tmp_path, text, logged=True) if each.place == "logged"]
    assert len(found) == bool(value), found
    for each in found:
        given = {**rollouts(), "live": lambda value, mask: (value * mask).sum(-1)}
        logged = torch.as_tensor(value_of(each)[1]["kl"])
        torch.testing.assert_close(logged, eval(value, given).to(logged))


def test_what_is_made_in_a_rewards_statement_is_no_loss_as_well(tmp_path: Path) -> None:
    """And an estimate that is called a score is no reward, in a function that is called a KL."""
    text = """
def step(self, logps, ref_logps, new_logps, mask, scores):
    kl_rewards = -self.beta * (logps - ref_logps) * mask
    rewards = kl_rewards.clone() + scores
    advantages = rewards.flip(1).cumsum(1).flip(1)
    pg_loss = -((new_logps - logps).exp() * advantages).sum()
    loss = pg_loss
    loss.backward()
"""
    (found,) = variants(tmp_path, text)
    assert found.place == "reward"
    text = """
def kl_penalty(logprob, ref_logprob):
    backward_score = 0.5 * (logprob - ref_logprob).square()
    return backward_score - backward_score.detach()
"""
    (found,) = variants(tmp_path, text)
    assert found.place == "helper"


def test_the_value_of_a_straight_through_estimate_counts_in_a_reward(tmp_path: Path) -> None:
    text = """
def estimate(logp, ref_logp, kind):
    return STORED[kind](logp, ref_logp)

def kl_penalty(logp, ref_logp, kind):
    backward = 0.5 * (logp - ref_logp).square()
    return backward - backward.detach() + estimate(logp, ref_logp, kind).detach()

def loss(self, logp, ref_logp, mask):
    kl_loss = (kl_penalty(logp, ref_logp, "x") * mask).sum()
    return kl_loss

def rewards(self, logp, ref_logp, scores):
    with torch.no_grad():
        kl_rewards = scores - self.beta * kl_penalty(logp, ref_logp, "x")
    return kl_rewards
"""
    helper, rewarded = variants(tmp_path, text)
    assert (helper.place, rewarded.place) == ("helper", "reward")
    torch.testing.assert_close(value_of(helper), torch.zeros(5, 4, dtype=torch.float64))
    assert rewarded.source == ""
    assert "its value" in rewarded.refused


def test_an_advantage_that_nothing_detaches_is_no_reward_by_itself(tmp_path: Path) -> None:
    text = """
def criterion(self, logp, ref_logp, mask, inputs):
    per_token_kl = torch.exp(ref_logp - logp) - (ref_logp - logp) - 1
    advantages = inputs["rewards"].unsqueeze(-1)
    if self.adv == "penalised":
        advantages = advantages - 0.5 * per_token_kl
        per_token_kl = 0.0
    loss = (-(advantages * torch.exp(logp - logp.detach())) + 0.5 * per_token_kl) * mask
    loss = loss.sum()
    return loss
"""
    found = variants(tmp_path, text)
    by = {each.place: each for each in found if "penalised" in each.variant or each.place != "loss"}
    torch.testing.assert_close(value_of(by["loss"]), 0.5 * live(k3)(rollouts()))
    assert "nothing detaches it" in by["advantage"].refused

"""What is lifted out of a function computes what the function does; what cannot be is refused with its reason."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from scan import reading
from scan.reading import (
    HEAD,
    cases,
    found,
    gap,
    k2,
    k3,
    live,
    parameters,
    rollouts,
    row_means,
    sections,
    variants,
)

from kltest.scanning.entries import Tree
from kltest.scanning.sources import contents, parsed
from kltest.scanning.variants import Variant
from kltest.symbolic.operations import ATTRIBUTES, FUNCTIONS

LIFTED_NOT_YET = {
    "a cross-entropy less an entropy": "a mask of the vocabulary is taken to be one of tokens",
    "one key in two places": "one key of two batches looks like one side",
    "options kept by a constructor, and a temperature without a default": "a scale is the coefficient, not its default",
    "a mixture, called a target": "a part that is nowhere zero where its sides agree",
    "a stack of sums": "a loop over rollouts whose models are called inside is followed once, with all of them",
    "listed in a loop, with a second result": "a loop over rollouts whose models are called inside",
    "called where they meet": "the loss of one rollout is filled with all of them",
    "means": "the loss that a model returns is not the mean of its log-probs",
    "a sum over tokens in its own statement": "a sum over tokens without a mask counts padding",
    "a mask of rows beside that of tokens": "a mask of rows is taken to be one of tokens",
    "called that of a sequence": "log-probs of whole rollouts are told by their name alone",
}
SECTIONS = {name: (formula, text) for name, formula, text in sections("lifted.md")}


@pytest.mark.parametrize("name", cases(SECTIONS, LIFTED_NOT_YET))
def test_what_is_lifted_computes_what_the_function_does(name: str, tmp_path: Path) -> None:
    formula, text = SECTIONS[name]
    _, its = found(tmp_path, text)[-1]
    (only,) = [one for one in its if one.called]
    expected, value = eval(formula, vars(reading))(rollouts()), computed(only)
    torch.testing.assert_close(value, expected)
    assert value.requires_grad is expected.requires_grad


REFUSED_NOT_YET = {
    "log-probs of the likeliest tokens": "the likeliest tokens stand for the vocabulary",
    "a part of a divergence": "the tail of a sum over the likeliest tokens is told without its head",
    "a mixture of which a part is not known": "a number computed from a mask is taken to be one of tokens",
    "parts that a function may change": "an unknown function may change what it is given",
    "log-probs of tokens or of rollouts, as the configuration says": "variants of both are told, without an average",
}


REFUSED = {name: (words, text) for name, words, text in sections("refused.md")}
"""What is told of what cannot be lifted whole: nothing, why it is not run, or what the term alone computes."""


@pytest.mark.parametrize("name", cases(REFUSED, REFUSED_NOT_YET))
def test_what_cannot_be_lifted_says_why_or_is_told_alone(name: str, tmp_path: Path) -> None:
    words, text = REFUSED[name]
    terms = found(tmp_path, text)
    _, _, reason = words.partition("not run: ")
    if words == "nothing":
        assert [[one.formula for one in its] for _, its in terms] == []
    elif reason:
        assert all(reason in one.why and not one.program for one in terms[-1][1])
    else:
        (only,) = terms[-1][1]
        assert not only.whole
        assert "without what becomes of it" in only.notes[0]
        torch.testing.assert_close(computed(only), eval(words, vars(reading))(rollouts()))


def computed(variant: Variant) -> Any:
    """Return what a variant is on the rollouts of formulas."""
    return reading.value_of(variant, rollouts())


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
    one, other = variants(tmp_path, TABLES[name] + loss)
    torch.testing.assert_close(computed(one), live(lambda given: given["logp"] - given["ref_logp"])(rollouts()))
    torch.testing.assert_close(computed(other), live(k2)(rollouts()))


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
    found = {variant.name: computed(variant) for variant in variants(tmp_path, text)}
    assert sorted(found) == ["kind='k1' or 'kl'", "kind='k2'"]
    torch.testing.assert_close(found["kind='k2'"], k2(rollouts()))


def test_what_becomes_of_a_term_is_of_the_same_configuration(tmp_path: Path) -> None:
    """An option of two conditions, which nothing sets: no ratio where it is denied, though one of them may hold."""
    text = """
class Trainer:
    def compute_loss(self, logps, old_logps, ref_logps, mask):
        kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
        if getattr(self.args, "corrected", False):
            kl = kl * torch.exp(logps - old_logps)
        loss = (kl * mask).sum() / mask.sum()
        return loss
"""
    found = {variant.name: variant for variant in variants(tmp_path, text)}
    plain = found.pop("not (hasattr(args, 'corrected') and corrected)")
    (weighted,) = found.values()
    given = rollouts()
    torch.testing.assert_close(computed(plain), live(k3)(given) / given["mask"].sum())
    assert (parameters(plain), parameters(weighted)) == (
        {"logp", "ref_logp", "mask"},
        {"logp", "old_logp", "ref_logp", "mask"},
    )


def test_a_temperature_before_a_length_that_limits_chunks_is_1(tmp_path: Path) -> None:
    text = """
def loss(logits, teacher_logits, temperature, chunk):
    _, top = teacher_logits.topk(4, dim=-1)
    logits, teacher_logits = logits.gather(-1, top) / temperature, teacher_logits.gather(-1, top) / temperature
    total = 0.0
    for i in range(0, logits.shape[0], chunk):
        end = min(i + chunk, logits.size(0))
        a, b = (F.log_softmax(one[i:end], -1) for one in (logits, teacher_logits))
        total += (b.exp() * (b - a)).sum()
    return total
"""
    (only,) = variants(tmp_path, text)
    assert (only.why, "temperature is taken to be 1" in only.notes) == ("", True)


def test_no_case_of_a_match_statement_is_lost(tmp_path: Path) -> None:
    """Guards, captured names, singletons, and patterns of which nothing is known but that they may match."""
    text = """
def kl_penalty(logp, ref_logp, kind, mode):
    d = logp - ref_logp
    match kind:
        case None:
            return d.abs()
        case str() as name if name == "k2":
            return d.square() / 2
        case [_, {"k3": True}]:
            return torch.exp(-d) - 1 + d
        case other if mode:
            return d.exp() - 1
        case _:
            return d
"""
    found = {variant.name: variant.form for variant in variants(tmp_path, text)}
    assert sorted(found.values()) == ["", "k1", "k2", "k3", "|log-ratio|"]
    assert any("matches, kind" in name for name in found)


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
        text += f"def collect(batch):\n    rewards = batch.rewards - kl_penalty({call})\n    return rewards"
    (only,) = variants(tmp_path, text)
    assert (only.place, parameters(only)) == (place, set(fields.split()))


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
    found = {variant.name: computed(variant) for variant in variants(tmp_path, text)}
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
    torch.testing.assert_close(computed(only), live(gap)(rollouts()))
    starred = text.replace("from .right import bend as form", "from .b import *").replace("form(", "bend(")
    (tmp_path / "package" / "use.py").write_text(HEAD + starred)
    (only,) = variants(tmp_path, "")
    assert "without what becomes of it" in only.notes[0]


def test_metrics_of_a_loss_are_no_losses(tmp_path: Path) -> None:
    text = """
def loss_func(logits, ref_logits, mask, reduced):
    gap = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    loss = ((logits.softmax(-1) * gap).sum(-1) * mask).sum()
    values = torch.stack([loss.detach().clone(), torch.tensor(reduced)])
    return loss, {"loss": values[0], "others": values[1]}
"""
    (only,) = variants(tmp_path, text)
    assert ".detach()" not in only.program


def test_no_gradient_of_a_helper_is_kept(tmp_path: Path) -> None:
    text = """
@torch.no_grad()
def bend(d):
    return d.abs()

def loss(logp, ref_logp, mask):
    return (bend(logp - ref_logp) * mask).sum()
"""
    (only,) = variants(tmp_path, text)
    assert ".detach()" in only.program


HOSTILE = (
    *("__import__('os').system('true')", "eval('gap')", "exec('1')", "open('x')", "getattr(gap, '__class__')(gap)"),
    *("gap.__class__.__bases__[0].__subclasses__()", "(lambda: 0).__globals__", "torch.load('x')", "sys.exit()"),
    *("torch.save(gap, 'x')", "torch.hub.load('x', 'y')", "torch.ops.load_library('x')", "np.fromfile('x')"),
    *("gap.numpy().tofile('x')", "'{0.__class__}'.format(gap)", "f'{gap.__class__}'", "gap.register_hook(print)"),
    *("gap.apply_(print)", "gap.map_(gap, print)", "gap.share_memory_()", "gap.storage()", "gap.data_ptr()"),
    *("os.environ['x']", "vars(gap)", "unknown(gap)", "(open := gap)", "torch.utils.cpp_extension.load('x', [gap])"),
)
USES = ("{0} + gap**2", "gap**2 * {0}", "({0} - gap) ** 2", "(gap if {0} else -gap) ** 2")
"""Where something stands beside a log-ratio, in a loss."""
MODULES = {"nn", "functional", "torch", "float32", "float64"}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_programs_are_arithmetic_alone(hostile: str, tmp_path: Path) -> None:
    """Nothing is called in a program but functions of torch and methods of tensors, each of one table."""
    losses = [
        f"def loss_{number}(logp, ref_logp):\n    gap = logp - ref_logp\n    return ({use.format(hostile)}).sum()\n"
        for number, use in enumerate(USES)
    ]
    told = variants(tmp_path, "\n".join(losses))
    assert told
    for each in told:
        assert (each.program == "") == bool(each.why)
        nodes = list(ast.walk(ast.parse(each.program)))
        bound = {node.arg for node in nodes if isinstance(node, ast.arg)} | {"torch"}
        bound |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        assert {node.id for node in nodes if isinstance(node, ast.Name)} <= bound
        assert {node.attr for node in nodes if isinstance(node, ast.Attribute)} <= FUNCTIONS | ATTRIBUTES | MODULES
        imported = [node.names[0].name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imported in ([], ["torch"], ["torch", "torch.nn.functional"])


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
    found = [each for each in variants(tmp_path, MANY.replace("OTHERS", others)) if not each.why]
    given = rollouts()
    ratio = torch.exp(given["logp"] - given["old_logp"])
    whole = torch.exp((given["logp"] - given["old_logp"]).sum(-1, keepdim=True))
    ratios = {"not corrected": 1.0, "corrected, kind='token'": ratio, "corrected, kind='sequence'": whole}
    for name, each in ratios.items():
        (one,) = [variant for variant in found if name in variant.name]
        torch.testing.assert_close(computed(one), given["beta"] * (each * k3(given) * given["mask"]).sum())
    assert len(found) == 3


def test_the_first_average_that_can_be_computed_is_told_of_each_variant(tmp_path: Path) -> None:
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
    expected = {"kind='k3'": k3, "kind='k2'": k2, "kind otherwise": gap}
    assert {each.name for each in found} == expected.keys()
    for each in found:
        torch.testing.assert_close(computed(each), 0.7 * row_means(expected[each.name])(rollouts()))


@pytest.mark.parametrize(
    ("annotation", "kinds"),
    [
        ("str", ["'abs'", "'mse'", " otherwise"]),
        ('Literal["kl", "abs"]', ["'abs'", "'kl'"]),
        ('Optional[typing.Literal["kl", "mse"]]', ["'kl' or None", "'mse'"]),
        ('Literal["kl", "mse"] | None', ["'kl' or None", "'mse'"]),
        ("Literal[KINDS]", ["'abs'", "'mse'", " otherwise"]),
    ],
)
def test_an_option_has_the_values_of_its_annotation_alone(annotation: str, kinds: list[str], tmp_path: Path) -> None:
    text = f"""
class Config:
    kind: {annotation} = "kl"

def loss(logp, ref_logp, mask, config):
    gap = logp - ref_logp
    if config.kind == "abs":
        gap = gap.abs()
    elif config.kind == "mse":
        gap = gap.square() / 2
    return (gap * mask).sum()
"""
    named = sorted(each.name.replace("kind=", "").removeprefix("kind") for each in variants(tmp_path, text))
    assert named == sorted(kinds)


@pytest.mark.parametrize(
    ("before", "branch", "after"),
    [
        ("", 'elif kind in ("kl", "k1"):', "else:\n        raise ValueError(kind)"),
        ("", 'elif kind == "kl" or kind == "k1":', "else:\n        raise ValueError(kind)"),
        ('if kind not in ("abs", "kl", "k1"):\n        raise ValueError(kind)', "else:", ""),
    ],
)
def test_of_what_raises_otherwise_all_values_are_said(before: str, branch: str, after: str, tmp_path: Path) -> None:
    text = f"""
def loss(logp, ref_logp, mask, kind):
    {before}
    if kind == "abs":
        gap = (logp - ref_logp).abs()
    {branch}
        gap = logp - ref_logp
    {after}
    return (gap * mask).sum()
"""
    assert sorted(each.name for each in variants(tmp_path, text)) == ["kind='abs'", "kind='kl' or 'k1'"]


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
    assert {each.name for each in found} == expected.keys()
    for each in found:
        torch.testing.assert_close(computed(each), expected[each.name])


KL, K2 = "live(logp - ref_logp, mask).mean()", "live((logp - ref_logp).square() / 2, mask).mean()"
LOGGED = {
    "an item of a metric": (f"metrics['kl'] = {KL}.item()", KL),
    "a call that logs": (f"mean_kl = {KL}.item()\n    self.log('train/kl', mean_kl, bar=True)", KL),
    "under a key that says KL": (f"wandb.log({{'loss': loss.item(), 'kl': float({KL})}})", KL),
    "appended": (f"self.stats['kl'].append({K2}.tolist())", K2),
    "under another name, of what is called KL": (
        "kl = live(logp - ref_logp, mask)\n    self.log('gap', kl.mean())",
        "live(logp - ref_logp, mask)",
    ),
    "beside the loss": (f"return loss, {{'loss': loss, 'kl': {KL}}}", KL),
    "to the sampler": (f"metrics['approx_kl'] = {KL}.item()".replace("ref_", "old_"), ""),
    "through an unknown function": (f"metrics['kl'] = changed_by_somebody({KL})", "not run"),
    "called no KL": (f"metrics['gap'] = {KL}.item()", ""),
    "of a preference": (f"metrics['kl'] = {KL}.item()".replace("ref_logp", "chosen_logps"), ""),
    "in the loss as well": (f"kl = {KL}\n    metrics['kl'] = kl.item()\n    loss = loss + kl", ""),
}
"""Statements that log, and the value that they log, if that is known; empty if it is no KL to the reference alone."""


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
        if value == "not run":
            assert ("nothing says what becomes of it" in each.why, each.program) == (True, "")
            continue
        logged = torch.as_tensor(computed(each)[1]["kl"])
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


@pytest.mark.xfail(strict=True, reason="what is left of a reward when a gradient of zero is taken away")
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
    torch.testing.assert_close(computed(helper), torch.zeros(5, 4, dtype=torch.float64))
    assert rewarded.program == ""
    assert "its value" in rewarded.why


@pytest.mark.xfail(strict=True, reason="an advantage with a gradient of its own is graded as a number")
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
    by = {each.place: each for each in found if "penalised" in each.name or each.place != "loss"}
    torch.testing.assert_close(computed(by["loss"]), 0.5 * live(k3)(rollouts()))
    assert "nothing detaches it" in by["advantage"].why


def test_an_early_return_of_nothing_does_not_hide_what_is_returned_else(tmp_path: Path) -> None:
    text = """
def logps_of(model, ids, kept):
    if kept <= 0:
        return ids.new_empty((ids.size(0), 0))
    return model(ids).logits.log_softmax(-1).gather(2, ids.unsqueeze(-1)).squeeze(-1)
"""
    (tmp_path / "losses.py").write_text("import torch\n" + text, encoding="utf-8")
    (entry,) = Tree({str(source.path): source for source in parsed(contents([tmp_path], []), [])}).entries()
    assert entry.roles.of(entry.returned).is_field


def test_a_helper_that_returns_a_number_without_a_gradient_is_not_run(tmp_path: Path) -> None:
    text = """
def approx_kl(logp, ref_logp):
    return (logp - ref_logp).abs().mean().detach()
"""
    (only,) = variants(tmp_path, text)
    assert only.why == "it carries no gradient, and nothing says what becomes of it"

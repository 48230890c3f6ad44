"""A graph that is written as a program gives what its code gives when it is run, and formulas say what a graph is."""

import ast
import inspect
import textwrap

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from symbolic.test_evaluate import CONSTRUCTS, OPTIONS, fields, programs, read, run, same, sources
from weekly import examples

from kltest.symbolic.computed import UnknownError, evaluate
from kltest.symbolic.evaluate import Evaluator
from kltest.symbolic.values import INPUT
from kltest.symbolic.written import LONG, formula, program


def graph(source, **named):
    """Return what a loss returns as a value of a graph, and the names of its leaves.

    Args:
        source: code with a function `loss`.
        named: names of parameters for attributes of `config`.
    """
    evaluator = Evaluator()
    scope = evaluator.module("source.py", ast.parse(textwrap.dedent(source)))
    found = evaluator.call(scope.variables["loss"], (), {})
    leaves = {evaluator.graph.node(INPUT, name): name for name in (*fields(), "kind", "flag")}
    config = evaluator.graph.node(INPUT, "config")
    leaves |= {evaluator.graph.node("attribute", config, name): one for name, one in named.items()}
    return found, leaves


def executed(text, **given):
    """Return what a written program computes of a batch."""
    names = {}
    exec(text, names)
    known = {**fields(), **given}
    return names["kl_term"](*(known[name] for name in inspect.signature(names["kl_term"]).parameters))


def imported(text):
    """Return the modules that a program imports."""
    return {alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names}


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_a_random_program_that_is_read_and_written_gives_what_it_gives_when_it_is_run(source):
    text = program(*graph(source))
    assert same(executed(text), run(source)), text
    assert imported(text) <= {"torch", "torch.nn.functional"}
    assert max(map(len, text.splitlines())) <= 2 * LONG, text


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_that_is_read_and_written_gives_what_it_gives_when_it_is_run(name):
    text = program(*graph(CONSTRUCTS[name]))
    assert same(executed(text), run(CONSTRUCTS[name])), text


MORE = sources("statements.md")


@pytest.mark.parametrize("name", MORE)
def test_what_is_written_in_several_statements_gives_what_it_gives_when_it_is_run(name):
    text = program(*graph(MORE[name]))
    wanted = run(MORE[name].replace("import wandb", "").replace("wandb.log", "max").replace("seen, row", "seen, 1"))
    assert same(executed(text), wanted), text
    assert same(read(MORE[name]), wanted)


@pytest.mark.parametrize("kind", ["k1", "k2", "mse", "k3"])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_conditions_are_parameters(kind, scale):
    found, leaves = graph(OPTIONS, kind="kind", scale="scale")
    text = program(found, leaves)
    d = fields()["logp"] - fields()["ref_logp"]
    wanted = {"k1": d, "k2": d**2 / 2, "mse": d**2 / 2, "k3": (-d).exp() - 1 + d}[kind].sum() * (scale or 1.0)
    assert same(executed(text, kind=kind, scale=scale), wanted), text
    with pytest.raises(ValueError):
        executed(text, kind="another", scale=None)


def test_only_the_branch_that_is_taken_is_computed():
    source = """
        def loss(logp, flag, ref_logp):
            if flag:
                d = logp - ref_logp
                return (d.exp() - d).sum()
            return logp.sum()
    """
    text = program(*graph(source))
    assert same(executed(text, flag=False, ref_logp=None), fields()["logp"].sum()), text


def test_a_branch_knows_its_condition():
    """A variable that only this branch sets is there, so that nothing is raised."""
    assert "raise" not in program(*graph(MORE["a variable of one branch"]))


def test_a_program_leaves_its_arguments_as_they_are():
    evaluator = Evaluator()
    logp = evaluator.graph.node(INPUT, "ref_logp")
    total = evaluator.graph.node("-", evaluator.graph.node("written", logp, 0, 7.0), logp)
    wanted = torch.zeros_like(fields()["ref_logp"])
    wanted[0] = 7.0 - fields()["ref_logp"][0]
    assert same(executed(program(total, {logp: "ref_logp"})), wanted)


def test_a_program_is_short():
    source = """
        import torch
        def loss(logp, ref_logp, mask, beta):
            d = ref_logp - logp
            kl = torch.exp(d) - d - 1
            return beta * (kl * mask).sum() / mask.sum().clamp(min=1.0)
    """
    assert program(*graph(source), name="term") == textwrap.dedent("""\
        import torch


        def term(logp, ref_logp, mask, beta):
            x1 = ref_logp - logp
            return beta * ((torch.exp(x1) - x1 - 1) * mask).sum() / torch.clamp(mask.sum(), min=1.0)
        """)


def test_several_nodes_of_one_name_are_one_parameter():
    evaluator = Evaluator()
    one, other = (evaluator.graph.node(INPUT, name) for name in ("logprobs", "logps"))
    total = evaluator.graph.node("+", one, evaluator.graph.node("exp", other))
    text = program(total, {one: "logp", other: "logp"})
    assert same(executed(text), fields()["logp"] + fields()["logp"].exp())


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("secrets.token_hex(logp) * ref_logp", "call secrets.token_hex"),
        ("logp * config.scale", "input config"),
        ("logp * unheard_of", "input unheard_of"),
        ("logp.unheard_of()", "method unheard_of"),
    ],
)
def test_what_has_no_value_is_named(expression, what):
    found, leaves = graph(f"import secrets\ndef loss(logp, ref_logp, config):\n    return {expression}")
    with pytest.raises(UnknownError, match=f"nothing says what {what} is"):
        program(found, leaves)
    with pytest.raises(UnknownError):
        evaluate([found], {node: fields()[name] for node, name in leaves.items() if name in fields()})


@pytest.mark.parametrize(
    ("right", "wrong"), [("-", "+"), ("torch.exp(", "torch.abs("), (" * mask", ""), ("- 1", "- 2")]
)
def test_a_wrong_operator_is_noticed(right, wrong):
    source = """
        import torch
        def loss(logp, ref_logp, mask):
            d = logp - ref_logp
            return ((torch.exp(-d) - 1 + d) * mask).sum()
    """
    text = program(*graph(source))
    assert same(executed(text), run(source))
    assert right in text
    assert not same(executed(text.replace(right, wrong, 1)), run(source))


def test_a_detach_that_is_left_out_is_noticed():
    source = "def loss(logp, ref_logp):\n    return (logp.detach() - ref_logp).sum()"
    text = program(*graph(source))
    assert same(executed(text), run(source))
    assert not same(executed(text.replace(".detach()", "")), run(source))


FORMULAS = {
    "logp - ref_logp": "log π − log ref",
    "beta * ((torch.exp(ref_logp - logp) - (ref_logp - logp) - 1) * mask).mean()": (
        "β·mean((exp(log ref − log π) − (log ref − log π) − 1)·mask)"
    ),
    "0.5 * (logp.float() - ref_logp.to(torch.float32)) ** 2": "0.5·(log π − log ref)²",
    "(logp - ref_logp).square() / 2.0": "(log π − log ref)² / 2",
    "torch.pow(logp, 3) + logp ** 2": "(log π)³ + (log π)²",
    "1.0 * (logp - ref_logp) / 1": "log π − log ref",
    "(1 * (logp + 0) * mask).sum(-1)": "sum(log π·mask, −1)",
    "-(-(logp - ref_logp))": "log π − log ref",
    "(logp - ref_logp.detach()).exp()": "exp(log π − log ref)",
    "torch.exp(logp - old_logp).detach() * logp": "sg(exp(log π − log μ))·log π",
    "(logp.detach() - old_logp).detach().exp() * logp": "exp(sg(log π − log μ))·log π",
    "logp.detach() * logp + (logp.detach() + 1).detach()": "sg(log π)·log π + (sg(log π) + 1)",
    "(logp - ref_logp).abs()": "|log π − log ref|",
    "torch.where(mask != 0, logp, 0.0)": "where(mask ≠ 0, log π, 0)",
    "logp.masked_fill(mask == 0, float('-inf'))": "masked_fill(log π, mask = 0, −∞)",
    "F.softmax(logits, dim=-1).sum(-1, keepdim=True)": "sum(softmax(log π(·), dim=−1), −1)",
    "logp if beta > 0.5 else ref_logp": "log π if β > 0.5 else log ref",
    "sum([row.sum() for row in logp])": "sum([sum((log π)[item]) for item in range(len(log π))])",
    "scores.of(logp, config.scale)": "tools.scores.of(log π, config.scale)",
    "(logp - ref_logp)[:, 1:]": "(log π − log ref)[:, 1:]",
    "torch.add(logp, -ref_logp)": "log π + −log ref",
}


@pytest.mark.parametrize("expression", FORMULAS)
def test_a_formula(expression):
    head = "import torch\nimport torch.nn.functional as F\nfrom tools import scores\n"
    found, leaves = graph(
        f"{head}def loss(logp, ref_logp, old_logp, mask, logits, beta, config):\n    return {expression}"
    )
    assert formula(found, leaves) == FORMULAS[expression]


def test_a_formula_is_whole_and_no_longer_than_what_it_says():
    """What is doubled thirty times is thirty lines of a program, and not a thousand million of symbols."""
    body = "\n".join("    x = (x.exp() + ref_logp) * (x.exp() - ref_logp)" for _ in range(30))
    text = formula(*graph(f"def loss(logp, ref_logp):\n    x = logp\n{body}\n    return x"))
    assert len(text) < 3000
    assert ", where x1 = " in text


def test_a_sum_of_a_loop_is_a_sum():
    text = formula(*graph(CONSTRUCTS["chunks"]))
    assert text.startswith("sum(sum(")
    assert text.endswith(" for item in range(0, (log π).shape[0], 2)) / sum(mask)")

"""Code that is read gives what the same code gives when it is run: random programs, and the constructs one by one."""

import ast
import re
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weekly import examples

from kltest.symbolic.computed import UnknownError, evaluate
from kltest.symbolic.evaluate import Evaluator, TooLargeError
from kltest.symbolic.values import INPUT, Node, Thing

ROWS, TOKENS, VOCABULARY = 4, 3, 5


def fields():
    """Return a batch whose numbers are all different, with a mask that has gaps."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "logp": draw(ROWS, TOKENS).requires_grad_(),
        "ref_logp": draw(ROWS, TOKENS),
        "old_logp": draw(ROWS, TOKENS),
        "mask": torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0]], dtype=torch.float64),
        "logits": draw(ROWS, TOKENS, VOCABULARY).requires_grad_(),
        "tokens": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator),
        "beta": 0.3,
    }


def read(source, name="loss", **given):
    """Return what a function of the source computes of a batch, its code read and not run."""
    evaluator = Evaluator()
    scope = evaluator.module("source.py", ast.parse(textwrap.dedent(source)))
    found = evaluator.call(scope.variables[name], (), {})
    inputs = {evaluator.graph.node(INPUT, name): value for name, value in {**fields(), **given}.items()}
    node = found if isinstance(found, Node) else evaluator.graph.node("same", found)
    return evaluate([node], inputs)[node]


def run(source, name="loss", **given):
    """Return what the same function computes when it is run."""
    import inspect

    names = {"torch": torch, "F": torch.nn.functional}
    exec(textwrap.dedent(source), names)
    known = {**fields(), **given}
    return names[name](**{one: known[one] for one in inspect.signature(names[name]).parameters if one in known})


def same(one, other):
    """True if two values, and whether they carry a gradient, are the same."""
    if not isinstance(other, torch.Tensor):
        return one == pytest.approx(other, abs=1e-12)
    carries = isinstance(one, torch.Tensor) and one.requires_grad == other.requires_grad
    return carries and torch.allclose(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


# Random programs. A term is a tree of operations over fields; each of its parts is computed in one of several ways.

LEAVES = ("logp", "ref_logp", "old_logp", "(logp - ref_logp)", "logp.detach()", "mask", "(beta * mask)")
OF_ONE = ("({0}).exp()", "torch.exp(-{0})", "({0}) ** 2", "torch.clamp({0}, -1.0, 1.0)", "-({0})", "({0}).abs()")
OF_TWO = ("({0}) + ({1})", "({0}) - ({1})", "({0}) * ({1})", "torch.where(mask != 0, ({0}) + mask, ({1}) + mask)")


def expressions():
    return st.recursive(
        st.sampled_from(LEAVES),
        lambda inner: st.one_of(
            st.builds(str.format, st.sampled_from(OF_ONE), inner),
            st.builds(str.format, st.sampled_from(OF_TWO), inner, inner),
        ),
        max_leaves=5,
    )


# What computes a part `{e}` into the variable `{v}`, and what stands above the function.
PIECES = {
    "assignment": ("{v} = {e}", ""),
    "helper": ("{v} = part_{v}(logp, ref_logp, old_logp, mask, beta)", "def part_{v}({fields}):\n    return {e}"),
    "tuple": ("_, {v} = mask, {e}", ""),
    "dictionary": ("kept = {{}}\nkept['x'] = {e}\n{v} = kept['x']", ""),
    "closure": ("def inner(scale):\n    return scale * ({e})\n{v} = inner(2.0) / 2.0", ""),
    "lambda": ("{v} = (lambda scale: scale * ({e}))(1.0)", ""),
    "class": (
        "{v} = Part_{v}(2.0).of(logp, ref_logp, old_logp, mask, beta)",
        "class Part_{v}:\n    def __init__(self, scale):\n        self.scale = scale\n"
        "    def of(self, {fields}):\n        return self.scale * ({e}) / self.scale",
    ),
    "branch on a constant": ("kind = 'k3'\nif kind == 'k1':\n    {v} = logp\nelse:\n    {v} = {e}", ""),
    "branch on a value": ("if beta > 1:\n    {v} = mask\nelif beta > 0:\n    {v} = {e}\nelse:\n    {v} = logp", ""),
    "early return": (
        "{v} = part_{v}(logp, ref_logp, old_logp, mask, beta)",
        "def part_{v}({fields}):\n    if beta > 1:\n        return logp\n    return {e}",
    ),
    "loop over constants": ("{v} = 0.0\nfor scale in (0.25, 0.75):\n    {v} = {v} + scale * ({e})", ""),
    "loop over rows": (
        "rows = []\nfor i in range(len(mask)):\n    whole = ({e}) + 0 * mask\n    rows.append(whole[i])\n"
        "{v} = torch.stack(rows)",
        "",
    ),
    "comprehension": ("{v} = torch.stack([row for row in (({e}) + 0 * mask)])", ""),
    "no gradient": ("with torch.no_grad():\n    {v} = {e}", ""),
    "conditional expression": ("{v} = ({e}) if beta < 1 else mask", ""),
    "in place": ("{v} = ({e}) + 0 * mask\n{v}.mul_(2.0)\n{v} /= 2.0", ""),
}
FIELDS = "logp, ref_logp, old_logp, mask, beta"


@st.composite
def programs(draw):
    """Return the source of a loss: parts computed in random ways, then combined."""
    above, body, names = [], [], []
    for number in range(draw(st.integers(1, 4))):
        expression = draw(expressions())
        if names and draw(st.booleans()):
            expression = f"({expression}) * {draw(st.sampled_from(names))}"
        name = f"v{number}"
        # What stands above the function sees its parameters alone.
        kinds = [kind for kind, (_, before) in PIECES.items() if not before or not any(v in expression for v in names)]
        code, before = PIECES[draw(st.sampled_from(sorted(kinds)))]
        filling = {"v": name, "e": expression, "fields": FIELDS}
        above.append(before.format(**filling))
        body.append(textwrap.indent(code.format(**filling), "    "))
        names.append(name)
    total = " + ".join(f"(({name} + 0 * mask) * mask).sum()" for name in names)
    return "\n".join(["import torch", *above, f"def loss({FIELDS}):", *body, f"    return beta * ({total})"])


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_a_random_program_that_is_read_gives_what_it_gives_when_it_is_run(source):
    assert same(read(source), run(source)), source


# Constructs one by one


def sources(page):
    """Return the code of the sections of a page beside this file, by their titles."""
    text = (Path(__file__).parent / page).read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.+?)\n\n```python\n(.+?)```", text, re.MULTILINE | re.DOTALL))


CONSTRUCTS = sources("constructs.md")


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_that_is_read_gives_what_it_gives_when_it_is_run(name):
    assert same(read(CONSTRUCTS[name]), run(CONSTRUCTS[name]))


# What is not known

OPTIONS = """
def penalty(logp, ref_logp, kind):
    d = logp - ref_logp
    if kind == "k1":
        return d
    elif kind in ("k2", "mse"):
        return d ** 2 / 2
    elif kind == "k3":
        return (-d).exp() - 1 + d
    raise NotImplementedError

def loss(logp, ref_logp, config):
    kl = penalty(logp, ref_logp, config.kind)
    if config.kind == "k1":
        kl = kl + 0.0 * logp
    if config.scale is not None:
        kl = config.scale * kl
    return kl.sum()
"""


@pytest.mark.parametrize("kind", ["k1", "k2", "mse", "k3"])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_choice_is_made_when_its_condition_is_given(kind, scale):
    evaluator = Evaluator()
    scope = evaluator.module("source.py", ast.parse(OPTIONS))
    found = evaluator.call(scope.variables["loss"], (), {})
    config = evaluator.graph.node(INPUT, "config")
    options = {
        evaluator.graph.node("attribute", config, name): value for name, value in (("kind", kind), ("scale", scale))
    }
    inputs = {evaluator.graph.node(INPUT, name): value for name, value in fields().items()}
    d = fields()["logp"] - fields()["ref_logp"]
    wanted = {"k1": d, "k2": d**2 / 2, "mse": d**2 / 2, "k3": (-d).exp() - 1 + d}[kind].sum() * (scale or 1.0)
    assert same(evaluate([found], inputs | options)[found], wanted)


def conditions(node):
    """Return the conditions of all choices below a node."""
    found, stack = set(), [node]
    while stack:
        one = stack.pop()
        if one.operation == "choice" and isinstance(one.arguments[0], Node):
            found.add(one.arguments[0])
        stack.extend(one.parts)
    return found


def test_tests_of_one_symbol_exclude_each_other():
    """After `kind == "k1"` the second test of it needs no choice of its own."""
    source = """
        def loss(logp, ref_logp, kind):
            if kind == "k1":
                if kind == "k2":
                    return ref_logp.sum()
                return logp.sum()
            if kind != "k1":
                return (logp - ref_logp).sum()
            return ref_logp.sum()
    """
    evaluator = Evaluator()
    scope = evaluator.module("source.py", ast.parse(textwrap.dedent(source)))
    found = evaluator.call(scope.variables["loss"], (), {})
    (only,) = conditions(found)
    assert (only.operation, only.arguments[0].arguments, only.arguments[1]) == ("==", ("kind",), "k1")


def test_an_attribute_that_nothing_sets_is_an_input_and_one_that_a_constructor_sets_is_not():
    source = """
        class Trainer:
            def __init__(self, beta=0.5):
                self.beta = beta
            def compute_loss(self, logp, ref_logp):
                return self.beta * self.scale * (logp - ref_logp).sum()
    """
    evaluator = Evaluator()
    kind = evaluator.module("source.py", ast.parse(textwrap.dedent(source))).variables["Trainer"]
    trainer = Thing(kind, {}, evaluator.graph.node(INPUT, "self"))
    evaluator.call(evaluator.attribute(trainer, "__init__"), (), {})
    found = evaluator.call(evaluator.attribute(trainer, "compute_loss"), (), {})
    inputs = {evaluator.graph.node(INPUT, name): value for name, value in fields().items()}
    with pytest.raises(UnknownError):
        evaluate([found], inputs)
    scale = evaluator.graph.node("attribute", evaluator.graph.node(INPUT, "self"), "scale")
    wanted = 0.5 * 3.0 * (fields()["logp"] - fields()["ref_logp"]).sum()
    assert same(evaluate([found], inputs | {scale: 3.0})[found], wanted)


def test_the_default_of_an_attribute_that_may_be_missing_is_one_of_the_choices():
    source = """
        def loss(logp, ref_logp, config):
            return getattr(config, "scale", 2.0) * (logp - ref_logp).sum()
    """
    evaluator = Evaluator()
    scope = evaluator.module("source.py", ast.parse(textwrap.dedent(source)))
    found = evaluator.call(scope.variables["loss"], (), {})
    config = evaluator.graph.node(INPUT, "config")
    (has,) = conditions(found)
    inputs = {evaluator.graph.node(INPUT, name): value for name, value in fields().items()}
    inputs[evaluator.graph.node("attribute", config, "scale")] = 3.0
    gap = (fields()["logp"] - fields()["ref_logp"]).sum()
    for there, scale in ((True, 3.0), (False, 2.0)):
        assert same(evaluate([found], {**inputs, has: there})[found], scale * gap)


def test_two_calls_of_one_function_with_the_same_arguments_are_one_node_and_others_are_not():
    source = """
        import torch
        def loss(logp, ref_logp, old_logp):
            one, other = torch.sub(logp, ref_logp), torch.sub(logp, old_logp)
            return one, torch.sub(logp, ref_logp), other
    """
    evaluator = Evaluator()
    scope = evaluator.module("source.py", ast.parse(textwrap.dedent(source)))
    one, again, other = evaluator.call(scope.variables["loss"], (), {})
    assert one is again
    assert one is not other


def test_what_cannot_be_followed_is_opaque_and_says_what_it_is():
    source = """
        import secrets
        def loss(logp, ref_logp):
            return secrets.token_hex(logp) * ref_logp
    """
    with pytest.raises(UnknownError, match="call"):
        read(source)


@pytest.mark.parametrize(
    "body",
    ["return loss(logp)", "return (lambda f: f(f))(lambda f: f(f))", "x = [logp]\n    x.append(x)\n    return x[0]"],
)
def test_recursion_ends(body):
    evaluator = Evaluator()
    scope = evaluator.module("source.py", ast.parse(f"def loss(logp):\n    {body}"))
    evaluator.call(scope.variables["loss"], (), {})


def test_a_function_of_too_many_branches_is_said_to_be_one():
    calls = "\n".join(f"    x = f{n}(x, y)" for n in range(30))
    helpers = "\n".join(
        f"def f{n}(x, y):\n    return f{n + 1}(x, y) + f{n + 1}(y, x + y)"
        if n < 30
        else f"def f{n}(x, y):\n    return x"
        for n in range(31)
    )
    evaluator = Evaluator()
    scope = evaluator.module("source.py", ast.parse(f"{helpers}\ndef loss(x, y):\n{calls}\n    return x"))
    with pytest.raises(TooLargeError, match="more branches"):
        evaluator.call(scope.variables["loss"], (), {})

"""Terms in random pieces of a loss, fields that are not what they seem, and how terms are told apart."""

import inspect
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scan import reading
from scan.reading import HEAD, found, sections, value_of
from weekly import examples

# A random term in random pieces of a loss

RATIOS = ("logp - ref_logp", "-(ref_logp - logp)", "torch.sub(logp, ref_logp)")
OF_TOKENS = ("({0})", "({0}) ** 2 / 2", "torch.exp(-({0})) - 1 + ({0})", "({0}).abs()", "torch.expm1({0}) - ({0})")
TOKENS = st.builds(str.format, st.sampled_from(OF_TOKENS), st.sampled_from(RATIOS))
P, Q = "logits.softmax(-1)", "F.softmax(ref_logits, -1)"
LOG_P, LOG_Q = "F.log_softmax(logits, -1)", "ref_logits.log_softmax(-1)"
OF_VOCABULARY = (
    f"({P} * ({LOG_P} - {LOG_Q})).sum(-1)",
    f"torch.sum({Q} * ({LOG_Q} - {LOG_P}), dim=-1)",
    f"F.kl_div({LOG_P}, {LOG_Q}, log_target=True, reduction='none').sum(-1)",
    f"({P} * ({LOG_P} - torch.log(0.75 * {P} + 0.25 * {Q}))).sum(-1)",
)
# What an option may put in place of a term, of the vocabulary and of tokens: no sum of the forms above.
OTHERS = (f"(({P} - {Q}) ** 2).sum(-1)", "(logp - ref_logp) ** 4")
WEIGHTS = ("0.5 * ({0})", "({0}) * mask", "({0}) / 4", "torch.exp(logp - old_logp).detach() * ({0})", "1.0 * ({0})")


def terms_of(forms: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return trees of operations over forms: weighted, and added up."""
    return st.recursive(
        forms,
        lambda inner: st.one_of(
            st.builds(str.format, st.sampled_from(WEIGHTS), inner),
            st.builds("({}) + 0.25 * ({})".format, inner, inner),
        ),
        max_leaves=3,
    )


# What computes a part `{e}` into the variable `{v}`, and what stands above the function; `{given}` hands on its fields.
PIECES = {
    "assignment": ("{v} = {e}", ""),
    "helper": ("{v} = part_{v}({fields})", "def part_{v}({fields}):\n    return {e}"),
    "helper with keywords": (
        "{v} = part_{v}(**dict({given}), scale=2.0)",
        "def part_{v}({fields}, *, scale=1.0):\n    whole = scale * ({e})\n    return whole / scale",
    ),
    "tuple": ("_, {v} = mask, {e}", ""),
    "two results of a helper": (
        "count, {v} = part_{v}({fields})",
        "def part_{v}({fields}):\n    return mask.sum(), {e}",
    ),
    "dictionary": ("kept = {{}}\nkept['x'] = {e}\n{v} = kept['x']", ""),
    "closure": ("def inner(scale):\n    return scale * ({e})\n{v} = inner(2.0) / 2.0", ""),
    "lambda": ("{v} = (lambda scale: scale * ({e}))(1.0)", ""),
    "class that is called": (
        "{v} = Part_{v}(2.0)({fields})",
        "class Part_{v}:\n    def __init__(self, scale):\n        self.scale = scale\n"
        "    def __call__(self, {fields}):\n        return self.scale * ({e}) / self.scale",
    ),
    "module": (
        "{v} = Part_{v}()({given})",
        "class Part_{v}(nn.Module):\n    def forward(self, {fields}):\n        return {e}",
    ),
    "branch on a constant": ("kind = 'k3'\nif kind == 'k1':\n    {v} = mask\nelse:\n    {v} = {e}", ""),
    "loop over constants": ("{v} = 0.0\nfor scale in (0.25, 0.75):\n    {v} = {v} + scale * ({e})", ""),
    "loop over rollouts": (
        "rows = []\nwhole = {e}\nfor i in range(len(mask)):\n    rows.append(whole[i])\n{v} = torch.stack(rows)",
        "",
    ),
    "loop over chunks": (
        "whole = {e}\n{v} = torch.cat([whole[i : i + 2] for i in range(0, len(mask), 2)], dim=0)",
        "",
    ),
    "comprehension": ("{v} = torch.stack([row for row in {e}])", ""),
    "in place": ("{v} = 2.0 * ({e})\n{v} /= 2.0", ""),
}
HELPERS = ("inner", "part_v0", "Part_v0.__call__", "Part_v0.forward")
FIELDS = ("logp", "ref_logp", "old_logp", "logits", "ref_logits", "mask")
AVERAGES = (
    "({0} * mask).sum()",
    "({0} * mask).sum() / mask.sum()",
    "(({0} * mask).sum(-1) / mask.sum(-1)).mean()",
    "torch.mean({0} * mask)",
)
POLICY_GRADIENT = "-(torch.exp(logp - old_logp) * advantages * mask).sum()"


@st.composite
def losses(draw: Callable[..., Any]) -> tuple[str, set[str], bool]:
    """Return the source of a loss, the functions in which its term stands, and whether it depends on an option."""
    forms, other = draw(st.sampled_from([(st.sampled_from(OF_VOCABULARY), OTHERS[0]), (TOKENS, OTHERS[1])]))
    filling = {"fields": ", ".join(FIELDS), "given": ", ".join(f"{name}={name}" for name in FIELDS)}
    above, body = [], []
    expression, optional = draw(terms_of(forms)), draw(st.booleans())
    for number in range(draw(st.integers(1, 2))):
        # What stands above the function sees its parameters alone, and a sum of a helper's results is a second term.
        inner = [kind for kind, (_, before) in PIECES.items() if not before and kind != "loop over constants"]
        code, before = PIECES[draw(st.sampled_from(inner if number else sorted(PIECES)))]
        above.append(before.format(v=f"v{number}", e=expression, **filling))
        body.append(code.format(v=f"v{number}", e=expression, **filling))
        expression = f"v{number}"
        if not number:
            whole = above[0] + body[0]
            place = next((one for one in HELPERS if all(word in whole for word in one.split("."))), "loss")
    if optional:
        body.append(f"if config.kind == 'other':\n    {expression} = {other}")
    average = draw(st.sampled_from(AVERAGES)).format(expression)
    body += [f"policy_loss = {POLICY_GRADIENT}", f"return policy_loss + beta * {average}"]
    lines = textwrap.indent("\n".join(body), "    ")
    parameters = f"{filling['fields']}, advantages, beta, config"
    return (
        "\n".join([*above, f"def loss({parameters}):", lines, ""]),
        {place, "loss"} if optional else {place},
        optional,
    )


def rollouts(seed: int = 0) -> dict[str, Any]:
    """Return fields of random rollouts; log-probs of the vocabulary are those of `raw`."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    raw = draw(4, 3, 5).requires_grad_()
    return {
        "raw": raw,
        "logp": draw(4, 3).requires_grad_(),
        "ref_logp": draw(4, 3),
        "old_logp": draw(4, 3),
        "logits": raw.log_softmax(-1),
        "ref_logits": draw(4, 3, 5).log_softmax(-1),
        "mask": torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]], dtype=torch.float64),
        "advantages": torch.zeros(4, 1, dtype=torch.float64),
        "beta": 0.3,
    }


def gradients(value: torch.Tensor, fields: dict[str, Any]) -> list[torch.Tensor]:
    """Return the gradients of a value with respect to the policy's log-probs."""
    inputs = [fields["logp"], fields["raw"]]
    return list(torch.autograd.grad(value, inputs, retain_graph=True, materialize_grads=True))


@settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(losses())
def test_a_random_term_is_found_once_and_its_program_computes_it(loss: tuple[str, set[str], bool]) -> None:
    text, functions, optional = loss
    with tempfile.TemporaryDirectory() as folder:
        terms = found(Path(folder), text)
    assert sorted(find.function.title for find, _ in terms) == sorted(functions), text
    variants = [one for _, its in terms for one in its if one.called]
    assert {one.place for one in variants} == {"loss"}, text
    if optional and len(functions) == 1:
        assert sorted(one.name for one in variants) == ["kind otherwise", "kind='other'"], text
    fields = rollouts()
    names: dict[str, Any] = {}
    exec(HEAD.replace("import optax\n", "") + text, names)
    wanted = [direct(names["loss"], fields, kind) for kind in (("", "other") if optional else ("",))]
    values = [value_of(one, fields) for one in variants]
    assert len(values) == len(wanted), text
    for value, mine in ((one, gradients(one, fields)) for one in values):
        other = min(wanted, key=lambda one: float((one - value).abs().detach()))
        wanted.remove(other)
        torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-12, msg=text)
        for one, its in zip(mine, gradients(other, fields), strict=True):
            torch.testing.assert_close(one, its, rtol=1e-12, atol=1e-12, msg=text)


def direct(loss: Callable[..., torch.Tensor], fields: dict[str, Any], kind: str) -> torch.Tensor:
    """Return what a loss is when it is run, where an option is of a kind."""
    config = SimpleNamespace(kind=kind)
    return loss(**{name: fields.get(name, config) for name in inspect.signature(loss).parameters})


# What is told of a term where only it can be lifted, or where a field is not what it seems: one row each.
ODD_FIELDS = {name: (text, formula) for name, formula, text in sections("fields.md")}


@pytest.mark.parametrize("name", ODD_FIELDS)
def test_a_field_has_its_sign_its_gradient_and_its_padding(name: str, tmp_path: Path) -> None:
    text, formula = ODD_FIELDS[name]
    (_, its) = found(tmp_path, text)[-1]
    (only,) = [one for one in its if one.called]
    fields = reading.rollouts()
    fields |= {one: fields[one].clone().requires_grad_() for one in ("logp", "logits")}
    computed = value_of(only, fields)
    wanted = eval(formula, vars(reading))(fields)
    torch.testing.assert_close(computed, wanted)
    assert computed.requires_grad == wanted.requires_grad


MIXED = "torch.log(0.1 * a.exp() + 0.9 * b.exp())"
SIDES = "p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)"
# How terms are told: the names of the variants of each, in the order of their lines.
TOLD = {
    "two terms of one function with the same sides, that are not in place of each other": (
        f"""
def divergences(kind, logits, ref_logits, mask):
    {SIDES}
    if "skew" in kind:
        forward = (q.exp() * (q - {MIXED.replace("a", "q").replace("b", "p")})).sum(-1)
        backward = (p.exp() * (p - {MIXED.replace("a", "p").replace("b", "q")})).sum(-1)
    else:
        forward = (q.exp() * (q - p)).sum(-1)
        backward = (p.exp() * (p - q)).sum(-1)
    return (forward * mask).sum(), (backward * mask).sum()
""",
        [["'skew' in kind", "not 'skew' in kind"], ["'skew' in kind", "not 'skew' in kind"]],
    ),
    "a branch of a loss that its own option excludes": (
        f"""
def kl_loss(kind, logits, ref_logits, mask):
    {SIDES}
    term = ((q if "forward" in kind else p).exp() * (q - p)).sum(-1)
    if kind == "forward_kl":
        return (term * mask).sum()
    return (mask * logits.mean(-1)).sum()
""",
        [[""]],
    ),
    "what is done where an assertion fails": (
        f"""
def kl_loss(weight, logits, ref_logits, mask):
    {SIDES}
    try:
        assert weight is not None
        term = (weight * p.exp() * (p - q)).sum(-1)
    except AssertionError:
        term = (q.exp() * (q - p)).sum(-1)
    return (term * mask).sum()
""",
        [["with weight", "without weight"]],
    ),
    "a number or a tensor": (
        f"""
def kl_loss(logits, ref_logits, mask, fixed=True):
    {SIDES}
    share = 0.1 if fixed else 0.2 * torch.exp(p - q).detach()
    share = share.clamp(0.01, 0.9) if isinstance(share, torch.Tensor) else share
    return ((p.exp() * (p - torch.log(share * p.exp() + (1 - share) * q.exp()))).sum(-1) * mask).sum()
""",
        [["fixed", "not fixed"]],
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_terms_of_a_function_are_told_apart(name: str, tmp_path: Path) -> None:
    text, wanted = TOLD[name]
    terms = found(tmp_path, text)
    assert [sorted(one.name for one in its) for _, its in terms] == [sorted(names) for names in wanted]
    assert all(one.program for _, its in terms for one in its)


def test_the_lines_of_a_term_are_its_own(tmp_path: Path) -> None:
    terms = found(tmp_path, next(text for text, names in TOLD.values() if len(names) == 2))
    assert [sorted(find.lines) for find, _ in terms] == [[10, 13], [11, 14]]

"""The core of the scan on the symbolic evaluator: what it finds, what its programs compute, and what it leaves alone."""

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
from scan import test_find, test_lift

from kltest.scanning.core.entries import Tree
from kltest.scanning.core.finds import Find, finds
from kltest.scanning.core.lifting import NAME
from kltest.scanning.core.variants import Variant, variants
from kltest.scanning.sources import sources

HEAD = "import optax\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"


def found(folder: Path, text: str) -> list[tuple[Find, list[Variant]]]:
    """Return the terms of a file with their variants."""
    (folder / "code.py").write_text(HEAD + text)
    left_out: list[str] = []
    tree = Tree({str(source.path): source for source in sources([folder], left_out)})
    assert left_out == []
    return [(find, variants(tree, find)) for find in finds(tree)]


def value_of(variant: Variant, fields: dict[str, Any]) -> torch.Tensor:
    """Return what the program of a variant computes of rollouts."""
    assert variant.program, variant.why
    names: dict[str, Any] = {}
    exec(variant.program, names)
    return names[NAME](**{name: fields[name] for name in inspect.signature(names[NAME]).parameters})


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
    return "\n".join([*above, f"def loss({parameters}):", lines, ""]), {place, "loss"} if optional else {place}, optional


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(losses())
def test_a_random_term_is_found_once_and_its_program_computes_it(loss: tuple[str, set[str], bool]) -> None:
    text, functions, optional = loss
    with tempfile.TemporaryDirectory() as folder:
        terms = found(Path(folder), text)
    assert sorted(find.function.title for find, _ in terms) == sorted(functions), text
    told = [one for _, variants in terms for one in variants if one.called]
    assert {one.place for one in told} == {"loss"}, text
    if optional and len(functions) == 1:
        assert sorted(one.name for one in told) == ["kind otherwise", "kind='other'"], text
    fields = rollouts()
    names: dict[str, Any] = {}
    exec(HEAD.replace("import optax\n", "") + text, names)
    wanted = [direct(names["loss"], fields, kind) for kind in (("", "other") if optional else ("",))]
    values = [value_of(one, fields) for one in told]
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

"""What the tests of the scan share: terms of a text, what their programs compute, and formulas of rollouts."""

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from kltest.scanning.entries import Tree
from kltest.scanning.finds import Find, finds
from kltest.scanning.rows import NAME
from kltest.scanning.sources import contents, parsed
from kltest.scanning.variants import Variant, told

HEAD = "import optax\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"
Fields = dict[str, Any]


def found(folder: Path, text: str = "", *, logged: bool = False, **more: str) -> list[tuple[Find, list[Variant]]]:
    """Return the terms of a folder with their variants; of a file of a text, and of others by their dotted names."""
    for name, code in {"code": HEAD + text, **more}.items():
        file = folder / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    left_out: list[str] = []
    tree = Tree({str(source.path): source for source in parsed(contents([folder], left_out), left_out)})
    assert left_out == []
    return [(find, told(find.made)) for find in finds(tree, logged=logged)]


def variants(folder: Path, text: str = "", **more: Any) -> list[Variant]:
    """Return the variants of all terms of a folder, without those of helpers that no loss calls."""
    return [one for _, its in found(folder, text, **more) for one in its if one.called]


def value_of(variant: Variant, fields: Fields) -> Any:
    """Return what the program of a variant computes of rollouts."""
    function = _function(variant)
    return function(**{name: fields[name] for name in inspect.signature(function).parameters})


def parameters(variant: Variant) -> set[str]:
    """Return the fields that the program of a variant reads."""
    return set(inspect.signature(_function(variant)).parameters)


def _function(variant: Variant) -> Any:
    assert variant.program, variant.why
    names: dict[str, Any] = {}
    exec(variant.program, names)
    return names[NAME]


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


def jensen_shannon(given: Fields) -> torch.Tensor:
    one, other = given["logits"], given["ref_logits"]
    middle = torch.log((one.exp() + other.exp()) / 2)
    return ((one.exp() * (one - middle)).sum() + (other.exp() * (other - middle)).sum()) / 2


def row_means(value: Callable[[Fields], torch.Tensor]) -> Callable[[Fields], torch.Tensor]:
    return lambda given: ((value(given) * given["mask"]).sum(1) / given["mask"].sum(1)).mean()


def of_rollouts(value: Callable[..., torch.Tensor], *, mean: bool = False) -> Callable[[Fields], torch.Tensor]:
    """A formula of the sums, or means, of a rollout's log-probs over its live tokens."""

    def taken(given: Fields) -> torch.Tensor:
        count = given["mask"].sum(1) if mean else 1
        return value(*((given[f"{who}logp"] * given["mask"]).sum(1) / count for who in ("", "ref_", "old_")))

    return taken


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


def sections(name: str) -> list[tuple[str, str, str]]:
    """(title, words, code) of each section of a file beside this one."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return re.findall(r"^## (.+?)\n\n`(.+?)`\n\n```python\n(.+?)```", text, re.MULTILINE | re.DOTALL)


def cases(names: Iterable[str], not_yet: dict[str, str]) -> list[Any]:
    """Return the names of cases as parameters, those that are not done yet with their class of failure."""
    names = list(names)
    assert not_yet.keys() <= set(names)
    return [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=not_yet[name])) if name in not_yet else name
        for name in names
    ]

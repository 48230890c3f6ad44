"""The adapter to TRL: a table as a language model.

`kltest libraries trl` grades its trainers from a bare machine: what they follow is held against derivations in
test_libraries_recorded.py, and against audits of their training in test_audit_trl.py.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from kltest.adapters import find
from kltest.adapters import trl as described
from kltest.environments import Instance, ragged

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed here")
ADAPTER = find("trl")


def test_the_defaults_come_first_and_every_type_of_loss_has_a_setting():
    names = [setting.name for setting in ADAPTER.settings]
    defaults = [setting.name for setting in ADAPTER.settings if setting.default]
    assert defaults[:2] == names[:2]
    assert set(defaults) == {name for name in names if name.endswith("/defaults")}
    assert all(ADAPTER.setting(f"grpo/loss_type={name}") for name in described.LOSS_TYPES)
    assert {setting.depth for setting in ADAPTER.settings} == {"trainer", "loss"}


def tables_of(environment, table):
    """The contexts of an environment as those of a tabular model, prompt by prompt."""
    from kltest.adapters.tabular import Tables

    follow = np.zeros((len(table) + 1, table.shape[1]), dtype=np.int64)
    follow[1:] = np.where(environment.successors[..., 0] < 0, 0, environment.successors[..., 0] + 1)
    start = torch.from_numpy(np.concatenate([[0], environment.start + 1]))
    return Tables(torch.from_numpy(table), start, torch.from_numpy(follow), torch.arange(len(follow)))


@pytest.fixture(scope="module")
def instance():
    return Instance.draw(ragged(3, 3, prompts=[0.3, 0.7]), 5)


@needs_transformers
@pytest.mark.parametrize(
    ("left", "before", "between", "after"), [(0, 0, 0, 0), (2, 0, 0, 0), (1, 2, 0, 1), (0, 1, 2, 0), (1, 1, 1, 2)]
)
def test_logits_are_those_of_the_prefix_whatever_stands_around_it(instance, left, before, between, after):
    """Walked independently, context by context, for padding on every side and prompts of several tokens."""
    from kltest.adapters.tabular import PROMPT, TabularConfig, TabularLM

    model = TabularLM(TabularConfig())
    paths = instance.paths
    for row in range(len(paths)):
        tokens = paths.tokens[row][: paths.lengths[row]].tolist()
        prompt = [PROMPT] * before + [PROMPT + 1 + int(paths.prompt[row])]
        pieces = [([1] * left, 0), (prompt, 1), ([0] * between, 0), (tokens, 1), ([2] * after, 0)]
        ids = torch.tensor([[token for piece, _ in pieces for token in piece]])
        mask = torch.tensor([[live for piece, live in pieces for _ in piece]])
        # The logits that predict the first token stand at the position before it, masked or not.
        places = left + len(prompt) + between - 1 + torch.arange(len(tokens))
        with model.holding(tables_of(instance.environment, instance.policy)):
            logits = model(input_ids=ids, attention_mask=mask).logits
            kept = model(input_ids=ids, attention_mask=mask, logits_to_keep=2).logits
        expected = instance.policy[paths.contexts[row][: len(tokens)]]
        torch.testing.assert_close(logits[0, places], torch.from_numpy(expected), rtol=0, atol=0)
        torch.testing.assert_close(kept, logits[:, -2:], rtol=0, atol=0)


@needs_transformers
def test_a_saved_model_is_the_same_model_again(instance, tmp_path):
    from transformers import AutoModelForCausalLM

    from kltest.adapters.tabular import PROMPT, TabularConfig, TabularLM

    model = TabularLM(TabularConfig())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(again) is TabularLM
    ids = torch.tensor([[PROMPT + 1, 0, 1], [PROMPT + 2, 1, 1]])
    tables = tables_of(instance.environment, instance.policy)
    with model.holding(tables), again.holding(tables):
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0] in dir(sys.modules["transformers"])


@needs_transformers
def test_rows_share_nothing_and_may_come_in_any_order():
    """The gradient of each forwarded row arrives at its own row of the leaf, equal rows included."""
    from kltest.adapters.tabular import PROMPT, TabularConfig, TabularLM, chains

    leaf = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0)).double().repeat(4, 1, 1).requires_grad_()
    model = TabularLM(TabularConfig())
    order, weights = [2, 0, 3, 1, 2], torch.tensor([1.0, 10.0, 100.0, 1000.0, 0.5]).double()
    ids = torch.tensor([[PROMPT + 1 + row, 1, 0] for row in order])
    with model.holding(chains(leaf)):
        halves = torch.cat([model(part).logits[:, :2] for part in ids.split(2)])
    (found,) = torch.autograd.grad((halves.sum(dim=(1, 2)) * weights).sum(), [leaf])
    of_rows = torch.tensor([10.0, 1000.0, 1.5, 100.0]).double()
    torch.testing.assert_close(found, of_rows[:, None, None].expand(4, 2, 3))


def test_recipes_can_be_copied():
    text = (Path(described.__file__).parent / "recipes.py").read_text(encoding="utf-8")
    roots = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert roots == {"typing", "torch", "trl"}

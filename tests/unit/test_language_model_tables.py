"""Language models as tables: the logits, and their graph, are those of the model on whole rollouts."""

import numpy as np
import pytest
import torch
from moments_plain import PROMPTS
from torch import nn

from kltest.environments import Instance, bandit, ragged, sequence
from kltest.language_models.networks import tabulate
from kltest.loss.calling import bind
from kltest.moments import enumeration, exact


class Causal(nn.Module):
    """Logits that depend on all tokens so far and their order."""

    def __init__(self, vocabulary, ids):
        super().__init__()
        self.tokens, self.out = nn.Embedding(ids, 6), nn.Linear(6, vocabulary)
        self.unused = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, ids):
        places = torch.arange(1.0, ids.shape[1] + 1, dtype=torch.float64)[:, None]
        return self.out(torch.tanh((places.sqrt() * self.tokens(ids)).cumsum(dim=1)))


@pytest.mark.parametrize("environment", [bandit(4), sequence(2, 3, prompts=PROMPTS), ragged(3, 3, prompts=PROMPTS)])
def test_rows_and_their_gradients_are_those_of_whole_rollouts(environment):
    torch.manual_seed(0)
    inputs = [[environment.vocabulary + i, 0, 1][: 2 + i] for i in range(len(environment.start))]
    model = Causal(environment.vocabulary, environment.vocabulary + 2)
    found = tabulate(model, environment, inputs)
    whole = [None] * environment.n_contexts
    paths = environment.enumerate()
    for contexts, tokens, live, prompt in zip(paths.contexts, paths.tokens, paths.mask, paths.prompt, strict=True):
        rows = model(torch.tensor([[*inputs[prompt], *tokens[live]]]))[0, len(inputs[prompt]) - 1 : -1]
        for context, row in zip(contexts[live], rows, strict=True):
            whole[context] = row
    expected = torch.stack(whole)
    # Sums of a few terms in another order.
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    weights, leaves = torch.randn(found.shape, dtype=torch.float64), [model.tokens.weight, *model.out.parameters()]
    pulled, plain = (torch.autograd.grad((one * weights).sum(), leaves) for one in (found, expected))
    torch.testing.assert_close(pulled, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("coupled", [False, True])
def test_many_rollouts_equal_few_at_a_time(coupled, monkeypatch):
    """In chunks; and again one by one if a late chunk shows a coupling, without counting any rollout twice."""
    environment = sequence(3, 3)
    logits = tabulate(Causal(3, 4), environment, [[3]]).detach().numpy()
    instance = Instance.of(environment, logits, np.zeros(logits.shape))

    def late(logp, ref_logp, tokens):
        hidden = coupled and len(logp) == 6 and bool((tokens[:, 0] == 2).any())
        return (logp - ref_logp).sum(dim=1) ** 2 * (1.5 if hidden else 1.0)

    singly = exact(bind(late), instance)
    monkeypatch.setattr(enumeration, "ONE_BY_ONE", 0)
    monkeypatch.setattr(enumeration, "CHUNK", 18)
    monkeypatch.setattr(enumeration, "PROVED", 50)
    chunked = exact(bind(late), instance)
    assert chunked.reduction == ("coupled" if coupled else "per-row")
    assert np.abs(chunked.gradient - singly.gradient).max() < 1e-12
    assert chunked.second_moment == pytest.approx(singly.second_moment, rel=1e-12)


def test_ids_beyond_the_vocabulary_are_left_out():
    environment = sequence(3, 2)
    torch.manual_seed(0)
    model = Causal(7, 9)
    logits = tabulate(model, environment, [[3]])
    assert logits.shape == (environment.n_contexts, 3)
    assert torch.equal(logits[0], model(torch.tensor([[3]]))[0, -1, :3])

"""Language models as tables: gradients at parameters are those of plain autograd through the model."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from module_gradients import instance_of, pull_back
from moments_plain import PROMPTS
from torch import nn

from kltest.environments import bandit, mdp, ngram, ragged, sequence
from kltest.errors import UsageError
from kltest.language_models.networks import tabulate
from kltest.loss.calling import bind
from kltest.moments import enumeration, exact
from kltest.truth import gradient


class Transformer(nn.Module):
    """One causal attention layer; with `output` as of a Hugging Face model."""

    def __init__(self, vocabulary, ids, *, width=6, length=6, wrapped=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(ids, width), nn.Embedding(length, width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, vocabulary)
        self.unused = nn.Parameter(torch.ones(2))
        self.wrapped = wrapped
        self.double()

    def forward(self, ids):
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        query, key, value = self.mix(hidden).chunk(3, dim=-1)
        scores = (query @ key.mT).masked_fill(torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool(), -torch.inf)
        logits = self.out(torch.tanh(hidden + scores.softmax(dim=-1) @ value))
        return SimpleNamespace(logits=logits) if self.wrapped else logits


def k3_and_full(logp, ref_logp, logits, ref_logits):
    return (ref_logp - logp).exp() + (logits.exp() * (logits - ref_logits)).sum(dim=-1) + logp**2


def length_squared(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(dim=1) ** 2 * mask.sum(dim=1)


def by_hand(function, model, instance, inputs, sampler):
    """Each rollout's loss through the module itself, one backward pass at a time, on whole rollouts."""
    paths, total, square = instance.paths, 0.0, 0.0
    tables = {"ref": torch.from_numpy(instance.reference), "old": torch.from_numpy(instance.behaviour(sampler))}
    for row, weight in enumerate(instance.rollout_weights(sampler)):
        live = paths.mask[row]
        tokens = torch.from_numpy(paths.tokens[row][live])
        contexts = torch.from_numpy(paths.contexts[row][live])
        prompt = inputs[paths.prompt[row]]
        answer = model(torch.cat([torch.tensor(prompt), tokens])[None])
        logits = getattr(answer, "logits", answer)[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        fields = {
            "logp": logits.gather(1, tokens[:, None])[:, 0][None],
            "logits": logits[None],
            "ref_logp": tables["ref"][contexts, tokens][None],
            "ref_logits": tables["ref"][contexts][None],
            "mask": torch.ones(1, len(tokens), dtype=torch.float64),
        }
        answer = function(
            **{name: fields[name] for name in function.__code__.co_varnames[: function.__code__.co_argcount]}
        )
        parts = torch.autograd.grad(answer.sum(), list(model.parameters()), allow_unused=True)
        flat = torch.cat(
            [
                torch.zeros(p.numel()).double() if g is None else g.ravel()
                for g, p in zip(parts, model.parameters(), strict=True)
            ]
        ).numpy()
        total, square = total + weight * flat, square + weight * flat @ flat
    return total, square


def flat(gradient):
    return np.concatenate([part.ravel() for part in gradient.values()])


@pytest.mark.parametrize("sampler", ["current", "stale"])
@pytest.mark.parametrize("loss", [k3_and_full, length_squared])
@pytest.mark.parametrize("environment", [bandit(4), sequence(2, 3, prompts=PROMPTS), ragged(3, 3, prompts=PROMPTS)])
@pytest.mark.parametrize("wrapped", [False, True], ids=["logits", "object with logits"])
def test_a_transformer_equals_plain_autograd(environment, loss, sampler, wrapped):
    torch.manual_seed(0)
    inputs = [[environment.vocabulary + i, 0, 1][: 2 + i] for i in range(len(environment.start))]
    model = Transformer(environment.vocabulary, environment.vocabulary + 2, wrapped=wrapped)
    logits = tabulate(model, environment, prompts=inputs)
    others = np.random.default_rng(0).standard_normal((2, *logits.shape))
    instance = instance_of(environment, logits, *others)
    expected, square = by_hand(loss, model, instance, inputs, sampler)
    found = pull_back(exact(bind(loss), instance, sampler).gradient, logits, model)
    # A few hundred sums in another order.
    assert np.abs(flat(found) - expected).max() <= 1e-12 * np.sqrt(square)
    assert not found["unused"].any()


@pytest.mark.parametrize("coupled", [False, True])
def test_many_rollouts_equal_few_at_a_time(coupled, monkeypatch):
    """In chunks; and again one by one if a late chunk shows a coupling, without counting any rollout twice."""
    environment = sequence(3, 3)
    model = Transformer(3, 4)
    logits = tabulate(model, environment)
    instance = instance_of(environment, logits, np.zeros(logits.shape))

    def late(logp, ref_logp, tokens):
        hidden = coupled and len(logp) == 6 and bool((tokens[:, 0] == 2).any())
        return (logp - ref_logp).sum(dim=1) ** 2 * (1.5 if hidden else 1.0)

    singly = exact(bind(late), instance)
    monkeypatch.setattr(enumeration, "ONE_BY_ONE", 0)
    monkeypatch.setattr(enumeration, "CHUNK", 18)
    monkeypatch.setattr(enumeration, "SPOT_CHECKS", 50)
    chunked = exact(bind(late), instance)
    assert chunked.reduction == ("coupled" if coupled else "per-row")
    one, other = (flat(pull_back(found.gradient, logits, model)) for found in (chunked, singly))
    assert np.abs(one - other).max() < 1e-12
    assert chunked.second_moment == pytest.approx(singly.second_moment, rel=1e-12)


def test_a_true_gradient_is_pulled_back_as_well():
    """Finite differences of KL(π‖ref) in the module's parameters, good to about the square of the step."""
    environment = ragged(3, 3)
    torch.manual_seed(1)
    model = Transformer(3, 4)
    reference = np.random.default_rng(0).standard_normal((environment.n_contexts, 3))

    def divergence():
        instance = instance_of(environment, tabulate(model, environment), reference)
        paths, weights = instance.paths, instance.rollout_weights("current")
        return weights @ np.where(paths.mask, paths.chosen(instance.policy - instance.reference), 0.0).sum(axis=1)

    logits = tabulate(model, environment)
    found = pull_back(gradient("reverse_kl", instance_of(environment, logits, reference)), logits, model)
    generator = np.random.default_rng(2)
    for name, parameter in model.named_parameters():
        direction = torch.from_numpy(generator.standard_normal(tuple(parameter.shape)))
        step, sides = 1e-5, []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * direction
                sides.append(divergence())
                parameter -= sign * step * direction
        slope = (sides[0] - sides[1]) / (2 * step)
        assert slope == pytest.approx(float((found[name] * direction.numpy()).sum()), rel=1e-6, abs=1e-9)


class Dropping(Transformer):
    def forward(self, ids):
        return torch.dropout(super().forward(ids), 0.5, train=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tabulate(Transformer(3, 9), ngram(3, 3, 2)), "shares contexts"),
        (lambda: tabulate(Transformer(3, 9), mdp(4, 3, 2)), "shares contexts"),
        (lambda: tabulate(Transformer(2, 9), sequence(3, 2)), r"logits \(1, 1, 3\).*gave \(1, 1, 2\)"),
        (lambda: tabulate(lambda ids: "text", sequence(3, 2)), "gave str"),
        (lambda: tabulate(Transformer(3, 9), sequence(3, 2), prompts=[[1], [2]]), "1 prompts; 2"),
        (lambda: tabulate(Transformer(3, 9), sequence(3, 2), prompts=[[]]), "at least one token id"),
        (lambda: tabulate(Dropping(3, 9), sequence(3, 2)), "evaluation mode"),
    ],
)
def test_bad_modules_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_ids_beyond_the_vocabulary_are_left_out():
    environment = sequence(3, 2)
    torch.manual_seed(0)
    model = Transformer(7, 9)
    logits = tabulate(model, environment)
    assert logits.shape == (environment.n_contexts, 3)
    assert torch.equal(logits[0], model(torch.tensor([[3]]))[0, -1, :3])

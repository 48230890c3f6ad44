"""Modules as policies: the same moments as plain autograd through the module, and as the table when it is one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from moments_plain import PROMPTS, drawn, plain_batch
from torch import nn

from kltest.environments import bandit, mdp, ngram, ragged, sequence
from kltest.errors import UsageError
from kltest.language_models import moments as modules
from kltest.language_models.moments import exact_module
from kltest.language_models.tables import instance_of, pull_back, tabulate, tabulate_contexts
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
@pytest.mark.parametrize("small", [False, True], ids=["jacobian", "backward passes"])
def test_a_transformer_equals_plain_autograd(environment, loss, sampler, small, monkeypatch):
    if small:
        monkeypatch.setattr(modules, "MEMORY", 8)
    torch.manual_seed(0)
    inputs = [[environment.vocabulary + i, 0, 1][: 2 + i] for i in range(len(environment.start))]
    model = Transformer(environment.vocabulary, environment.vocabulary + 2, wrapped=small)
    logits = tabulate(model, environment, prompts=inputs)
    others = np.random.default_rng(0).standard_normal((2, *logits.shape))
    instance = instance_of(environment, logits, *others)
    expected, square = by_hand(loss, model, instance, inputs, sampler)
    moments = exact_module(bind(loss), model, logits, instance, sampler)
    # A few hundred sums in another order.
    assert np.abs(flat(moments.gradient) - expected).max() <= 1e-12 * np.sqrt(square)
    assert moments.second_moment == pytest.approx(square, rel=1e-12)
    assert moments.variance == pytest.approx(square - expected @ expected, rel=1e-10)
    assert not moments.gradient["unused"].any()


class Softplus(torch.autograd.Function):
    """As people write their own: its backward pass takes numbers out of tensors, which allows one at a time."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.log1p(torch.exp(x))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x) if float(grad.abs().sum()) else torch.zeros_like(x)


def test_a_module_whose_backward_pass_takes_one_gradient_at_a_time():
    environment = ragged(3, 2)
    torch.manual_seed(0)
    steps = nn.Linear(environment.n_contexts, 4).double(), nn.Linear(4, environment.vocabulary).double()

    def logits_by(activation):
        one_hot = torch.eye(environment.n_contexts, dtype=torch.float64)
        return steps[1](activation(steps[0](one_hot)))

    module = nn.Sequential(*steps)
    reference = np.random.default_rng(0).standard_normal((environment.n_contexts, 3))
    own, usual = (
        exact_module(bind(length_squared), module, logits, instance_of(environment, logits, reference))
        for logits in (logits_by(Softplus.apply), logits_by(nn.functional.softplus))
    )
    np.testing.assert_allclose(flat(own.gradient), flat(usual.gradient), atol=1e-12)
    assert own.second_moment == pytest.approx(usual.second_moment, rel=1e-12)


class Table(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.from_numpy(logits.copy()))

    def forward(self, contexts):
        return self.logits[contexts]


@pytest.mark.parametrize("world", ["bandit", "ragged", "mdp", "ragged ngram"])
def test_a_table_is_its_own_module(world):
    drawn_ = drawn(world)
    table = Table(drawn_.policy)
    logits = tabulate_contexts(table, drawn_.environment)
    instance = instance_of(drawn_.environment, logits, drawn_.reference, drawn_.sampler)
    expected = exact(bind(k3_and_full), drawn_, "stale")
    moments = exact_module(bind(k3_and_full), table, logits, instance, "stale")
    assert np.abs(moments.gradient["logits"] - expected.gradient).max() < 1e-13
    assert moments.second_moment == pytest.approx(expected.second_moment, rel=1e-12)


@pytest.mark.parametrize("coupled", [False, True])
def test_many_rollouts_equal_few_at_a_time(coupled, monkeypatch):
    """In chunks; and called again one by one where a late chunk gives a coupling away, without counting any twice."""
    environment = sequence(3, 3)
    model = Transformer(3, 4)
    logits = tabulate(model, environment)
    instance = instance_of(environment, logits, np.zeros(logits.shape))

    def late(logp, ref_logp, tokens):
        hidden = coupled and len(logp) == 6 and bool((tokens[:, 0] == 2).any())
        return (logp - ref_logp).sum(dim=1) ** 2 * (1.5 if hidden else 1.0)

    singly = exact_module(bind(late), model, logits, instance)
    monkeypatch.setattr(enumeration, "ONE_BY_ONE", 0)
    monkeypatch.setattr(enumeration, "CHUNK", 18)
    monkeypatch.setattr(enumeration, "SPOT_CHECKS", 50)
    chunked = exact_module(bind(late), model, logits, instance)
    assert chunked.table.reduction == ("coupled" if coupled else "per-row")
    assert np.abs(flat(chunked.gradient) - flat(singly.gradient)).max() < 1e-12
    assert chunked.second_moment == pytest.approx(singly.second_moment, rel=1e-12)
    assert chunked.table.second_moment == pytest.approx(singly.table.second_moment, rel=1e-12)


def test_the_truth_is_pulled_back_as_well():
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
        (lambda: tabulate_contexts(nn.Embedding(4, 2), mdp(4, 3, 2)), r"shape \(4, 3\); it gave \(4, 2\)"),
    ],
)
def test_bad_modules_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_another_policy_or_a_frozen_module_is_refused():
    environment = sequence(3, 2)
    model = Transformer(3, 9)
    logits = tabulate(model, environment)
    other = instance_of(environment, logits.detach() + torch.randn(logits.shape).double(), np.zeros(logits.shape))
    with pytest.raises(UsageError, match="policy is not the module's"):
        exact_module(bind(k3_and_full), model, logits, other)
    with pytest.raises(UsageError, match="no parameter that requires"):
        pull_back(np.zeros(logits.shape), logits, model.requires_grad_(False))


def test_ids_beyond_the_world_are_left_out():
    environment = sequence(3, 2)
    torch.manual_seed(0)
    model = Transformer(7, 9)
    logits = tabulate(model, environment)
    assert logits.shape == (environment.n_contexts, 3)
    assert torch.equal(logits[0], model(torch.tensor([[3]]))[0, -1, :3])


class _Doubled(torch.autograd.Function):
    """A backward pass that cannot be done for several directions at once."""

    @staticmethod
    def forward(ctx, inputs):
        return 2 * inputs

    @staticmethod
    def backward(ctx, gradient):
        if not gradient.is_contiguous() or torch._C._functorch.is_batchedtensor(gradient):
            raise RuntimeError("one direction at a time")
        return 2 * gradient


def test_a_module_whose_backward_takes_one_direction_at_a_time():
    class Awkward(Table):
        def forward(self, contexts):
            return _Doubled.apply(torch.sin(self.logits))[contexts]

    drawn_ = drawn("ragged")
    table = Awkward(drawn_.policy)
    logits = tabulate_contexts(table, drawn_.environment)
    instance = instance_of(drawn_.environment, logits, drawn_.reference, drawn_.sampler)
    moments = exact_module(bind(k3_and_full), table, logits, instance)
    slope, weights = 2 * np.cos(drawn_.policy), instance.rollout_weights("current")
    each = [slope * plain_batch(k3_and_full, instance, [row]) for row in range(len(weights))]
    assert np.abs(moments.gradient["logits"] - np.tensordot(weights, each, axes=1)).max() < 1e-12
    assert moments.second_moment == pytest.approx(weights @ [(one**2).sum() for one in each], rel=1e-12)

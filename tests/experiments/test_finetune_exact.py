"""The gradient of an update is what kltest says of its KL term: expected over all completions, at all parameters."""

from functools import cache

import numpy as np
import pytest
import torch
from weekly import first, spread

from kltest.environments import Instance, ragged, sequence
from kltest.estimators import registry
from kltest.finetune.models import Models
from kltest.finetune.objective import Objective, accumulate
from kltest.finetune.settings import Settings
from kltest.language_models.generation import Rollouts
from kltest.language_models.language import LanguageModel
from kltest.language_models.models import in_double
from kltest.language_models.networks import tabulate
from kltest.language_models.scoring import score_in_parts
from kltest.loss.resolve import resolve
from kltest.moments import exact

transformers = pytest.importorskip("transformers")
PROMPT = [2, 1]


def llama(seed):
    """A Llama of two layers in double precision."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=4, max_position_embeddings=32, initializer_range=0.5, **sizes)
    return in_double(transformers.LlamaForCausalLM(config)).eval()


class Enumerated:
    """All completions of one prompt, under a policy, a reference and a sampler that are transformers."""

    def __init__(self, environment, sampler):
        self.environment, self.sampler = environment, sampler
        self.policy, self.reference, self.other = map(llama, range(3))
        tables = [
            tabulate(lambda ids, one=one: one(ids).logits, environment, [PROMPT])
            for one in (self.policy, self.reference, self.other)
        ]
        self.logits, *others = tables
        self.instance = Instance.of(environment, *(one.detach().numpy() for one in (self.logits, *others)))

    def language(self, model):
        return LanguageModel(model, None, (3,), 0)

    def exact(self, name, sampler):
        """By parameter: the exact gradient at the logits, pulled back."""
        gradient = torch.from_numpy(exact(resolve(name), self.instance, sampler).gradient.copy())
        named, objective = dict(self.policy.named_parameters()), (self.logits * gradient).sum()
        found = torch.autograd.grad(objective, [*named.values()], retain_graph=True, materialize_grads=True)
        return {name: part.numpy() for name, part in zip(named, found, strict=True)}

    def rollouts(self, settings, objective):
        paths = self.instance.paths
        rows = len(paths.tokens)
        tokens, mask = torch.from_numpy(paths.tokens.copy()), torch.ones(paths.shape, dtype=torch.bool)
        if paths.padded:
            mask = torch.from_numpy(paths.mask.copy())
            tokens = tokens.where(mask, 1)
        prompts = torch.tensor([PROMPT] * rows)
        reward = torch.from_numpy(self.environment.returns(paths))
        group = torch.zeros(rows, dtype=torch.int64)
        bare = Rollouts(prompts, prompts >= 0, tokens, mask, mask.double(), group, reward)
        models = {"ref_logp": self.reference} if objective.needs_reference else {}
        if self.sampler == "stale":
            models["old_logp"] = self.other
        scored = {name: score_in_parts(self.language(model), bare, 0) for name, model in models.items()}
        return Rollouts(**{**vars(bare), **scored})

    def gradient(self, settings):
        """Expected, by parameter: every completion with its probability under the sampler."""
        objective = Objective(settings, reward=False)
        weights = torch.from_numpy(self.instance.rollout_weights(self.sampler).copy())
        self.policy.zero_grad()
        rollouts = self.rollouts(settings, objective)
        models = Models(self.language(self.policy), self.language(self.reference))
        accumulate(objective, models, rollouts, row_weights=weights)
        return {
            name: np.zeros(tuple(one.shape)) if one.grad is None else one.grad.numpy().copy()
            for name, one in self.policy.named_parameters()
        }


@cache
def case(environment, sampler):
    return Enumerated({"sequence": sequence(4, 2), "ragged": ragged(4, 3)}[environment], sampler)


# Terms of one number for a batch, or of a group, are of another size of batch than one rollout.
NAMES = [name for name, entry in registry().items() if not entry.spec.couples]


@pytest.mark.parametrize(("environment", "sampler"), first(1, [("ragged", "stale"), ("sequence", "current")]))
@pytest.mark.parametrize("name", spread(10, NAMES))
def test_the_expected_gradient_of_an_update_is_the_exact_one(name, environment, sampler):
    here = case(environment, sampler)
    found = here.gradient(Settings(kl=name, dtype="float64"))
    expected = here.exact(name, sampler)
    scale = max(np.sqrt(sum((part**2).sum() for part in expected.values())), 1e-3)
    for parameter, part in expected.items():
        # Two orders of summation over 64 completions; a gradient of zero is compared with 1e-3.
        np.testing.assert_allclose(found[parameter], part, atol=1e-10 * scale, rtol=0)


@pytest.mark.parametrize("name", ["k3-loss", "rao-blackwell"])
def test_micro_batches_change_nothing(name):
    here = case("ragged", "stale")
    whole, cut = (here.gradient(Settings(kl=name, micro_batch=size)) for size in (0, 5))
    for parameter, part in whole.items():
        np.testing.assert_allclose(cut[parameter], part, rtol=0, atol=1e-13)


def test_a_planted_bug_is_seen():
    """Half the weights: the comparison above is one that can fail."""
    here = case("sequence", "current")
    found = here.gradient(Settings(kl="k2-loss"))
    expected = here.exact("k3-loss", "current")
    difference = max(np.abs(found[name] - part).max() for name, part in expected.items())
    assert difference > 1e-3 * max(np.abs(part).max() for part in expected.values())

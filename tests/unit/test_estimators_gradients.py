"""Every registered estimator's expected gradient is what its SPEC says, in every environment and under either sampler.

The expectation is taken here, without kltest's rollouts, placement or moments: rollout by rollout in plain Python, each
pushed through the estimator alone, from a table of logits to a weighted sum that is differentiated once. The named
gradients come from kltest.truth, which knows no estimator.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
import torch
from moments_plain import by_hand
from weekly import spread

from kltest.environments import Instance, bandit, mdp, ragged, sequence
from kltest.estimators import Spec, find, registry
from kltest.truth import ATLAS, gradient

ENVIRONMENTS = {
    "bandit": bandit(4),
    "sequence": sequence(3, 3),
    "ragged": ragged(3, 3),
    "mdp": mdp(states=4, actions=3, horizon=3, start=np.array([1.0, 0.0, 0.0, 0.0])),
}
SAMPLERS = ("current", "stale")
SEEDS = (0, 1, 2)
# Sums of at most a few hundred float64 terms of size one: rounding is below 1e-13 of the gradient's size.
EXACT = 1e-10
# The gap between "equal up to rounding" and "another gradient": policies this far apart differ by per cents.
FAR = 1e-6


def placed(value: torch.Tensor, logp: torch.Tensor, length: int, placement: str, credit: str) -> torch.Tensor:
    """The scalar loss of one rollout of `length` live tokens, written out token by token."""
    as_loss = sum(value[0, t] for t in range(length)) if value.dim() == 2 else value.sum()
    if placement == "loss":
        return as_loss
    cost = value.detach()[0, :length].tolist() if value.dim() == 2 else [0.0] * (length - 1) + value.detach().tolist()
    charged = {"return": lambda t: sum(cost), "to-go": lambda t: sum(cost[t:]), "immediate": lambda t: cost[t]}[credit]
    as_reward = sum(logp[0, t] * charged(t) for t in range(length))
    return as_reward if placement == "reward" else as_loss + as_reward


@dataclass(frozen=True, eq=False)
class Row:
    """One rollout: the fields of a batch of one, where its leaves come from, and its log-weight beside the policy's."""

    contexts: torch.Tensor
    tokens: torch.Tensor
    fields: dict[str, torch.Tensor]
    length: int
    chance: float


@cache
def instance_of(environment: str, seed: int) -> Instance:
    return Instance.draw(ENVIRONMENTS[environment], seed)


@cache
def rows_of(label: str, seed: int) -> list[Row]:
    """All rollouts of an instance, padded to the horizon with arbitrary finite numbers."""
    environment, instance = ENVIRONMENTS[label], instance_of(label, seed)
    noise = np.random.default_rng(seed)
    rows = []
    for _, steps, chance in by_hand(environment):
        contexts, tokens = zip(*steps, strict=True)
        length, dead = len(tokens), environment.horizon - len(tokens)
        fields = {
            "mask": torch.tensor([[1.0] * length + [0.0] * dead], dtype=torch.float64),
            "tokens": torch.tensor([[*tokens, *noise.integers(environment.vocabulary, size=dead)]]),
        }
        for prefix, table in (("ref_", instance.reference), ("old_", instance.sampler)):
            everything = np.concatenate([table[list(contexts)], noise.normal(size=(dead, environment.vocabulary))])
            chosen = np.concatenate([table[list(contexts), list(tokens)], noise.normal(size=dead)])
            fields[f"{prefix}logits"] = torch.from_numpy(everything)[None]
            fields[f"{prefix}logp"] = torch.from_numpy(chosen)[None]
        rows.append(Row(torch.tensor(contexts), torch.tensor(tokens), fields, length, chance))
    return rows


def called(function: Callable, row: Row, table: torch.Tensor, sampler: str, **settings):
    """What an estimator returns for one rollout, the (1, T) log-probs it saw, and the rollout's probability."""
    dead = row.fields["mask"].shape[1] - row.length
    chosen = table[row.contexts, row.tokens]
    behaviour = chosen.detach() if sampler == "current" else row.fields["old_logp"][0, : row.length]
    padding = torch.full((dead, table.shape[1]), -1.3, dtype=torch.float64)
    fields = {
        **row.fields,
        "logp": torch.cat([chosen, padding[:, 0]])[None],
        "logits": torch.cat([table[row.contexts], padding])[None],
        "old_logp": torch.cat([behaviour, padding[:, 0]])[None],
    }
    parameters = inspect.signature(function).parameters
    if set(parameters) & {"topk_logp", "ref_topk_logp"}:
        side = settings.get("support", parameters["support"].default)
        deciding = fields["ref_logits"] if side == "teacher" else fields["logits"].detach()
        # Two tokens at least are outside the support, if the vocabulary has three.
        size = max(1, min(settings.get("k", parameters["k"].default), table.shape[1] - 2))
        likeliest = deciding.argsort(dim=-1, descending=True)[..., :size]
        fields |= {f"{of}topk_logp": fields[f"{of}logits"].gather(-1, likeliest) for of in ("", "ref_")}
    asked = (name for name in parameters if name in fields)
    answer = function(**{name: fields[name] for name in asked}, **settings)
    return answer, fields["logp"], row.chance * float(behaviour.sum().exp())


def expected_gradient(
    spec: Spec, function: Callable, environment: str, sampler: str, seed: int, **settings
) -> np.ndarray:
    """(C, V) Σ_y P(y)·∇loss(y), with P under the policy or, stale, the sampler."""
    logits = torch.from_numpy(instance_of(environment, seed).policy.copy()).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows_of(environment, seed):
        value, logp, probability = called(function, row, logits.log_softmax(dim=1), sampler, **settings)
        value = value[0] if isinstance(value, tuple) else value
        total = total + probability * placed(value, logp, row.length, spec.placement, spec.credit)
    (result,) = torch.autograd.grad(total, logits)
    return result.numpy()


@cache
def named(name: str, environment: str, seed: int) -> np.ndarray:
    return gradient(name, instance_of(environment, seed))


def deviation(spec: Spec, function: Callable, environment: str, sampler: str, seed: int, **settings) -> float:
    """The distance of the expected gradient from what the SPEC says, relative to the reverse KL's."""
    combination = spec.expectation(environment, sampler)
    assert combination
    claimed = sum(coefficient * named(name, environment, seed) for name, coefficient in combination.items())
    found = expected_gradient(spec, function, environment, sampler, seed, **settings)
    return float(np.linalg.norm(found - claimed) / np.linalg.norm(named("reverse_kl", environment, seed)))


# Those that couple the rollouts of a group are in the table of test_groups.py.
TABLE = [name for name, one in registry().items() if "group" not in inspect.signature(one.function).parameters]


@pytest.mark.parametrize("name", spread(4, TABLE))
def test_expected_gradient_is_what_the_spec_says(name):
    spec, function = find(name).spec, find(name).function
    for environment, sampler in product(ENVIRONMENTS, SAMPLERS):
        if spec.expectation(environment, sampler) is not None:
            assert max(deviation(spec, function, environment, sampler, seed) for seed in SEEDS) < EXACT
            continue
        found = [expected_gradient(spec, function, environment, sampler, seed) for seed in SEEDS]
        assert all(np.isfinite(part).all() for part in found)
        assert best_fit(np.concatenate([part.ravel() for part in found]), environment, sampler)[0] > FAR


def best_fit(found: np.ndarray, environment: str, sampler: str) -> tuple[float, tuple[str, ...]]:
    """The least relative residual of any one, two or three named gradients, common coefficients on all instances."""
    usable = [name for name, row in ATLAS.items() if name != "zero" and (sampler == "stale" or not row.stale)]
    columns = {name: np.concatenate([named(name, environment, seed).ravel() for seed in SEEDS]) for name in usable}
    columns = {name: column for name, column in columns.items() if np.linalg.norm(column) > 0}
    unit, best = found / np.linalg.norm(found), (1.0, ())
    for terms in (1, 2, 3):
        several = list(combinations(columns, terms))
        span = np.linalg.qr(np.array([[columns[name] for name in names] for names in several]).transpose(0, 2, 1))[0]
        left = np.linalg.norm(unit - np.einsum("nik,njk,j->ni", span, span, unit, optimize=True), axis=1)
        best = min(best, (float(left.min()), several[left.argmin()]))
    return best


def test_the_brute_force_fit_can_find_something():
    """A fit that finds nothing anywhere would let every None of the table pass."""
    spec, function = find("k3-reward").spec, find("k3-reward").function
    found = np.concatenate([expected_gradient(spec, function, "sequence", "current", seed).ravel() for seed in SEEDS])
    residual, names = best_fit(found, "sequence", "current")
    assert residual < EXACT
    assert {"reverse_kl", "local_forward_kl"} <= set(names)


def test_a_spec_uses_the_sequence_level_name_on_a_bandit_and_sampler_names_only_when_stale():
    for name, environment, sampler in product(registry(), ENVIRONMENTS, SAMPLERS):
        for gradient_name in find(name).spec.expectation(environment, sampler) or ():
            whole = gradient_name.removeprefix("local_")
            assert environment != "bandit" or whole == gradient_name or whole not in ATLAS, name
            assert sampler == "stale" or not ATLAS[gradient_name].stale, name


def _detached_ratio_forgotten(logp, ref_logp, old_logp):
    return (logp - old_logp).exp() * (logp - ref_logp).square() / 2


def _ratio_detached(logp, ref_logp, old_logp):
    u = logp - ref_logp
    return (logp - old_logp).exp().detach() * ((-u).exp() - 1 + u)


def _ratio_inverted(logp, ref_logp, old_logp):
    u = logp - ref_logp
    return (old_logp - logp).exp() * ((-u).exp() - 1 + u)


def _direction_swapped(logits, ref_logits):
    return (ref_logits.exp() * (ref_logits - logits)).sum(dim=-1)


def _k3_of_the_swapped_ratio(logp, ref_logp):
    u = ref_logp - logp
    return (-u).exp() - 1 + u


def _mask_ignored(logp, ref_logp, mask):
    return (logp - ref_logp).sum(dim=1).square() / 2


def _mask_inverted(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask == 0, 0.0).sum(dim=1).square() / 2


def _last_position_instead_of_last_live(logp, ref_logp, mask):
    return (logp - ref_logp)[:, -1].square() / 2


def _prefix_ratio_without_this_token(logp, ref_logp, old_logp, mask):
    log_ratio = (logp - old_logp).where(mask != 0, 0.0)
    return (log_ratio.cumsum(dim=1) - log_ratio).exp().detach() * (logp - ref_logp).square() / 2


def _following_kl_not_shifted(logits, ref_logits, mask):
    return (logits.exp() * (logits - ref_logits)).sum(dim=-1)


PLANTED = {
    "sign": ("k2-loss", lambda logp, ref_logp: -((logp - ref_logp).square() / 2), "bandit", "current"),
    "sign-of-the-reference": ("k1-reward", lambda logp, ref_logp: logp + ref_logp, "bandit", "current"),
    "factor": ("k2-loss", lambda logp, ref_logp: (logp - ref_logp).square(), "bandit", "current"),
    "missing-detach": ("k2-ratio-detached", _detached_ratio_forgotten, "bandit", "current"),
    "detach-too-many": ("k3-ratio", _ratio_detached, "bandit", "stale"),
    "ratio-inverted": ("k3-ratio", _ratio_inverted, "bandit", "stale"),
    "direction-swapped": ("full-loss", _direction_swapped, "bandit", "current"),
    "k3-direction-swapped": ("k3-loss", _k3_of_the_swapped_ratio, "bandit", "current"),
    "mask-ignored": ("k2-loss-sequence", _mask_ignored, "ragged", "current"),
    "mask-inverted": ("k2-loss-sequence", _mask_inverted, "ragged", "current"),
    "last-position": ("last-token", _last_position_instead_of_last_live, "ragged", "current"),
    "prefix-off-by-one": ("k2-prefix-ratio", _prefix_ratio_without_this_token, "sequence", "stale"),
    "future-off-by-one": ("full-reward", _following_kl_not_shifted, "bandit", "stale"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_breaks_the_table(bug):
    name, function, environment, sampler = PLANTED[bug]
    assert max(deviation(find(name).spec, function, environment, sampler, seed) for seed in SEEDS) > 1e-3


@pytest.mark.parametrize("change", [{"placement": "loss"}, {"placement": "both"}, {"credit": "immediate"}])
def test_a_wrong_placement_or_credit_breaks_the_table(change):
    """k3 in the reward, since k1 in the loss would be invisible: it is zero."""
    estimator = find("k3-reward")
    wrong = replace(estimator.spec, **change)
    assert deviation(wrong, estimator.function, "sequence", "current", 0) > 1e-3


def test_an_off_by_one_in_the_reward_to_go_breaks_the_table():
    """Costs shifted by one token: later by one drops each token's own cost, which is the local part."""
    estimator = find("k1-reward-to-go")

    def later(logp, ref_logp):
        return (logp - ref_logp)[:, [*range(1, logp.shape[1]), 0]] * torch.tensor([*[1.0] * (logp.shape[1] - 1), 0.0])

    def earlier(logp, ref_logp):
        return (logp - ref_logp)[:, [-1, *range(logp.shape[1] - 1)]]

    assert deviation(estimator.spec, later, "sequence", "current", 0) > 1e-3
    assert deviation(replace(estimator.spec, credit="immediate"), earlier, "sequence", "current", 0) > 1e-3


@pytest.mark.parametrize("lam", spread(6, [-1.0, 0.0, 0.3, 1.0, 2.0]))
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_lambda_is_a_baseline(lam, environment):
    estimator = find("lambda-baseline")
    assert deviation(estimator.spec, estimator.function, environment, "current", 0, lam=lam) < EXACT


@pytest.mark.parametrize("length", [1, 2])
def test_coefficients_that_depend_on_the_length(length, monkeypatch):
    """1/T of the reverse KL; and local forward KL, 1/T of the way to the reverse KL (theory at a fixed length T)."""
    environment = f"sequence-of-{length}"
    monkeypatch.setitem(ENVIRONMENTS, environment, sequence(3, length))
    share = 1 / length
    for name, claimed in {
        "length-normalised": {"reverse_kl": share},
        "token-mean": {"local_reverse_kl": share},
        "k3-broadcast-ratio": {"local_forward_kl": 1 - share, "reverse_kl": share},
    }.items():
        spec = replace(find(name).spec, identified={"current": {"tokens": claimed}})
        assert deviation(spec, find(name).function, environment, "current", 0) < EXACT


def test_length_normalised_follows_a_length_weighted_kl_when_lengths_vary():
    """∇E_π[(Σu − 1)/L], differentiated as a function of the policy alone."""
    instance = instance_of("ragged", 0)
    logits = torch.from_numpy(instance.policy.copy()).requires_grad_()
    table, reference = logits.log_softmax(dim=1), torch.from_numpy(instance.reference)
    objective = torch.zeros((), dtype=torch.float64)
    for row in rows_of("ragged", 0):
        log_pi = table[row.contexts, row.tokens].sum()
        u = log_pi - reference[row.contexts, row.tokens].sum()
        objective = objective + log_pi.exp() * (u - 1) / row.length
    (claimed,) = torch.autograd.grad(objective, logits)
    estimator = find("length-normalised")
    found = expected_gradient(estimator.spec, estimator.function, "ragged", "current", 0)
    np.testing.assert_allclose(found, claimed.numpy(), atol=1e-13)


def test_the_clamp_has_no_gradient_beyond_its_bound():
    """e^(−u) − 1 + u = 10 at u = −2.611 and at u = 10.99998."""
    logp = torch.tensor([[-2.62, -2.60, 10.9999, 11.0001]], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(find("k3-clamped").function(logp, torch.zeros(1, 4)).sum(), logp)
    assert (slope[0] != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("name", ["top-k", "top-k-detached"])
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_head_of_the_whole_vocabulary_is_the_exact_kl(name, environment):
    spec = replace(find("full-loss").spec, name=name)
    assert deviation(spec, find(name).function, environment, "current", 0, k=9) < EXACT


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_is_the_reverse_kl_plus_the_gradient_of_the_heads_mass(k):
    estimator, instance = find("top-k"), instance_of("bandit", 0)
    policy = np.exp(instance.policy[0])
    head = np.argsort(-policy)[:k]
    mass = policy * (np.isin(np.arange(4), head) - policy[head].sum())
    found = expected_gradient(estimator.spec, estimator.function, "bandit", "current", 0, k=k)[0]
    np.testing.assert_allclose(found - named("reverse_kl", "bandit", 0)[0], mass, atol=1e-13)
    assert np.linalg.norm(mass) > 1e-2


def test_rao_blackwell_has_no_noise_on_a_bandit():
    """All that is sampled there is the one action, which is summed over: every rollout gives the same gradient."""
    estimator, instance = find("rao-blackwell"), instance_of("bandit", 0)
    gradients = []
    for row in rows_of("bandit", 0):
        logits = torch.from_numpy(instance.policy.copy()).requires_grad_()
        table = logits.log_softmax(dim=1)
        value, _ = estimator.function(table[row.contexts][None], row.fields["ref_logits"], row.fields["mask"])
        loss = placed(value, table[row.contexts, row.tokens][None], 1, "both", "to-go")
        gradients.append(torch.autograd.grad(loss, logits)[0].numpy())
    for sample in gradients:
        np.testing.assert_allclose(sample, named("reverse_kl", "bandit", 0), atol=1e-14)


def expected_value(name: str, environment: str, sampler: str = "current") -> tuple[float, float]:
    """E[value] (what is logged, where the estimator logs), and E_π[Σu] = KL(π‖ref), both by enumeration."""
    instance, value, kl = instance_of(environment, 0), 0.0, 0.0
    for row in rows_of(environment, 0):
        result, logp, probability = called(find(name).function, row, torch.from_numpy(instance.policy), sampler)
        result = result[1]["kl"] if isinstance(result, tuple) else result
        result = result[:, : row.length] if result.dim() == 2 else result
        value += probability * float(result.sum())
        u = (logp - row.fields["ref_logp"])[0, : row.length].sum()
        kl += row.chance * float(logp[0, : row.length].sum().exp() * u)
    return value, kl


UNBIASED = [
    *("k1-loss", "k3-loss", "k3-loss-sequence", "full-loss", "full-reward", "k3-straight-through", "k3-clamped"),
    *("top-k", "top-k-detached", "k1-reward", "k1-reward-to-go", "k1-reward-immediate", "k3-reward"),
    *("k3-reward-sequence", "k1-both", "k3-both", "rao-blackwell", "lambda-baseline", "k3-ratio"),
    *("k3-ratio-detached", "k1-reward-sequence-ratio", "k1-reward-to-go-prefix-ratio", "k1-reward-stale"),
]


@pytest.mark.parametrize("name", UNBIASED)
def test_values_said_to_be_unbiased_are(name):
    for environment in ENVIRONMENTS:
        value, kl = expected_value(name, environment)
        assert value == pytest.approx(kl, rel=EXACT), environment


@pytest.mark.parametrize("name", ["k1-reward-sequence-ratio", "k1-reward-to-go-prefix-ratio"])
def test_values_with_prefix_ratios_are_unbiased_whatever_the_sampler(name):
    value, kl = expected_value(name, "ragged", "stale")
    assert value == pytest.approx(kl, rel=EXACT)


@pytest.mark.parametrize("name", ["k2-loss", "k2-reward", "k2-loss-sequence", "k2-ratio", "abs-loss", "k3-inverted"])
def test_values_said_to_be_biased_are_what_their_formula_says(name):
    instance = instance_of("bandit", 0)
    policy, u = np.exp(instance.policy[0]), instance.policy[0] - instance.reference[0]
    formula = {"abs-loss": np.abs(u), "k3-inverted": np.exp(u) - 1 - u}.get(name, u**2 / 2)
    value, kl = expected_value(name, "bandit")
    assert value == pytest.approx(float(policy @ formula), rel=EXACT)
    assert value != pytest.approx(kl, rel=1e-3)

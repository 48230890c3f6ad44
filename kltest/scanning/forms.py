"""Forms of terms by their values: k1, k2, k3, or a sum over the vocabulary; and which terms are one."""

from collections.abc import Callable, Mapping, Sequence

import torch

from kltest.scanning.measured import FAILURES, Rollouts, computed_of
from kltest.symbolic.values import Node
from kltest.symbolic.words import SAMPLER

NEAR = 1e-9
OF_TOKENS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda ratio: ratio,
    "k2": lambda ratio: ratio**2 / 2,
    "k3": lambda ratio: torch.exp(-ratio) - 1 + ratio,
    "k3 of the other direction": lambda ratio: torch.exp(ratio) - 1 - ratio,
    "|log-ratio|": torch.abs,
}
OF_VOCABULARY: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "the exact KL(π‖ref) of a token": lambda one, other: (one.exp() * (one - other)).sum(-1),
    "the exact KL(ref‖π) of a token": lambda one, other: (other.exp() * (other - one)).sum(-1),
    "the cross-entropy with the reference": lambda one, other: -(other.exp() * one).sum(-1),
}


def form_of(core: Node) -> str:
    """Return the form of a function of a rollout's fields, up to a positive factor; the empty string for any other."""
    rollouts = Rollouts(2, full=True)
    try:
        value = computed_of(core, rollouts)
    except FAILURES:
        return ""
    own = "logp" if "logp" in rollouts.values else "old_logp"  # as rollouts have it, in a reward
    for other in ("ref_", "old_"):
        if f"{other}logp" in rollouts.values:
            ratio = rollouts.field(own) - rollouts.field(f"{other}logp")
            known = {name: make(ratio) for name, make in OF_TOKENS.items()}
        elif f"{other}logits" in rollouts.values:
            sides = rollouts.field("logits"), rollouts.field(f"{other}logits")
            known = {name: make(*sides) for name, make in OF_VOCABULARY.items()}
        else:
            continue
        return next((name for name, wanted in known.items() if _is_multiple(value, wanted)), "")
    return ""


def signature(core: Node) -> str:
    """Return what tells functions of a rollout's fields apart: their values and gradients, up to a factor."""
    rollouts = Rollouts(2)
    value = _of_one_size(computed_of(core, rollouts).to(torch.float64))
    total = value.sum()
    numbers = [total.abs().item(), (value**2 * _places(value)).sum().item()]
    for name in ("logp", "logits"):
        given = rollouts.values.get(name)
        if given is not None and total.requires_grad:
            (gradient,) = torch.autograd.grad(total, given, allow_unused=True, retain_graph=True)
            if gradient is not None:
                numbers += [abs((gradient * _places(given)).sum().item()), (gradient**2).sum().item()]
    return _text(numbers)


def worth(core: Node) -> str:
    """Return what tells the values of functions of a rollout's fields apart, where the sampler is the policy."""
    rollouts = Rollouts(2, agree=(SAMPLER,), size=0.2)
    value, mask = computed_of(core, rollouts).detach().to(torch.float64), rollouts.field("mask")
    value = _of_one_size(value * mask if value.shape == mask.shape else value)
    return _text([value.sum().abs().item(), (value**4).sum().item()])


def _of_one_size(value: torch.Tensor) -> torch.Tensor:
    """Return a value up to a factor."""
    return value / (value.detach() ** 2).sum().sqrt()


def _places(value: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, value.numel() + 1, dtype=torch.float64).view(value.shape)


def _text(numbers: Sequence[float]) -> str:
    return " ".join(f"{one:.6g}" for one in numbers)


def _is_multiple(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    if value.numel() != wanted.numel():
        return False
    value, wanted = value.detach().flatten(), wanted.detach().flatten()
    factor = (value * wanted).sum() / (wanted * wanted).sum()
    return bool(factor > 0) and bool(torch.allclose(value, factor * wanted, rtol=1e-6, atol=NEAR))

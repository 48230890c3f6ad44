"""Estimators of the named gradients on a batch of rollouts, as gradients at the next-token logits.

A named gradient is a sum of *parts*, each E[Σ_t g_t·weight_t]. A token's own weight is averaged over all next tokens in
closed form, Σ_v π_v f(u_v)·∇log π_v. The weight of later tokens is the sum of their exact next-token expectations, less
its mean over the other rollouts of the group at that position, which takes away noise and no expectation. Rollouts of a
sampler μ are weighted by prefix ratios π/μ, or as the `…@sampler` and `…@rollouts` rows of the atlas say.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from kltest.truth import ATLAS
from kltest.truth.next_tokens import gradient_of_next_token

Weight = Callable[[Tensor, Tensor, Tensor], Tensor]

OWN: dict[str, Weight] = {
    "u": lambda p, r, m: p - r,
    "forward": lambda p, r, m: -torch.expm1(r - p),
    "square": lambda p, r, m: (p - r) * (1 + 0.5 * (p - r)),
    "chi": lambda p, r, m: torch.expm1(p - r),
    "sign": lambda p, r, m: 0.5 * torch.sign(p - r),
    "surprise": lambda p, r, m: -p,
    "to-sampler": lambda p, r, m: p - m,
    "from-sampler": lambda p, r, m: -torch.expm1(m - p),
    "one": lambda p, r, m: torch.ones_like(p),
}
"""Weight of a token's own score, by the log-probs of policy, reference and sampler."""
COST: dict[str, Weight] = {
    "u": OWN["u"],
    "forward": OWN["forward"],
    "square": lambda p, r, m: 0.5 * (p - r) ** 2,
    "surprise": OWN["surprise"],
    "to-sampler": OWN["to-sampler"],
}
"""Return what a token adds to the weights of other scores."""
WHOLE: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "square": lambda total, reward: 0.5 * total**2,
    "forward": lambda total, reward: -torch.expm1(-total),
    "chi": lambda total, reward: torch.exp(total),
    "sign": lambda total, reward: 0.5 * torch.sign(total),
    "reward": lambda total, reward: total if reward is None else reward,
}
"""Weight of all scores of a rollout, by its log-ratio Σu and its reward."""
AT_SAMPLER, AT_ROLLOUTS, AT_REFERENCE = "sampler", "rollouts", "reference"


@dataclass(frozen=True)
class Part:
    """`kind` is own, later, earlier, whole, last or control; `weight` names a function, `at` who draws the rest."""

    kind: str
    weight: str
    at: str = ""


def _sum(text: str, at: str = "") -> tuple[Part, ...]:
    pairs = (word.split(":") for word in text.split())
    return tuple(Part(kind, weight.split("@")[0], weight.partition("@")[2] or at) for kind, weight in pairs)


_LOCAL = {
    "local_reverse_kl": "own:u",
    "local_forward_kl": "own:forward",
    "local_squared_log_ratio": "own:square",
    "local_chi_square": "own:chi",
    "local_total_variation": "own:sign",
    "local_entropy": "own:surprise",
}
_ON_POLICY = {
    **_LOCAL,
    "reverse_kl": "own:u later:u",
    "future_reverse_kl": "later:u",
    "last_token_reverse_kl": "last:u",
    "forward_kl": "own:forward@reference",
    "squared_log_ratio": "own:u later:u whole:square",
    "squared_log_ratio_sum": "own:square later:square",
    "chi_square": "whole:chi",
    "total_variation": "whole:sign",
    "expected_reward": "whole:reward",
    "entropy": "own:surprise later:surprise",
}
_OWN_RATIO = {
    **_LOCAL,
    "reverse_kl": "own:u later:u",
    "squared_log_ratio_sum": "own:square later:square",
    "other_tokens_forward_kl": "later:forward",
    "to_sampler_kl": "own:to-sampler later:to-sampler",
    "entropy": "own:surprise later:surprise",
}
_NO_RATIO = {
    **_LOCAL,
    "reverse_kl": "own:u later:u earlier:u",
    "future_reverse_kl": "later:u",
    "last_token_reverse_kl": "last:u",
    "forward_kl": "whole:forward",
    "squared_log_ratio_sum": "own:square later:square earlier:square",
    "other_tokens_forward_kl": "later:forward earlier:forward",
    "entropy": "own:surprise later:surprise earlier:surprise",
}


def parts_of(*, stale: bool, full: bool, rewarded: bool, further: Sequence[str] = ()) -> dict[str, tuple[Part, ...]]:
    """Return the parts of the named gradients that can be estimated, in the order of the atlas.

    Args:
        stale: The rollouts come from another policy than the one that is audited.
        full: All next-token log-probs of that policy are known, not only those of the sampled tokens.
        rewarded: Rollouts have rewards.
        further: Divergences of next-token distributions, over a support or from a mixture.
    """
    found = {name: _sum(text) for name, text in _ON_POLICY.items()}
    if stale:
        found |= {f"{name}@sampler": _sum(text, AT_SAMPLER) for name, text in _OWN_RATIO.items()}
        found |= {f"{name}@rollouts": _sum(text, AT_ROLLOUTS) for name, text in _NO_RATIO.items()}
        found |= {"from_sampler_kl": _sum("own:from-sampler", AT_SAMPLER)}
        found |= {"to_sampler_kl": _sum("own:to-sampler later:to-sampler")}
    if not full:
        known = {name: all(_without_sampler(part) for part in parts) for name, parts in found.items()}
        found = {name: parts for name, parts in found.items() if known[name]}
    if not rewarded:
        found.pop("expected_reward")
    named = {name: found[name] for name in ATLAS if name in found}
    named |= {name: (Part("own", name),) for name in further}
    return named | {f"{name}@sampler": (Part("own", name, AT_SAMPLER),) for name in further if stale}


def controls_of(*, stale: bool, full: bool) -> list[Part]:
    """Return parts whose expectation is zero: scores of sampled tokens less the mean over next tokens in closed form.

    What a loss shares with them is noise. Those of past and future weigh a score with the log-ratios of other tokens.
    """
    found = [Part("control", weight) for weight in ("one", "u", "forward", "square", "past", "future")]
    if stale:
        found += [Part("control", weight, AT_SAMPLER) for weight in ("one", "u", "forward", "past")]
    if stale and full:
        found += [Part("control", weight, AT_ROLLOUTS) for weight in ("one", "u", "forward", "square")]
    return found


def columns_of(
    *, stale: bool, full: bool, rewarded: bool, further: Sequence[str] = ()
) -> tuple[dict[str, tuple[Part, ...]], list[Part], range]:
    """Return the named gradients with their parts, all parts that are measured, and the vectors that are controls.

    Of the vectors of a unit the first two are the loss's own; one for each part follows, controls last.
    """
    names = parts_of(stale=stale, full=full, rewarded=rewarded, further=further)
    named = dict.fromkeys(chain.from_iterable(names.values()))
    parts = [*named, *controls_of(stale=stale, full=full)]
    return names, parts, range(2 + len(named), 2 + len(parts))


def _without_sampler(part: Part) -> bool:
    return "sampler" not in part.weight and (part.at == "" or part.kind == "own" or part.kind in ("whole", "last"))


class Tokens:
    """Numbers of the tokens of one unit, B rollouts of up to T tokens; log-probs are 0 at padded positions.

    Attributes:
        live: (B, T) 1 on tokens.
        before, through: (B, T) π/μ of the tokens before each, and itself included.
        ratio: (B, T) π/μ of the token.
        reference: (B, T) ref/μ of the tokens before each.
        total: (B,) Σu.
        summed_kl: (B,) K = Σ_t KL(π(·|s_t)‖ref(·|s_t)) along each rollout.
        filled: Log-probs as they came, padded positions included.
    """

    def __init__(
        self,
        live: Tensor,
        logp: Tensor,
        ref_logp: Tensor,
        old_logp: Tensor,
        expected: dict[tuple[str, str], Tensor],
        reward: Tensor | None,
    ) -> None:
        self.filled = {"logp": logp, "ref_logp": ref_logp, "old_logp": old_logp}
        self.live, self.reward = live.to(logp.dtype), reward
        self.logp, self.ref_logp, self.old_logp = (one.where(live, 0.0) for one in (logp, ref_logp, old_logp))
        self._expected = {key: cost.where(live, 0.0) for key, cost in expected.items()}
        log_ratio, log_reference = self.logp - self.old_logp, self.ref_logp - self.old_logp
        self.ratio = log_ratio.exp()
        self.through = log_ratio.cumsum(1).exp() * self.live
        self.before = (log_ratio.cumsum(1) - log_ratio).exp() * self.live
        self.reference = (log_reference.cumsum(1) - log_reference).exp() * self.live
        self.total = (self.logp - self.ref_logp).sum(1)
        self.summed_kl = self._expected["u", ""].sum(1) if ("u", "") in self._expected else torch.zeros_like(self.total)

    def own(self, part: Part) -> Tensor:
        """(B, T) weight of the closed-form sum over next tokens at each position."""
        return {"": self.before, AT_REFERENCE: self.reference}.get(part.at, self.live)

    def sampled(self, part: Part) -> tuple[Tensor, Tensor]:
        """(B, T) weights of the sampled tokens' scores, and baselines: weights of all next tokens' scores under μ."""
        nothing = torch.zeros_like(self.logp)
        if part.kind == "later":
            return self._later(part)
        if part.kind == "control":
            return self.own(part) * (1.0 if part.at == AT_ROLLOUTS else self.ratio) * self._known(part.weight), nothing
        sampled = COST.get(part.weight, OWN["u"])(self.logp, self.ref_logp, self.old_logp) * self.live
        if part.kind == "earlier":
            # Over next tokens in closed form: all of it is a weight under μ.
            return nothing, (sampled.cumsum(1) - sampled) * self.live
        if part.kind == "last":
            last = self.live * (self.live.flip(1).cumsum(1).flip(1) == 1)
            return last * sampled * (self.through if part.at == "" else 1.0), nothing
        whole = WHOLE[part.weight](self.total, self.reward)[:, None]  # (B, 1)
        if part.at == AT_ROLLOUTS:
            return whole * self.live, nothing
        reached = (self.logp - self.old_logp).sum(1, keepdim=True).exp()
        return reached * whole * self.live - self.through * others_mean(reached * whole), nothing

    def _known(self, weight: str) -> Tensor:
        """(B, T) weight of the score of a sampled token in a control."""
        u = (self.logp - self.ref_logp) * self.live
        if weight == "past":
            return u.cumsum(1) - u
        if weight == "future":
            return self._after(self.ratio * u - self._expected["u", ""])
        return OWN[weight](self.logp, self.ref_logp, self.old_logp)

    def _after(self, cost: Tensor) -> Tensor:
        """(B, T) Σ_{s>t} ρ_{t+1:s−1}·cost_s: ratios before s, over those through t."""
        return _sum_after(self.before * cost) / self.through.clamp(min=1e-30)

    def _later(self, part: Part) -> tuple[Tensor, Tensor]:
        cost = self._expected[part.weight, "" if part.at == "" else AT_SAMPLER]
        later = self._after(cost) if part.at == "" else _sum_after(cost)
        base = others_mean(later * self.live)
        if part.at == AT_ROLLOUTS:
            return (later - base) * self.live, base * self.live
        weight = self.through if part.at == "" else self.ratio
        return weight * (later - base) * self.live, torch.zeros_like(later)


def _sum_after(values: Tensor) -> Tensor:
    """(B, T) Σ_{s>t} of the values."""
    return values.flip(1).cumsum(1).flip(1) - values


def others_mean(values: Tensor) -> Tensor:
    """Mean over the other rows; 0 if there are none."""
    return (values.sum(0, keepdim=True) - values) / max(len(values) - 1, 1) if len(values) > 1 else 0 * values


def gradient_at_logits(
    part: Part, tokens: Tensor, span: slice, at: Tokens, p: Tensor, r: Tensor, m: Tensor | None
) -> Tensor:
    """(B, t, V) the gradient of a part at the next-token logits of some positions, summed over rollouts.

    Args:
        part: What is estimated.
        tokens: (B, T) sampled tokens.
        span: The t positions.
        at: Numbers of all tokens.
        p, r, m: (B, t, V) next-token log-probs of policy, reference and sampler; without the latter only the sampled
            token stands for it.
    """
    if part.kind == "own" and part.weight not in OWN:
        tables = (one.reshape(-1, one.shape[-1]).double().cpu().numpy() for one in (p, r))
        found = torch.from_numpy(gradient_of_next_token(part.weight, *tables)).to(p)
        return found.reshape(p.shape) * at.own(part)[:, span, None]
    drawn = tokens[:, span, None]
    exact = torch.zeros_like(p)
    if part.weight in OWN and part.kind in ("own", "control"):
        weight = OWN[part.weight](p, r, p if m is None else m)
        scale = at.own(part)[:, span, None]
        if part.at == AT_ROLLOUTS and m is None:
            return at_sampled(drawn, weight.gather(2, drawn) * scale, p)
        exact = centred((p if part.at != AT_ROLLOUTS or m is None else m).exp() * weight * scale, p)
        if part.kind == "own":
            return exact
    weights, under_sampler = (one[:, span, None] for one in at.sampled(part))
    found = at_sampled(drawn, weights, p) - exact
    if bool(under_sampler.any()):
        assert m is not None or part.kind == "earlier"
        found += at_sampled(drawn, under_sampler, p) if m is None else centred(m.exp() * under_sampler, p)
    return found


def centred(weights: Tensor, p: Tensor) -> Tensor:
    """From weights of next-token log-probs (…, V) to the gradient at the logits: w − π·Σw."""
    return weights - p.exp() * weights.sum(-1, keepdim=True)


def at_sampled(drawn: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """The same for weights (…, 1) of one token each."""
    return (-p.exp() * weights).scatter_add_(-1, drawn, weights)

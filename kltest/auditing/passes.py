"""One unit, the rollouts of one prompt: forward passes, the loss, and backward passes folded into sketches.

Logits exist for a few positions at a time: the model is cut before its last layer. Each gradient at the logits is taken
to the cut, chunk by chunk, and one backward pass takes what is collected there through the rest of the model.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kltest.auditing.named import AT_SAMPLER, COST, Part, Tokens, centred, gradient_at_logits
from kltest.errors import TargetError, UsageError
from kltest.language_models.generation import Rollouts, at_least_single
from kltest.language_models.language import LanguageModel
from kltest.language_models.scoring import logits_of
from kltest.loss.calling import Loss
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout
from kltest.samples.sketch import Sketch

# Divisors of the log-probs at which those of a file are compared with the model's.
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0)
# Logits in one chunk on a CPU, and on an accelerator.
CHUNK, LARGE = 2**23, 2**27


class CutModel:
    """A language model that is cut before its last layer if its logits are that layer's output, else behind it."""

    def __init__(self, language: LanguageModel) -> None:
        self.language = language
        self.head = getattr(language.model, "get_output_embeddings", lambda: None)()
        if self.head is not None and not self._is_last():
            self.head = None

    @torch.no_grad()
    def _is_last(self) -> bool:
        """True if the layer, applied to what comes before it, gives the model's logits."""
        ids = torch.full((1, 2), self.language.pad, device=self.language.device)
        whole, _ = self.language.forward(ids, None, keep=2)
        with self.cut():
            hidden, _ = self.language.forward(ids, None, keep=2)
        # Sums in another order, in the precision of the model.
        return hidden.shape != whole.shape and torch.allclose(self.logits(hidden), at_least_single(whole), 1e-2, 1e-2)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Make the model return what goes into its last layer."""
        if self.head is None:
            yield
            return
        self.head.forward = lambda hidden: hidden
        try:
            yield
        finally:
            del self.head.forward

    def features(self, rollouts: Rollouts) -> Tensor:
        """Return (B, T, F), from which `logits` are made."""
        with self.cut():
            return logits_of(self.language, rollouts)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of features, in float32 or float64."""
        if self.head is None:
            return at_least_single(features)
        with self.language.autocast():
            return at_least_single(self.head(features))


@dataclass(frozen=True)
class Models:
    """Policy, reference and sampler as they are audited; the sampler is None if it is the policy or not at hand."""

    policy: CutModel
    reference: CutModel
    sampler: CutModel | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        own = self.policy.language.vocabulary
        for role, one in (("reference", self.reference), ("sampler", self.sampler)):
            if one is not None and (theirs := one.language.vocabulary) != own:
                raise UsageError(
                    f"the {role} has a vocabulary of {theirs} tokens and the policy one of {own}: their next-token "
                    "distributions cannot be compared"
                )


@dataclass
class Unit:
    """Measurements of one unit.

    Attributes:
        vectors: (2 + parts, size) sketches: the loss's gradient, a row of zeros, and the parts of named gradients.
        tokens: What the tokens were.
        facts: Sums over rollouts, by name.
        misfits: Σ(log-prob − sampler's)² by the divisor of the logits, if the sampler's come with the rollouts.
    """

    vectors: Tensor
    tokens: Tokens
    facts: dict[str, float] = field(default_factory=dict)
    misfits: dict[float, float] = field(default_factory=dict)


class Pass:
    """Chunks of log-probs of one unit, and backward passes from them."""

    def __init__(self, models: Models, rollouts: Rollouts, sketch: Sketch) -> None:
        self.models, self.rollouts, self.sketch = models, rollouts, sketch
        self.hidden = models.policy.features(rollouts)
        self.misfits: dict[float, float] = {}
        with torch.no_grad():
            self.reference = models.reference.features(rollouts)
            self.sampler = None if models.sampler is None else models.sampler.features(rollouts)
            rows, width = rollouts.tokens.shape
            vocabulary = models.policy.logits(self.hidden[:1, :1]).shape[-1]
        most = CHUNK if self.hidden.device.type == "cpu" else LARGE
        step = max(1, most // (rows * vocabulary))
        self.spans = [slice(first, min(first + step, width)) for first in range(0, width, step)]

    def log_probs(self, span: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """(B, t, V) next-token log-probs of policy, reference and sampler at some positions."""

        def of(model: CutModel, features: Tensor) -> Tensor:
            return (model.logits(features[:, span]) / self.models.temperature).log_softmax(-1)

        models = self.models
        with torch.no_grad():
            p, r = of(models.policy, self.hidden), of(models.reference, self.reference)
            return p, r, None if self.sampler is None or models.sampler is None else of(models.sampler, self.sampler)

    def numbers(self, costs: set[tuple[str, str]]) -> Tokens:
        """Return the numbers of all tokens; `costs` are the weights of later tokens whose expectations are needed."""
        found: dict[Any, list[Tensor]] = {}
        for span in self.spans:
            p, r, m = self.log_probs(span)
            drawn = self.rollouts.tokens[:, span, None]
            for name, table in (("p", p), ("r", r), ("m", m)):
                if table is not None:
                    found.setdefault(name, []).append(table.gather(2, drawn)[..., 0])
            if (kept := self.rollouts.old_logp) is not None:
                for divisor in TEMPERATURES:
                    at_divisor = (p / divisor).log_softmax(-1).gather(2, drawn)[..., 0]
                    gap = (at_divisor - kept[:, span].to(p)).square().where(self.rollouts.mask[:, span], 0.0)
                    self.misfits[divisor] = self.misfits.get(divisor, 0.0) + float(gap.sum())
            for weight, at in costs:
                q = m if at == AT_SAMPLER and m is not None else p
                expected = (q.exp() * COST[weight](p, r, q if m is None else m)).sum(-1)
                found.setdefault((weight, at), []).append(expected)
        joined = {key: torch.cat(parts, 1) for key, parts in found.items()}
        logp, ref_logp = joined.pop("p"), joined.pop("r")
        own, given = joined.pop("m", None), self.rollouts.old_logp
        old = own if given is None else given.to(logp)
        reward = None if self.rollouts.reward is None else self.rollouts.reward.to(logp)
        return Tokens(self.rollouts.mask, logp, ref_logp, logp if old is None else old, joined, reward)

    def fold(self, at_logits: Mapping[int, Any], vectors: Tensor) -> None:
        """Pull gradients at the logits back and add their sketches to the rows of `vectors`.

        `at_logits` gives, for each row, a function of a span and of the log-probs there.
        """
        collected = {row: torch.zeros_like(self.hidden) for row in at_logits}
        for span in self.spans:
            p, r, m = self.log_probs(span)
            cut = self.hidden[:, span].detach().requires_grad_()
            logits = self.models.policy.logits(cut)
            for row, gradient in at_logits.items():
                given = gradient(span, p, r, m) / self.models.temperature
                with self.sketch.into(vectors[row]):
                    logits.backward(given.to(logits), retain_graph=True)
                assert cut.grad is not None
                collected[row][:, span] = cut.grad
                cut.grad = None
        for row, gradient in collected.items():
            with self.sketch.into(vectors[row]):
                self.hidden.backward(gradient, retain_graph=True)


def measure(
    loss: Loss, models: Models, rollouts: Rollouts, parts: list[Part], sketch: Sketch, *, divisor: float = 1.0
) -> Unit:
    """Measure one unit.

    Args:
        loss: Called once on all rollouts of the unit.
        models: Policy, reference and sampler.
        rollouts: B rollouts of one prompt.
        parts: Parts of named gradients to estimate as means over the rollouts.
        sketch: Of the policy's weights; it listens already.
        divisor: Divides the loss's gradient: B if it sums over rollouts.

    Raises:
        TargetError: The loss fails, or its gradient is not finite.
    """
    with torch.enable_grad():
        run = Pass(models, rollouts, sketch)
        costs = {(part.weight, part.at and AT_SAMPLER) for part in parts if part.kind == "later"} | {("u", "")}
        tokens = run.numbers(costs)
        vectors = torch.zeros(2 + len(parts), sketch.size, dtype=sketch.dtype, device=run.hidden.device)
        found, facts = _of_loss(loss, run, tokens)
        at_logits: dict[int, Any] = {}
        if found:
            at_logits[0] = lambda span, p, r, m: _from_leaves(found, rollouts.tokens, span, p) / divisor
        for row, part in enumerate(parts, 2):
            at_logits[row] = lambda span, p, r, m, part=part: (
                gradient_at_logits(part, rollouts.tokens, span, tokens, p, r, m) / len(rollouts)
            )
        run.fold(at_logits, vectors)
    return Unit(vectors.cpu(), tokens, facts, run.misfits)


def as_fields(run: Pass, tokens: Tokens, *, unrewarded: bool) -> Rollout:
    """Return the rollouts of a unit as a loss sees them, on the CPU: what stands at padded positions is the model's."""
    rollouts, made = run.rollouts, {name: value.detach().cpu() for name, value in tokens.filled.items()}

    def table(index: int) -> Tensor:
        tables = (run.log_probs(span) for span in run.spans)
        # Without a sampler of their own, rollouts come from the policy.
        return torch.cat([one[0] if (found := one[index]) is None else found for one in tables], 1).cpu()

    fields: dict[str, Any] = {
        **made,
        "mask": rollouts.mask.to(made["logp"]).cpu(),
        "tokens": rollouts.tokens.cpu(),
        "group": rollouts.group.cpu(),
        "logits": lambda: table(0),
        "ref_logits": lambda: table(1),
        "old_logits": lambda: table(2),
    }
    if rollouts.topk_ids is not None:
        fields["topk_ids"] = rollouts.topk_ids.cpu()
    if rollouts.ref_topk_logp is not None:
        fields["ref_topk_logp"] = rollouts.ref_topk_logp.to(made["logp"]).cpu()
    if rollouts.reward is not None or unrewarded:
        reward = torch.zeros(len(rollouts)) if rollouts.reward is None else rollouts.reward.double().cpu()
        fields |= {"reward": reward, "advantage": reward - reward.mean()}
    return Rollout(fields)


def _of_loss(loss: Loss, run: Pass, tokens: Tokens) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of the loss at the log-probs that it used, and facts about them."""
    rollout = as_fields(run, tokens, unrewarded=loss.unrewarded)
    objective = loss(rollout).objective
    found = {name: one.to(run.hidden.device) for name, one in leaf_gradients(loss, objective, rollout).items()}
    live = run.rollouts.mask
    facts = {"padded": 0.0, "all": 0.0}
    for name, one in found.items():
        if bool((wrong := ~one.isfinite()).any()):
            row, step = wrong.nonzero()[0][:2].tolist()
            where = "" if live[row, step] else ", behind its end: the padding is not masked"
            raise TargetError(
                f"the gradient of {loss.name} with respect to {name} is not finite at token {step} of a rollout{where}"
            )
        squares = one.double().square().reshape(*live.shape, -1).sum(-1)
        facts["padded"] += float(squares.where(~live, 0.0).sum())
        facts["all"] += float(squares.sum())
    return found, facts


def _from_leaves(found: Mapping[str, Tensor], tokens: Tensor, span: slice, p: Tensor) -> Tensor:
    """(B, t, V) the gradient at the logits, from those at log-probs of sampled and of all next tokens."""
    weights = found["logits"][:, span].to(p) if "logits" in found else torch.zeros_like(p)
    if "logp" in found:
        weights = weights.scatter_add(2, tokens[:, span, None], found["logp"][:, span, None].to(p))
    return centred(weights, p)

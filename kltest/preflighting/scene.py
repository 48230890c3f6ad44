"""What the checks of a preflight look at: passes of both models over the batch, and calls of the loss."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from kltest.auditing.passes import TEMPERATURES
from kltest.errors import KltestError
from kltest.language_models.language import LanguageModel
from kltest.preflighting.batches import Batch
from kltest.preflighting.models import Pair, UnlikeError, chosen, evaluated, of_targets, training
from kltest.preflighting.subjects import EQUAL, OTHER, ByName, Called, Case, Tables, Whole

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference of log-probs that are computed twice; normalisations of Hugging Face's models are in float32."""
HALF = 0.05
"""The same in half precision."""

WIDER = 2
"""Columns of padding that a batch is given."""


class Scene:
    """Passes and calls, each made once. All are made before the first check, in the same order on all devices."""

    def __init__(self, pair: Pair, batch: Batch, *, on_policy: bool) -> None:
        self.pair, self.batch, self.on_policy = pair, batch, on_policy
        policy, reference = pair.policy, pair.reference
        self.is_training = bool(reference and training(reference))
        self.policy_passes = [self.logp_of(policy) for _ in range(2)]
        self.reference_passes = [self.logp_of(reference) for _ in range(2)] if reference else []
        self.unlike = ""
        self.equal_logp: tuple[Tensor, Tensor] | None = None
        with evaluated(pair), torch.no_grad():
            own = pair.logits(policy, batch)
            theirs = pair.logits(reference, batch) if reference is not None else None
            if theirs is not None and theirs.shape != own.shape:
                self.unlike = f"the reference has {theirs.shape[-1]} tokens, the policy {own.shape[-1]}"
            self.tables = Tables(own, theirs)
            self.logp = self._chosen(own)
            self.ref_logp = None if theirs is None else self._chosen(theirs)
            if reference is not None and not self.unlike:
                self._with_equal_weights(reference)

    def _with_equal_weights(self, reference: LanguageModel) -> None:
        try:
            with self.pair.equal():
                # The policy's adapters, if there are any, do nothing here.
                first, second = (
                    self._chosen(self.pair.logits(one, self.batch)) for one in (self.pair.policy, reference)
                )
                self.equal_logp = first, second
        except UnlikeError as error:
            self.unlike = str(error)

    def call(self, subject: ByName | Whole, beta: float) -> None:
        """Call the loss in all cases."""
        self.subject, self.beta = subject, beta
        with evaluated(self.pair):
            self.given = subject.call(Case(beta))
            self.again = subject.call(Case(beta))
            masks = {"padding": subject.padding, "prompt": subject.others}
            self.altered = {name: subject.call(Case(beta, altered=one)) for name, one in masks.items() if one.any()}
            at = (beta, 0.0, beta / 2) if subject.takes_beta else (beta,)
            self.at_other = {one: subject.call(Case(one, OTHER)) for one in at}
            self.at_equal: dict[float, Called] = {}
            self.not_equal = ""
            shares = isinstance(subject, Whole) and "ref_logp" not in self.batch.keys
            try:
                with self.pair.equal() if shares else nullcontext():
                    self.at_equal = {one: subject.call(Case(one, EQUAL)) for one in at[:2]}
            except UnlikeError as error:
                self.not_equal = str(error)
            self.wider = None
            if subject.may_be_wider:
                self.wider = subject.call(Case(beta, wider=WIDER))
        part = self.part(self.at_other)
        self.norms = self.pair.gradients(self.batch, part.gradients) if part.gradients else {}

    def part(self, calls: dict[float, Called], half: bool = False) -> Called:
        """Return the KL part of a loss over β: the difference from β = 0; the loss itself if it takes no β."""
        if not self.subject.takes_beta:
            return calls[self.beta]
        beta = self.beta / 2 if half else self.beta
        return calls[beta].less(calls[0.0], beta)

    @cached_property
    def tolerance(self) -> float:
        """Largest difference of log-probs that rounding causes."""
        policy = self.pair.policy
        types = {one.dtype for one in policy.model.parameters() if one.is_floating_point()}
        types |= {policy.compute_dtype} if policy.compute_dtype else set()
        return max((TOLERANCE.get(one, HALF) for one in types), default=HALF)

    @torch.no_grad()
    def logp_of(self, one: LanguageModel) -> Tensor:
        """Return (B, W) log-probs in the modes that the models are in."""
        return self._chosen(self.pair.logits(one, self.batch))

    def _chosen(self, logits: Tensor) -> Tensor:
        return chosen(of_targets(logits, self.batch).log_softmax(-1), self.batch)

    def gap(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the differences of two tables of log-probs at the tokens that count."""
        return (one.to(other) - other)[self.batch.live]

    def shifted(self, given: Tensor, own: Tensor) -> Iterator[tuple[str, float]]:
        """Yield a side, and the median distance of log-probs if the first ones stand a token too far there."""
        live = self.batch.live
        for shift, side in ((1, "left"), (-1, "right")):
            both = live & live.roll(shift, 1)
            both[:, 0 if shift > 0 else -1] = False
            if bool(both.any()):
                yield side, float((given.roll(shift, 1).to(own) - own)[both].abs().median())

    def explanations(self, given: Tensor) -> Iterator[tuple[str, float]]:
        """Yield what log-probs that are not the policy's may be, and the median distance from that."""
        own = of_targets(self.tables.policy, self.batch)
        for side, median in self.shifted(given, self.logp):
            yield f"they stand one token too far to the {side}", median
        if self.ref_logp is not None:
            yield "they are the reference's", float(self.gap(given, self.ref_logp).abs().median())
        for divisor in TEMPERATURES:
            if divisor != 1:
                at = chosen((own / divisor).log_softmax(-1), self.batch)
                of_model = self.pair.temperature * divisor
                yield f"they have a temperature of {of_model:g}", float(self.gap(given, at).abs().median())
        if not self.pair.is_sharded and not bool(self.batch.attention.all()):
            try:
                with evaluated(self.pair), torch.no_grad():
                    everything = torch.ones_like(self.batch.attention)
                    at = self._chosen(self.pair.logits(self.pair.policy, self.batch, everything))
                yield "they were computed without the attention mask", float(self.gap(given, at).abs().median())
            except KltestError:
                return

"""Heads: the likeliest actions, if a loss distinguishes only those.

In a bandit with many actions the log-probs of all actions from rank k on are exchanged, which keeps their total, and
the gradient of one rollout is computed again. If it stays the same for a k below the number of actions, the loss
distinguishes a *head* of the k likeliest actions and nothing else. A sum over a head (KL701) is the same whatever
action was drawn from it. The log-prob of the drawn token under a distribution that was cut to its head (KL703), as a
sampler with top-k or top-p reports it, is not. Since the total of the other actions has no part in it, it shows when
their log-probs are lowered.

A head alone is no mistake: a head that is differentiated correctly, with a sampled tail, has the exact gradient. So a
row has to be wrong and unnamed, in an environment with more actions than the head has. If the head is larger than the
usual environments, the gradient in a large enough one has to differ from what the loss follows in a small one.

If rollouts come from a truncated sampler, or from an engine whose true log-probs are not those in `old_logp`, *no* loss
that sees only the drawn tokens can be right. That proves nothing about a loss and is not tried here: tokens come from
the whole distribution, and a loss is found that truncates one side by itself.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kltest.checks.check import Found
from kltest.environments import Instance, bandit
from kltest.errors import KltestError
from kltest.identify.case import relative_bias, size
from kltest.identify.findings import Findings, Row, shared
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.moments import exact
from kltest.moments.averaged import DTYPE as AVERAGED
from kltest.moments.differentiate import at_leaves
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout
from kltest.truth import combine, render, support_named

# Numbers of actions: the first shows small heads and thresholds on probabilities, the second every head in use. It is a
# prime, so that no blocks are whole.
SIZES = (12, 2053)
# Instances drawn, and those in which a head has to show: in some, a threshold leaves one action or all of them.
DRAWS, SOME = 4, 2
FIELDS = ("ref_logits", "logits", "old_logits")
# Ranks beside the end of a head, found by bisection, that are tried too: silent tokens need not be the unlikeliest.
NEIGHBOURS = 12
# Relative bias of an approximation that matters; a constant in a denominator stays below it, vocabulary large or not.
BIASED = 1e-3
Change = Callable[[Tensor], Tensor]
# Of the log-probs of the actions beyond a head: they are exchanged, which keeps their total, or lowered.
CHANGES: tuple[Change, ...] = (lambda log_probs: log_probs.roll(1, dims=-1), lambda log_probs: log_probs - 0.05)


class Head(NamedTuple):
    """The likeliest actions `by` policy, reference or sampler that a loss distinguishes, as many as in a few instances.

    `drawn`: the log-prob of the drawn token is taken under a distribution cut to them.
    """

    by: str
    sizes: tuple[int, ...]
    drawn: bool

    @property
    def size(self) -> int | None:
        """Number of actions if it is the same in all instances, else None."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    @property
    def words(self) -> str:
        """The head in words, with its size, or with what it is in each instance."""
        if self.size is not None:
            return f"the {self.size} likeliest actions under the {self.by}"
        return f"the likeliest actions under the {self.by}, as many as {', '.join(map(str, self.sizes))}"


def accounts_for(row: Row, findings: Findings, *, drawn: bool) -> str | None:
    """Describe the head that explains an unnamed row; None if the gradient in a bandit has a name all the same."""
    if not row.wrong:
        return None
    if row.identified is not None:
        named = [one for name in row.identified if (one := support_named(name.partition("@")[0]))]
        if not named or drawn:
            return None
        head = Head("reference" if named[0].whose == "top" else "policy", (named[0].k,), drawn=False)
        return f"{render(row.identified)}; the loss distinguishes only {head.words}"
    # First, since the search for a head takes hundreds of calls.
    single = findings.measure.alone("bandit", "current") if sees_all_tokens(findings) else None
    if single is not None and single.identified not in (None, {"zero": 1.0}):
        return None
    found = head_of(findings)
    if found is None or found.drawn != drawn:
        return None
    if findings.loss.support is not None:  # which is smaller than every vocabulary
        found = found._replace(sizes=(findings.loss.support.k,))
    elif (found.size or 0) >= instances(row.environment, findings.seed)[0].environment.vocabulary:
        return None
    limits = "log-probs of drawn tokens are taken within" if drawn else "the loss distinguishes only"
    return f"no named gradient; {limits} {found.words}"


def beyond_the_usual_environments(findings: Findings, *, drawn: bool) -> Found | None:
    """Report a head that leaves out nothing in small environments and changes the gradient in a large enough one."""
    found = head_of(findings)
    small = findings.measure.alone("bandit", "current")
    if found is None or found.drawn != drawn or small is None or small.identified is None:
        return None
    followed = findings.expect if small.agrees else small.identified
    largest = max(found.sizes)
    actions = largest + max(8, largest // 4)
    instance = Instance.draw(bandit(actions), findings.seed)
    gradient = exact(findings.loss, instance, padding=findings.seed).gradient
    bias = relative_bias(gradient, combine(followed, instance), size(instance))
    if bias <= BIASED:
        return None
    return Found(
        f"With a few actions the gradient is {render(followed)}; it distinguishes only {found.words}, and "
        f"with {actions} actions it is off by {bias:.2g} of that."
    )


def sees_all_tokens(findings: Findings) -> bool:
    """Return True if the loss reads more than the drawn token's log-probs and can be called on single rollouts."""
    return not (findings.observed.coupled or findings.observed.blocked) and bool(
        findings.loss.takes & {*FIELDS, "rollout"}
    )


@shared
def head_of(findings: Findings) -> Head | None:
    """The head, None if the loss distinguishes all actions or sees the drawn token alone.

    Of a mean over random draws the gradients at single logits are too coarse: KL105 has what a head changes.
    """
    if not sees_all_tokens(findings) or findings.observed.dtype == AVERAGED:
        return None
    for actions in SIZES:
        try:
            found = _common_head(actions, findings)
        except KltestError:  # a loss that cannot be called so proves nothing
            continue
        if found is not None:
            return found
    return None


def _common_head(actions: int, findings: Findings) -> Head | None:
    """Return the head that shows in most instances of a bandit; the smallest of several."""
    sizes: dict[tuple[str, bool], list[int]] = {}
    for number, child in enumerate(np.random.SeedSequence([findings.seed, actions]).spawn(DRAWS), start=1):
        for by, many, drawn in _heads(findings.loss, Instance.draw(bandit(actions), child), findings.seed):
            sizes.setdefault((by, drawn), []).append(many)
        if number == SOME and not sizes:
            return None
    often = [Head(by, tuple(mine), drawn) for (by, drawn), mine in sizes.items() if len(mine) >= SOME]
    return min(often, key=lambda head: (-len(head.sizes), sum(head.sizes)), default=None)


def _heads(loss: Loss, instance: Instance, padding: int) -> Iterator[tuple[str, int, bool]]:
    """Yield heads that would account for what the loss sees in one instance: policy, size, and if a token is drawn."""
    for by, table in (("policy", instance.policy), ("reference", instance.reference), ("sampler", instance.sampler)):
        probe = _SingleRollouts(loss, instance, np.argsort(-table[0], kind="stable"), padding)
        fields = [field for field in FIELDS if field in probe.read]
        if fields and (by != "sampler" or "old_logits" in fields):
            found = next(filter(None, map(probe.head, fields)), None) or probe.tail_is_silent()
            if found:
                yield by, *found


class _SingleRollouts:
    """A loss on single rollouts of a bandit, whose actions are numbered by rank."""

    def __init__(self, loss: Loss, instance: Instance, order: np.ndarray, padding: int) -> None:
        self.loss, self.instance, self.order, self.padding = loss, instance, order, padding
        self.dtype = "float64"
        first = self._rollout(0)
        self._own = {0: self._gradient(first)}
        self.read = frozenset(first.accessed)

    def head(self, field: str) -> tuple[int, bool] | None:
        """Number of the likeliest entries of a field that matter beside the drawn one's, None if all or none do."""
        count = len(self.order)
        for change in CHANGES:

            def blind(size: int, change: Change = change) -> bool:
                """True if no entry beyond the `size` likeliest moves the gradient of the likeliest action's rollout."""
                return not self._sees(field, change, np.arange(size, count), 0)

            if not blind(count - 2):
                continue
            size = _smallest(blind, 1, count - 2)
            if size > 1:
                return size, not self._same(self._of(0), self._of(1))
            if change is CHANGES[0] and self._sees(field, change, np.array([0, 2]), 1):
                return 1, False
        return None

    def tail_is_silent(self) -> tuple[int, bool] | None:
        """Number of the likeliest tokens that have a gradient when drawn, if the others have none."""
        last = len(self.order) - 1
        if not self._silent(last) or self._silent(0):
            return None
        size = _smallest(self._silent, 1, last)
        near = range(max(0, size - NEIGHBOURS), min(last, size + NEIGHBOURS) + 1)
        return (size, True) if all(self._silent(rank) == (rank >= size) for rank in near) else None

    def _silent(self, rank: int) -> bool:
        return not any(bool(part.any()) for part in self._of(rank))

    def _sees(self, field: str, change: Change, ranks: np.ndarray, drawn: int) -> bool:
        """Return True if a change of the entries of these ranks moves the gradient of the rollout of rank `drawn`."""
        rollout, entries = self._rollout(drawn), torch.from_numpy(self.order[ranks])
        moved = rollout.peek(field).detach().clone()
        moved[..., entries] = change(moved[..., entries])
        return not self._same(self._of(drawn), self._gradient(rollout.replace(**{field: moved})))

    def _same(self, one: list[Tensor], other: list[Tensor]) -> bool:
        limit = TOLERANCES[self.dtype].head * max(float(part.abs().max()) for part in (*one, *other))
        return all(bool((a - b).abs().max() <= limit) for a, b in zip(one, other, strict=True))

    def _of(self, rank: int) -> list[Tensor]:
        if rank not in self._own:
            self._own[rank] = self._gradient(self._rollout(rank))
        return self._own[rank]

    def _rollout(self, rank: int) -> Rollout:
        row = self.order[[rank]]
        return Rollout.of(self.instance, self.instance.paths.take(row), sampler="stale", padding=self.padding)

    def _gradient(self, rollout: Rollout) -> list[Tensor]:
        outcome = self.loss(rollout)
        self.dtype = outcome.dtype
        return at_leaves(self.loss, outcome.objective, rollout)


def _smallest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Smallest k in low … high for which a monotone predicate holds; it holds at `high`."""
    return low + bisect_left(range(low, high), True, key=holds)

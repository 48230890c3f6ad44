"""An expected gradient beside the true one in a world small enough for pencil and paper, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from kltest.counterexample.demonstration import SmallWorld, aligned, written


@dataclass(frozen=True)
class Place:
    """One prefix: what each action's probability is there, and derivatives with respect to its logit.

    `sampler` is None where rollouts come from the policy, `reward` where nothing is paid. `std` is the standard
    deviation of the derivative that one batch gives.
    """

    prefix: str
    policy: list[float]
    reference: list[float]
    sampler: list[float] | None
    reward: list[float] | None
    truth: list[float]
    found: list[float]
    std: list[float]


@dataclass(frozen=True)
class WorkedExample:
    """A small token sequence with its policies, the declared gradient and the one that a loss follows there.

    `length` tokens of `actions`, with `ends` up to that, the last action ending the rollout; batches of `batch`
    rollouts, drawn from the policy ("current") or from the sampler ("stale"). `returned` says whether the loss gave a
    scalar, a number for each of the rows or of the tokens; `summed`: the gradient of a batch was divided by its rows,
    which the loss adds up. `code` is a program that computes both gradients without
    kltest, `note` says why there is none.
    """

    environment: str
    sampler: str
    length: int
    actions: int
    ends: bool
    batch: int
    returned: str
    summed: bool
    contexts: list[Place]
    code: str = ""
    note: str = ""

    @property
    def drawn_from_sampler(self) -> bool:
        return any(place.sampler is not None for place in self.contexts)

    @property
    def world(self) -> SmallWorld:
        """The world, ready to be made."""
        return SmallWorld(
            policy=[place.policy for place in self.contexts],
            reference=[place.reference for place in self.contexts],
            sampler=[place.sampler or place.policy for place in self.contexts] if self.drawn_from_sampler else None,
            length=self.length,
            ends=self.ends,
            reward=[place.reward or [0.0] * self.actions for place in self.contexts],
        )

    @property
    def setting(self) -> str:
        """The world in words."""
        actions = f"{self.actions} actions" + (f", the last of which ({self.actions - 1}) ends" if self.ends else "")
        length = "1 token" if self.length == 1 else f"{self.length} tokens{' at most' * self.ends}"
        drawn = "drawn from the sampler" if self.drawn_from_sampler else "drawn from π"
        batches = f", in batches of {self.batch}" if self.batch > 1 else ""
        batches += f", which are added up: divided by {self.batch}" if self.summed else ""
        unpaid = any(place.reward for place in self.contexts) and not any(any(p.reward or ()) for p in self.contexts)
        reward = "; every reward is 0" if unpaid else ""
        return f"{length} of {actions}; rollouts {drawn}{batches}{reward}; derivatives with respect to logits"

    @property
    def words(self) -> str:
        """The setting and the table as lines."""
        return "\n".join([self.setting, *aligned(self.table())])

    def table(self) -> list[tuple[str, ...]]:
        """An action a row, the head first."""
        has_sampler = self.drawn_from_sampler
        has_reward = any(place.reward and any(place.reward) for place in self.contexts)
        head = ("prefix", "action", "π", "ref", *("sampler",) * has_sampler, *("reward",) * has_reward)
        rows = [(*head, "true gradient", "expected gradient")]
        for place in self.contexts:
            for action in range(self.actions):
                given = [place.policy, place.reference]
                given += [place.sampler or place.policy] * has_sampler + [place.reward or []] * has_reward
                cells = (f"{numbers[action]:g}" for numbers in given)
                found = (written(place.truth[action]), written(place.found[action]))
                rows.append((place.prefix, str(action), *cells, *found))
        return rows

"""Counter-examples as plain data: a small environment with the declared gradient and the one that a loss follows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prefix:
    """One context of a small environment: the probability of each action, and derivatives with respect to its logit.

    `sampler` is None if rollouts come from the policy, `reward` if there are no rewards. `std` is the standard
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
class CounterExample:
    """A small token sequence with its policies, the declared gradient and the one that a loss follows there.

    `length` tokens of `actions`; with `ends`, at most that many, and the last action ends the rollout. Batches of
    `batch` rollouts are drawn from the policy ("current") or from the sampler ("stale"). `returned` says if the loss
    gave a scalar, a number per row or a number per token. If `summed`, the loss adds up the rows of a batch, and its
    gradient was divided by their number. `code` is a program that computes both gradients without kltest; `note` says
    why there is none.
    """

    environment: str
    sampler: str
    length: int
    actions: int
    ends: bool
    batch: int
    returned: str
    summed: bool
    contexts: list[Prefix]
    code: str = ""
    note: str = ""

    @property
    def drawn_from_sampler(self) -> bool:
        """True if rollouts are drawn from another policy than the graded one."""
        return any(place.sampler is not None for place in self.contexts)

    @property
    def setting(self) -> str:
        """Description of the environment in words."""
        actions = f"{self.actions} actions" + (f", the last of which ({self.actions - 1}) ends" if self.ends else "")
        length = "1 token" if self.length == 1 else f"{self.length} tokens{' at most' * self.ends}"
        drawn = "drawn from the sampler" if self.drawn_from_sampler else "drawn from π"
        batches = f", in batches of {self.batch}" if self.batch > 1 else ""
        batches += f", which are added up: divided by {self.batch}" if self.summed else ""
        unpaid = any(place.reward for place in self.contexts) and not any(any(p.reward or ()) for p in self.contexts)
        reward = "; every reward is 0" if unpaid else ""
        return f"{length} of {actions}; rollouts {drawn}{batches}{reward}; derivatives with respect to logits"

    def table(self) -> list[tuple[str, ...]]:
        """Return the numbers as text, a row per action, the head first."""
        has_sampler = self.drawn_from_sampler
        has_reward = any(place.reward and any(place.reward) for place in self.contexts)
        head = ("prefix", "action", "π", "ref", *("sampler",) * has_sampler, *("reward",) * has_reward)
        rows = [(*head, "true gradient", "expected gradient")]
        for place in self.contexts:
            tables = [place.policy, place.reference]
            tables += [place.sampler or place.policy] * has_sampler + [place.reward or []] * has_reward
            for action in range(self.actions):
                cells = (f"{numbers[action]:g}" for numbers in tables)
                derivatives = (format_cell(place.truth[action]), format_cell(place.found[action]))
                rows.append((place.prefix, str(action), *cells, *derivatives))
        return rows


def format_cell(cell: str | float) -> str:
    """Return a cell of a table as text: numbers with six decimals, or six digits if that would show nothing of them."""
    if isinstance(cell, str):
        return cell
    if not math.isfinite(cell):
        return str(cell)
    small, large = abs(cell) < 1e-4, abs(cell) >= 1e7
    text = f"{cell:.6g}" if cell != 0 and (small or large) else f"{cell:.6f}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of texts as lines, padded to equal columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]

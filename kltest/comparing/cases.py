"""The batches on which two losses are compared: those of the graded environments, and those on which they part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any

import numpy as np
import torch

from kltest.checks.batches import LOG_PROBS, batch_of, with_advantage
from kltest.checks.hygiene.kl501_padding_leak import FILLS as LEGAL
from kltest.checks.hygiene.kl501_padding_leak import filled
from kltest.checks.hygiene.kl502_padding_nan import FILLS as EXTREME
from kltest.environments import Instance, bandit
from kltest.identify.instances import instances
from kltest.names import LOGITS
from kltest.rollout import Rollout

ENVIRONMENTS = ("bandit", "sequence", "ragged", "turns")
SIZES = (1, 2, 3, 5, 8, 17, 32)
# Of one token, for parts of 64 or 128 rows; of one kind of tokens; of rollouts: neither a power of two nor a multiple.
MANY_ROWS, VOCABULARY, LENGTHS, LONGEST = 257, 1031, (64, 67, 1024, 1031), 72
# Log-ratios of a token to the reference, or to a stale sampler.
FAR = (2.0, 5.0, 20.0)
BETAS = (0.0, 0.5, 2.0)
# Environments on which a numeric option is varied: a bound may act far from the reference only.
APART = ("ragged", "far 2", "far 20")
# Log-probs of every token in the plainest batch.
FLAT = {"logp": -1.0, "ref_logp": -1.5, "old_logp": -1.2}
FILLS = {**LEGAL, **EXTREME}
# What every case has.
USUAL = ("family", "environment", "rows", "sampler", "step", "digits", "seed")


@dataclass(frozen=True)
class Case:
    """A batch, and how the losses are called with it.

    Attributes:
        family: What it is for, in words.
        environment: A graded one, or "far U", "long T", "many V".
        rows: The rollouts of the environment that it takes.
        group: Rollouts in a group of one prompt, 0 for the environment's own prompts.
        step: The number of rows is a multiple of it.
        padding: What stands at padded positions, a key of FILLS; "" for what the environment writes there.
        columns: Columns of padding that are added.
        floats: The type of floating-point fields.
        beta: The coefficient, None for the loss's own.
        options: Values of parameters that both take.
        upstream: 0 if the gradient that comes in from above is 1; else it is 2, and grows by 1 up to this many rows on.
        constant: Added to the logits of every position.
        digits: To which log-probs are rounded; 0 if those of a policy are all one number.
        trimmed: True if columns without a token are cut off.
    """

    family: str
    environment: str
    rows: tuple[int, ...]
    sampler: str = "stale"
    group: int = 0
    step: int = 1
    padding: str = ""
    columns: int = 0
    floats: str = "float64"
    beta: float | None = None
    options: tuple[tuple[str, float], ...] = ()
    upstream: int = 0
    constant: float = 0.0
    digits: int | None = None
    trimmed: bool = False
    seed: int = 0

    @property
    def words(self) -> str:
        """The batch in words."""
        plural = "s" if len(self.rows) > 1 else ""
        said = {
            f"{len(self.rows)} rollout{plural} of {self.environment}, {self.sampler} sampler": True,
            f"groups of {self.group}": self.group,
            f"{self.padding} at padding": self.padding,
            f"{self.columns} more columns": self.columns,
            self.floats: self.floats != "float64",
            f"β = {self.beta}": self.beta is not None,
            ", ".join(f"{name} = {value:g}" for name, value in self.options): self.options,
            "a gradient from above that is not 1": self.upstream,
            f"{self.constant:g} and more added to all logits": self.constant,
        }
        return ", ".join(words for words, true in said.items() if true)

    @property
    def weights(self) -> torch.Tensor:
        """(B,) gradient that comes in from above, times B."""
        rows = torch.arange(len(self.rows))
        return 2.0 + rows % self.upstream if self.upstream else torch.ones(len(rows))

    @property
    def special(self) -> int:
        """How many things about it are not the usual."""
        ours = (each for each in fields(self) if each.name not in USUAL)
        return sum(getattr(self, each.name) != each.default for each in ours)


def rollout(case: Case) -> Rollout:
    """Return the batch of a case, with fresh leaves."""
    batch = _base(case.environment, case.sampler, case.seed).take(list(case.rows))
    if case.group:
        place = torch.arange(len(case.rows))
        # The last group is tied.
        paid = (place % 2 == 0) & ((place < len(place) - case.group) | (len(place) == case.group))
        batch = batch.replace(group=place // case.group, reward=paid.double())
    batch = with_advantage(batch)
    live = batch.peek("mask") != 0
    changed: dict[str, Any] = {}
    if case.digits is not None:
        numbers = {name: batch.peek(name).detach() for name in (*FLAT, "reward", "advantage")}
        changed = {name: one.round(decimals=case.digits or 1) for name, one in numbers.items()}
        if not case.digits:
            changed |= {name: torch.full_like(numbers[name], number) for name, number in FLAT.items()}
    if case.constant:
        # Another one at each position.
        steps = case.constant * (1 + torch.arange(live.numel()).reshape(live.shape) % 3)[..., None]
        changed = {name: batch.peek(name).detach() + steps for name in LOG_PROBS if name.endswith("logits")}
    batch = batch.replace(**changed)
    if case.padding:
        batch = filled(batch, FILLS[case.padding])
    if case.trimmed:
        width = int(live.any(dim=0).nonzero().max()) + 1
        whole = {name: batch.peek(name).detach() for name in batch}
        batch = Rollout({name: one[:, :width] if one.dim() > 1 else one for name, one in whole.items()})
    return batch.wider(case.columns, case.seed) if case.columns else batch


@lru_cache(maxsize=32)
def _base(environment: str, sampler: str, seed: int) -> Rollout:
    kind, _, number = environment.partition(" ")
    if kind == "far":
        far = float(number)
        mild = batch_of([far, -far, far / 2], 5, length=2)
        if sampler == "current":
            return mild
        same = {f"old_{name}": mild.peek(f"ref_{name}") for name in ("logp", "logits")}
        return mild.replace(**same, **{f"ref_{name}": mild.peek(f"old_{name}") for name in ("logp", "logits")})
    if kind == "long":
        return _long(int(number), sampler, seed)
    if kind == "many":
        reward = np.random.default_rng(seed).integers(2, size=(1, int(number))).astype(float)
        instance = Instance.draw(bandit(int(number), reward=reward), seed)
    else:
        instance = instances(environment, seed)[0]
    return Rollout.of(instance, sampler=sampler, padding=seed, centre="batch")


def _long(length: int, sampler: str, seed: int) -> Rollout:
    """Rollouts of many tokens, each unlike the others up to the last one; the first has them all, others fewer."""
    generator = torch.Generator().manual_seed(seed + length)
    shape = (LONGEST, length, 3)
    base = torch.randn(shape, generator=generator, dtype=torch.float64)
    tables = {name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("", "ref_", "old_")}
    tables = {name: (base + one).log_softmax(-1) for name, one in tables.items()}
    if sampler == "current":
        tables["old_"] = tables[""]
    tokens = torch.randint(3, shape[:2], generator=generator)
    rows = torch.arange(LONGEST)
    fields: dict[str, Any] = {f"{name}logits": one.clone() for name, one in tables.items()}
    fields |= {f"{name}logp": one.gather(-1, tokens[..., None])[..., 0] for name, one in tables.items()}
    mask = (torch.arange(length) < length - 3 * rows[:, None] % (length // 2)).double()
    return Rollout({**fields, "tokens": tokens, "mask": mask, "reward": (rows % 2).double(), "group": 0 * rows})


def _rows(environment: str, many: int, seed: int) -> tuple[int, ...]:
    """Rollouts of an environment, as different as there are."""
    count = len(_base(environment, "current", seed))
    order = np.random.default_rng([seed, count]).permutation(count)
    return tuple(int(row) for row in np.resize(order, many))


def cases(
    seed: int,
    *,
    reads: frozenset[str] = frozenset(),
    logits: bool = False,
    numbers: Mapping[str, float] | None = None,
    groups: tuple[int, ...] = (2, 4),
    upstream: int = 1,
    step: int = 1,
) -> list[Case]:
    """Return what is tried, from small batches to large.

    Args:
        seed: Seed of the environments, of padding, and of what is taken.
        reads: Fields that one of the losses reads.
        logits: True if both read logits.
        numbers: Values of numeric parameters that both take.
        groups: Sizes of groups.
        upstream: 3 if both return a number a row, so that each may get another gradient from above, else 1.
        step: Numbers of rows are multiples of it, for losses that take no others.
    """

    def of(family: str, environment: str, many: int, **more: Any) -> Case:
        return Case(family, environment, _rows(environment, many * step, seed), seed=seed, step=step, **more)

    samplers = ("current", "stale")
    found = [of("batch sizes", each, n, sampler=s) for n, each, s in product(SIZES, ENVIRONMENTS, samplers)]
    found += [of("batch sizes", "bandit", MANY_ROWS)]
    usual = {name: of("", name, 5) for name in ("ragged", "turns")}
    found += [replace(one, family="padding", padding=name) for name, one in product(FILLS, usual.values())]
    found += [replace(one, family="columns", columns=more) for more, one in product((1, 5), usual.values())]
    whole = of("order and parts", "ragged", 17)
    half = 8 * step
    parts = (whole.rows[::-1], whole.rows[half:] + whole.rows[:half], whole.rows[:half], whole.rows[half:])
    found += [replace(whole, rows=part) for part in parts]
    found += [
        replace(of("groups", each, size * many, group=size, sampler=sampler), rows=_rows(each, size * many, seed))
        for size, many, each, sampler in product(groups, (1, 2, 3), ("bandit", "ragged"), samplers)
    ]
    found += [of("gradient from above", each, n, upstream=upstream) for n, each in product((1, 5), ENVIRONMENTS)]
    for each, floats in product(("bandit", "ragged", "turns", "far 5"), ("float32", "bfloat16")):
        found.append(of("precision", each, 8, floats=floats, sampler="current"))
    if "beta" in reads:
        found += [of("β", each, 5, beta=beta) for beta, each in product(BETAS, ("bandit", "ragged"))]
    for name, number in (numbers or {}).items():
        others = {2 * number, number + 1, number / 2} if isinstance(number, float) else {2 * number, number + 1}
        for other in sorted(others - {number}):
            found += [of("options", each, 5, sampler="current", options=((name, other),)) for each in APART]
    found += [of("far", f"far {far:g}", 8, sampler=sampler) for far, sampler in product(FAR, samplers)]
    found += [
        Case("long", f"long {length}", tuple(range(n * step)), seed=seed, step=step)
        for length, n in product(LENGTHS, (1, 3, 9))
    ]
    if reads & LOGITS:
        found += [of("many tokens", f"many {VOCABULARY}", n) for n in (1, 5)]
    if logits:
        found += [of("raw logits", each, n, constant=1.5) for n, each in product((1, 5), ("bandit", "ragged"))]
    return found


def simpler(case: Case, *, rounds: bool) -> Iterator[Case]:
    """Yield cases that say less: fewer rows first, then nothing unusual that is not needed, then round numbers."""
    step = case.group or case.step
    many = len(case.rows) // step
    blocks = [case.rows[step * place : step * (place + 1)] for place in range(many)]
    for size in (1, 2, many // 2, many - 1):
        if 0 < size < many:
            some = combinations(blocks, size) if size != many // 2 or many < 6 else (blocks[:size], blocks[size:])
            for part, _ in zip(some, range(64), strict=False):
                yield replace(case, rows=sum(part, ()))
    defaults: dict[str, Any] = {
        "sampler": "current",
        "padding": "",
        "columns": 0,
        "floats": "float64",
        "upstream": False,
    }
    defaults |= {"beta": None, "options": (), "constant": 0.0, "trimmed": True}
    for name, usual in defaults.items():
        if getattr(case, name) != usual:
            yield replace(case, **{name: usual})
    if rounds and not case.constant:
        yield from (replace(case, digits=digits) for digits in range(4) if case.digits is None or digits < case.digits)

"""The truth about a loss of the corpus, by enumeration with torch and itertools alone.

A small environment is a tree of prefixes with a table of logits at each; every rollout is listed, the loss is called on
batches of them, and its gradients are summed with the true probabilities of the batches. What is measured is compared
with the gradient of the exact KL, which is differentiated from the same tables without any sampling.

Long rollouts stay enumerable because most of their tokens are forced (probability one under every policy) and a few
far apart are free. Large batches stay enumerable because they are counted as multisets over two rollouts; where the
order of the rows matters, the cyclic shifts stand for all orders, which is exact for a loss that is a sum over rows of
something that depends on the row and its place.
"""

import dataclasses
import inspect
import itertools
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

FIELDS: dict[str, str] = {  # a field, and the other names of parameters that it fills
    "logp": "logprob logprobs log_prob log_probs logps per_token_logps new_logprobs",
    "ref_logp": "ref_logprob ref_logprobs ref_log_prob ref_log_probs log_probs_base log_probs_ref ref_logps"
    " ref_per_token_logps",
    "old_logp": "old_logprob old_logprobs old_log_prob old_log_probs old_logps log_probs_old old_per_token_logps",
    "mask": "response_mask completion_mask action_mask loss_mask attention_mask full_attention_mask",
    "tokens": "completion_ids responses",
    "logits": "",
    "ref_logits": "",
    "old_logits": "",
    "reward": "rewards scores token_level_scores",
    "advantage": "advantages",
    "group": "group_ids",
    "beta": "kl_coef kl_coeff kl_beta kl_loss_coef kl_ctl",
}
ALIASES = {alias: field for field, aliases in FIELDS.items() for alias in (field, *aliases.split())}
PADDED_ENTRIES = 5


@dataclasses.dataclass(frozen=True)
class Environment:
    """Which tokens are free, how long rollouts are, and how far apart policy, reference and sampler stand."""

    vocabulary: int = 2
    length: int = 3
    free: tuple[int, ...] | None = None  # positions with a choice; None: all of them
    end: bool = False  # the last token of the vocabulary ends the rollout
    padding: int = 0  # padded columns beyond the longest rollout
    reference: float = 0.0  # log-ratio of a token to the reference; 0: mild
    sampler: float = 0.0  # log-ratio of a token to the sampler; 0: mild
    stale: bool = False
    binary: bool = False  # rewards of 0 and 1, so that groups tie
    seed: int = 0


class Instance:
    """An environment with its tables, rollouts, probabilities and rewards."""

    def __init__(self, environment: Environment, dtype: torch.dtype = torch.float64):
        self.environment, self.dtype = environment, dtype
        e, generator = environment, torch.Generator().manual_seed(environment.seed + 7)
        free = range(e.length) if e.free is None else e.free
        self.rollouts: list[tuple[list[int], list[int]]] = []  # tokens and nodes
        self.nodes = 0
        self._walk([], [], set(free))
        V, N = e.vocabulary, self.nodes

        def uniform(rows: int, size: float) -> torch.Tensor:
            return (torch.rand(rows, V, generator=generator, dtype=torch.float64) * 2 - 1) * size

        def far(log_ratio: float) -> torch.Tensor:
            signs = torch.randint(0, 2, (N, 1), generator=generator) * 2.0 - 1
            tilt = torch.zeros(N, V, dtype=torch.float64)
            tilt[:, 0], tilt[:, 1] = log_ratio / 2, -log_ratio / 2
            return tilt * signs

        base, reference, sampler = uniform(N, 0.7), uniform(N, 0.8), uniform(N, 0.4)
        if e.reference:
            tilt = far(e.reference)
            base, reference = base + tilt, reference - 2 * tilt
        if e.sampler:
            tilt = far(e.sampler)
            base, sampler = base + tilt, sampler - 2 * tilt
        forced = torch.full((1, V), -60.0, dtype=torch.float64)
        forced[0, 0] = 0.0
        tables = []
        for free_logits in (base, base + reference, base + sampler):
            padded = uniform(PADDED_ENTRIES, 4.0)
            tables.append(torch.cat([free_logits, forced, padded]).log_softmax(-1))
        self.policy, self.reference = tables[0], tables[1]
        self.sampler = tables[2] if e.stale else tables[0]
        width = e.length + e.padding
        rows = len(self.rollouts)
        self.tokens = torch.randint(0, V, (rows, width), generator=generator)
        self.index = N + 1 + torch.randint(0, PADDED_ENTRIES, (rows, width), generator=generator)
        self.mask = torch.zeros(rows, width, dtype=torch.float64)
        for row, (tokens, nodes) in enumerate(self.rollouts):
            self.tokens[row, : len(tokens)] = torch.tensor(tokens)
            self.index[row, : len(tokens)] = torch.tensor([n if n >= 0 else self.nodes for n in nodes])
            self.mask[row, : len(tokens)] = 1
        self.probability = (self._taken(self.sampler) * self.mask).sum(1).exp()
        self.task_reward = torch.randn(rows, generator=generator, dtype=torch.float64)
        if e.binary:
            self.task_reward = (self.task_reward > 0).double()
            self.task_reward[0], self.task_reward[-1] = 1, 0
        chance = (self._taken(self.policy) * self.mask).sum(1).exp()
        self.advantage = self.task_reward - (chance * self.task_reward).sum()
        self.call_tables = [table.to(dtype) for table in (self.policy, self.reference, self.sampler)]
        self.taken = [self._taken(table).to(dtype) for table in (self.policy, self.reference, self.sampler)]

    def _taken(self, table: torch.Tensor) -> torch.Tensor:
        return table[self.index].gather(-1, self.tokens[..., None])[..., 0]

    def _walk(self, tokens: list[int], nodes: list[int], free: set[int]) -> None:
        e = self.environment
        ended = e.end and tokens and tokens[-1] == e.vocabulary - 1
        if len(tokens) == e.length or ended:
            self.rollouts.append((tokens, nodes))
            return
        if len(tokens) not in free:
            self._walk([*tokens, 0], [*nodes, -1], free)
            return
        node = self.nodes
        self.nodes += 1
        for token in range(e.vocabulary):
            self._walk([*tokens, token], [*nodes, node], free)

    def fields(self, rows: Sequence[int], group_size: int | None) -> tuple[dict[str, Any], torch.Tensor]:
        i = torch.tensor(rows)
        index, tokens = self.index[i], self.tokens[i]
        logits = self.call_tables[0][index].requires_grad_()
        logp = logits.gather(-1, tokens[..., None])[..., 0]
        size = group_size or 1
        fields = {
            "logits": logits,
            "logp": logp,
            "ref_logits": self.call_tables[1][index],
            "old_logits": self.call_tables[2][index],
            "ref_logp": self.taken[1][i],
            "old_logp": self.taken[2][i],
            "mask": self.mask[i].to(self.dtype),
            "tokens": tokens,
            "reward": self.task_reward[i].to(self.dtype),
            "advantage": self.advantage[i].to(self.dtype),
            "group": torch.arange(len(rows)) // size,
        }
        return fields, index

    def chain(self, gradient: torch.Tensor) -> torch.Tensor:
        """From log-probs taken as free to the logits; forced nodes have no parameter, padded ones keep theirs."""
        gradient = gradient.double()
        through = gradient - self.policy.exp() * gradient.sum(-1, keepdim=True)
        return torch.cat([through[: self.nodes], gradient[self.nodes + 1 :]])

    def sums(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The scalar whose gradient is `kind`, and the logits it is to be differentiated by."""
        theta = self.policy[: self.nodes].clone().requires_grad_()
        policy = torch.cat([theta.log_softmax(-1), self.policy[self.nodes :]])
        ref, mu, mask = self.reference, self.sampler, self.mask
        logp, refp, mup = self._taken(policy), self._taken(ref), self._taken(mu)
        s, r, m = (logp * mask).sum(1), (refp * mask).sum(1), (mup * mask).sum(1)
        # a rollout's probability at each of its prefixes: over the continuations of one prefix these add up to its own
        prefix = (m if kind.endswith("@sampler") else s).detach().exp()[:, None] * mask
        full, fref = policy[self.index], ref[self.index]
        local = {
            "local_reverse_kl": lambda: (full.exp() * (full - fref)).sum(-1),
            "local_forward_kl": lambda: (fref.exp() * (fref - full)).sum(-1),
            "local_chi_square": lambda: 0.5 * (2 * full - fref).exp().sum(-1),
            "local_squared_log_ratio": lambda: 0.5 * (full.exp() * (full - fref) ** 2).sum(-1),
            "local_total_variation": lambda: 0.5 * (full.exp() - fref.exp()).abs().sum(-1),
        }
        name = kind.removesuffix("@sampler")
        if name in local:
            return (prefix * local[name]()).sum(), theta
        plain = {
            "reverse_kl": lambda: (s.exp() * (s - r)).sum(),
            "forward_kl": lambda: (r.exp() * (r - s)).sum(),
            "squared_log_ratio": lambda: 0.5 * (s.exp() * (s - r) ** 2).sum(),
            "chi_square": lambda: 0.5 * (2 * s - r).exp().sum(),
            "total_variation": lambda: 0.5 * (s.exp() - r.exp()).abs().sum(),
            "from_sampler_kl": lambda: (m.exp() * (m - s)).sum(),
            "expected_reward": lambda: (s.exp() * self.task_reward).sum(),
        }
        return plain[name](), theta

    def target(self, expect: str) -> torch.Tensor:
        plus, _, minus = expect.partition("-")
        scalar, theta = self.sums(plus)
        (gradient,) = torch.autograd.grad(scalar, theta)
        if minus:
            scalar, theta = self.sums(minus)
            gradient = gradient - torch.autograd.grad(scalar, theta)[0]
        return torch.cat([gradient, torch.zeros(PADDED_ENTRIES, gradient.shape[-1], dtype=torch.float64)])

    def kl_values(self) -> dict[str, float]:
        u = (self._taken(self.policy) - self._taken(self.reference)) * self.mask
        p, lengths = (self._taken(self.policy) * self.mask).sum(1).exp(), self.mask.sum(1)
        kl = float((p * u.sum(1)).sum())
        return {
            "kl": kl,
            "kl_per_token": kl / float((p * lengths).sum()),
            "mean_of_token_means": float((p * u.sum(1) / lengths).sum()),
        }


def _built(annotation: Any) -> Any:
    if isinstance(annotation, type) and annotation.__module__ not in ("builtins", "torch"):
        return annotation()
    raise TypeError(f"no value for a parameter annotated {annotation}")


class Loss:
    """A loss with its options, called on fields by the names of its parameters."""

    def __init__(self, function: Callable[..., Any], case: Any):
        self.function, self.case = function, case
        self.parameters = inspect.signature(function).parameters
        self.hints = typing.get_type_hints(function)
        given = dict(case.arguments)
        names = {name: given.get(name, f"@{ALIASES.get(name, '')}") for name in self.parameters}
        self.fills = {n: str(v)[1:] for n, v in names.items() if str(v).startswith("@") and len(str(v)) > 1}
        self.given = {n: v for n, v in given.items() if not str(v).startswith("@")}
        self.reads = set(self.fills.values())
        self.coefficient = "beta" in self.reads  # until tried

    def arguments(self, fields: dict[str, Any], beta: float | None) -> dict[str, Any]:
        values = dict(self.given)
        for name, parameter in self.parameters.items():
            field = self.fills.get(name)
            if name in values:
                continue
            if field and field != "beta":
                values[name] = fields[field]
            elif field == "beta" and beta is not None:
                values[name] = beta
            elif parameter.default is inspect.Parameter.empty:
                values[name] = _built(self.hints.get(name))
        return values

    def outcome(self, fields: dict[str, Any], beta: float | None) -> tuple[torch.Tensor, float | None]:
        """The scalar to differentiate and the logged KL."""
        out, logged = self.function(**self.arguments(fields, beta)), None
        if dataclasses.is_dataclass(out) and not isinstance(out, type):
            out, logged = out.loss, getattr(out, "kl", None)  # type: ignore[attr-defined]
        elif isinstance(out, dict):
            out, logged = out["loss"], out.get("kl")
        elif isinstance(out, tuple):
            second = out[1]
            if isinstance(second, dict):
                logged = second.get("kl")
            elif "kl" in "".join(getattr(out, "_fields", ("", getattr(self.case, "logs", "")))[1:2]):
                logged = second
            out = out[0]
        logged = None if logged is None else float(logged)
        mask, placement = fields["mask"], self.case.placement
        if placement == "loss":
            return self.reduced(out, mask), logged
        cost = -out.detach() if placement == "shaped-reward" else out.detach()
        if cost.dim() == 2:
            cost = torch.where(mask > 0, cost, torch.zeros((), dtype=cost.dtype))
            if self.case.credit == "return":
                cost = cost.sum(1, keepdim=True)
            elif self.case.credit == "to-go":
                cost = cost.flip(1).cumsum(1).flip(1)
        else:
            cost = cost[:, None]
        score = torch.where(mask > 0, cost * fields["logp"], torch.zeros((), dtype=mask.dtype)).sum(1).mean()
        return (score + self.reduced(out, mask) if placement == "both" else score), logged

    @staticmethod
    def reduced(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if out.dim() == 2:
            out = torch.where(mask > 0, out, torch.zeros((), dtype=out.dtype)).sum(1)
        return out.mean() if out.dim() == 1 else out

    def gradient(
        self, instance: Instance, rows: Sequence[int], beta: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, float | None]:
        fields, index = instance.fields(rows, self.case.group_size)
        if self.case.placement == "shaped-reward" or (not self.coefficient and self.reads & {"reward", "advantage"}):
            fields["reward"], fields["advantage"] = fields["reward"] * 0, fields["advantage"] * 0
        scalar, logged = self.outcome(fields, beta)
        if not scalar.requires_grad:
            return torch.zeros_like(fields["logits"]), index, logged
        (gradient,) = torch.autograd.grad(scalar, fields["logits"], allow_unused=True)
        return torch.zeros_like(fields["logits"]) if gradient is None else gradient, index, logged

    def batch(self, instance: Instance, rows: Sequence[int], beta: float | None = 1.0) -> torch.Tensor:
        """The KL part of the gradient of one batch, in the shape of the tables."""
        total = torch.zeros(instance.policy.shape, dtype=torch.float64)
        needs_zero = self.coefficient and beta is not None and self.case.placement == "loss"
        for b, sign in ((beta, 1.0), (0.0, -1.0)) if needs_zero else ((beta, 1.0),):
            gradient, index, _ = self.gradient(instance, rows, b if self.coefficient else None)
            total.index_put_((index,), sign * gradient.double(), accumulate=True)
        return total / (beta if needs_zero and beta else 1.0)

    def decide_coefficient(self, instance: Instance) -> None:
        """β is a coefficient only where the gradient is affine in it."""
        if not self.coefficient:
            return
        size = self.case.group_size or 1
        rows = [i % len(instance.rollouts) for i in range(size)] if size > 1 else [len(instance.rollouts) // 2]
        points = [self.gradient(instance, rows, b)[0] for b in (0.0, 0.5, 1.0, 2.0)]
        slope = points[2] - points[0]
        bent = [p - points[0] - b * slope for p, b in zip(points, (0, 0.5, 1, 2), strict=True)]
        self.coefficient = max(float(x.abs().nan_to_num(9).max()) for x in bent) < self.case.tolerance


def batches(instance: Instance, size: int, most: int = 700) -> list[tuple[float, tuple[int, ...]]]:
    """Every batch with its probability: as ordered tuples, else as multisets in all their cyclic shifts."""
    p = instance.probability.tolist()
    rows = range(len(p))
    if len(p) ** size <= most:
        return [(math.prod(p[i] for i in b), b) for b in itertools.product(rows, repeat=size)]
    found = []
    for b in itertools.combinations_with_replacement(rows, size):
        ways = math.factorial(size) // math.prod(math.factorial(b.count(i)) for i in rows)
        weight = ways * math.prod(p[i] for i in b) / size
        found += [(weight, b[k:] + b[:k]) for k in range(size)]
    return found


def expected(loss: Loss, instance: Instance, size: int = 1) -> torch.Tensor:
    total = sum(p * loss.batch(instance, b) for p, b in batches(instance, size))
    return instance.chain(total)  # type: ignore[arg-type]


def compare(gradient: torch.Tensor, target: torch.Tensor, scale: float) -> float:
    """Relative distance from scale·target; infinite where anything is not finite."""
    distance = (gradient - scale * target).norm() / (abs(scale) * target.norm())
    return float(distance) if torch.isfinite(gradient).all() else math.inf


def projected(gradient: torch.Tensor, target: torch.Tensor) -> float:
    return float((gradient * target).sum() / (target * target).sum())


LONG = (0, 5, 10, 19, 42, 61)
ORDINARY = {
    "bandit": Environment(3, 1),
    "sequence": Environment(2, 3),
    "ragged": Environment(3, 3, end=True, padding=1),
    "padded": Environment(2, 3, end=True, padding=5, seed=3),
}
FAR = {
    "long": Environment(2, 64, free=LONG, padding=2),
    "long and ragged": Environment(2, 64, free=LONG, end=True, padding=2),
    "far reference": Environment(2, 2, reference=9.0),
}
STALE = {
    "stale": Environment(2, 3, stale=True),
    "stale and ragged": Environment(3, 3, end=True, padding=2, stale=True),
    "far sampler": Environment(2, 2, stale=True, sampler=5.0),
    "long and stale": Environment(2, 64, free=LONG, end=True, padding=2, stale=True),
}
GROUPS = {
    "bandit": Environment(2, 1, binary=True),
    "sequence": Environment(2, 2, binary=True),
    "ragged": Environment(2, 2, end=True, padding=3, binary=True),
    "long": Environment(2, 64, free=(2, 42), end=True, padding=1, binary=True),
    "far reference": Environment(2, 1, reference=9.0, binary=True),
}
PAIR = Environment(2, 2, free=(0,), end=True, padding=2)  # two rollouts, of one token and of two


def with_stale(environments: dict[str, Environment]) -> dict[str, Environment]:
    return {f"{name} and stale": dataclasses.replace(e, stale=True) for name, e in environments.items()}


def reached(reach: dict[str, float]) -> tuple[Environment, int | None]:
    """The environment, and the batch size if one is asked for, that lies as far out as a defect does."""
    if "tokens" in reach:
        n = int(reach["tokens"])
        return Environment(2, n + 3, free=(0, 1, n, n + 1, n + 2), padding=1), None
    if "rows" in reach:
        return PAIR, int(reach["rows"])
    if "padding" in reach:
        return dataclasses.replace(ORDINARY["ragged"], padding=int(reach["padding"])), None
    far = Environment(2, 2, padding=1, reference=float(reach.get("reference", 0)))
    return dataclasses.replace(far, sampler=float(reach.get("sampler", 0)), stale="sampler" in reach), None


def moves_with_sampler(loss: Loss, size: int) -> bool:
    """Whether the KL part depends on the sampler's log-probs."""
    if not {"old_logp", "old_logits"} & loss.reads:
        return False
    one, two = Instance(Environment(2, 2)), Instance(Environment(2, 2))
    two.taken[2] = two.taken[2] - 0.3
    two.call_tables[2] = two.call_tables[2] - 0.3
    rows = [i % 4 for i in range(1, size + 1)]
    before, after = loss.batch(one, rows), loss.batch(two, rows)
    return bool((after - before).norm() > 1e3 * loss.case.tolerance * before.norm())


def non_additive(loss: Loss, units: int, size: int) -> dict[str, float]:
    """Distance of one batch's gradient from the mean, and from the sum, of the gradients of its units."""
    instance = Instance(Environment(2, 3, end=True, padding=2))
    generator = torch.Generator().manual_seed(units)
    rows = torch.randint(0, len(instance.rollouts), (units * size,), generator=generator).tolist()
    whole = loss.batch(instance, rows)
    parts = torch.stack([loss.batch(instance, rows[k : k + size]) for k in range(0, len(rows), size)]).sum(0)
    errors = {
        "mean": (whole - parts / units).norm() / (parts / units).norm(),
        "sum": (whole - parts).norm() / parts.norm(),
    }
    return {k: float(e) if torch.isfinite(e) else math.inf for k, e in errors.items()}


def logged_value(loss: Loss) -> str | None:
    """Which exact KL value the logged metric has in expectation in every environment; "" none, None not logged."""
    possible = {"kl", "kl_per_token", "mean_of_token_means"}
    for name in ("sequence", "ragged", "padded"):
        instance, total = Instance(ORDINARY[name]), 0.0
        for p, rows in batches(instance, 1):
            value = loss.gradient(instance, rows, 1.0 if loss.coefficient else None)[2]
            if value is None:
                return None
            total += p * value
        possible &= {k for k, v in instance.kl_values().items() if abs(total - v) < 1e-6 * abs(v)}
    return min(possible, default="")


class Examination:
    """A loss in all the environments that its label rests on."""

    def __init__(self, function: Callable[..., Any], case: Any):
        self.case, self.loss = case, Loss(function, case)
        self.size = case.batch_size or case.group_size or 1
        self.ordinary = ORDINARY if self.size == 1 else {k: GROUPS[k] for k in ("bandit", "sequence", "ragged")}
        self.loss.decide_coefficient(Instance(self.ordinary["ragged"]))
        stale = {k: STALE[k] for k in ("stale", "stale and ragged")} if self.size == 1 else with_stale(self.ordinary)
        self.off_policy = case.sampler in ("stale", "both")
        if case.sampler is None:
            self.off_policy = moves_with_sampler(self.loss, self.size)
        if case.sampler == "stale":
            self.ordinary = stale
        elif self.off_policy:
            self.ordinary = self.ordinary | stale
        self.scale = self.find_scale()

    def find_scale(self) -> float:
        """The constant that the loss is allowed: any without a coefficient, that of the reward term with one."""
        instance = Instance(next(iter(self.ordinary.values())))
        if not self.loss.coefficient:
            scale = projected(expected(self.loss, instance, self.size), instance.target(self.case.expect))
            return scale if abs(scale) > 1e-12 else 1.0
        if self.case.placement != "loss":
            return 1.0
        total = torch.zeros(instance.policy.shape, dtype=torch.float64)
        for p, rows in batches(instance, self.size):
            gradient, index, _ = self.loss.gradient(instance, rows, 0.0)
            total.index_put_((index,), p * gradient, accumulate=True)
        reward, gradient = -instance.target("expected_reward"), expected(self.loss, instance, self.size)
        scale = projected(instance.chain(total), reward)
        if scale <= 0 or compare(instance.chain(total), reward, scale) > self.case.tolerance:
            return 1.0
        target = instance.target(self.case.expect)
        return min((1.0, scale), key=lambda c: compare(gradient, target, c))

    def error(self, e: Environment, rows: int | None = None, dtype: torch.dtype = torch.float64) -> float:
        """Distance of the expected gradient from scale·target, where a sum over the rows is divided out."""
        instance, rows = Instance(e, dtype), rows or self.size
        gradient, target = expected(self.loss, instance, rows), instance.target(self.case.expect)
        return min(compare(gradient, target, self.scale), compare(gradient, target, self.scale * rows / self.size))

    def near(self) -> dict[str, float]:
        if self.scale < 0:
            return {"sign": 2.0}
        return {name: self.error(e) for name, e in self.ordinary.items()}

    def far(self) -> dict[str, float]:
        environments = dict(FAR) if self.size == 1 else {k: GROUPS[k] for k in ("long", "far reference")}
        if self.off_policy and self.size == 1:
            far = {k: STALE[k] for k in ("far sampler", "long and stale")}
            environments = far if self.case.sampler == "stale" else environments | far
        return {name: self.error(e) for name, e in environments.items()}

    def batched(self, units: Sequence[int]) -> dict[str, float]:
        """Mean or sum over its rows or groups at every size: then the expectation of one is that of the batch."""
        found = [non_additive(self.loss, n, self.size) for n in units]
        return {
            str(n): e
            for n, e in zip(units, min(([f[k] for f in found] for k in ("mean", "sum")), key=max), strict=True)
        }


def not_finite(loss: Loss, instance: Instance, row: int) -> bool:
    gradient, _, _ = loss.gradient(instance, [row], 1.0 if loss.coefficient else None)
    return not bool(torch.isfinite(gradient).all())


def nan_from_masked(loss: Loss, size: int) -> bool:
    """Whether NaN at masked positions gets into what is returned or into a gradient, padded positions included."""
    rows = [0, 3, 0, 3][: max(size, 2)]
    fields, _ = Instance(ORDINARY["ragged"]).fields(rows, None)
    live = fields["mask"] > 0
    for name in ("logp", "ref_logp", "old_logp", "logits", "ref_logits", "old_logits"):
        keep = live if fields[name].dim() == 2 else live[..., None]
        fields[name] = torch.where(keep, fields[name].detach(), torch.nan).requires_grad_("_" not in name)
    out = loss.function(**loss.arguments(fields, 1.0))
    out = out["loss"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else getattr(out, "loss", out)
    leaves = [fields["logp"], fields["logits"]]
    found = [out, *torch.autograd.grad(out.sum(), leaves, allow_unused=True)] if out.requires_grad else [out]
    return any(bool(x.isnan().any()) for x in found if x is not None)


def mutates(loss: Loss, size: int) -> bool:
    """Whether a tensor that was handed in is another afterwards."""
    fields, _ = Instance(ORDINARY["ragged"]).fields([0, 3, 0, 3][: max(size, 2)], size)
    before = {k: v.detach().clone() for k, v in fields.items()}
    loss.outcome(fields, 1.0)
    return any(not torch.equal(v, fields[k].detach()) for k, v in before.items())


def judge(function: Callable[..., Any], case: Any) -> dict[str, Any]:
    """Assert what the row says of the loss, and return the numbers."""
    x, tolerance = Examination(function, case), case.tolerance
    near, logged, float32 = x.near(), logged_value(x.loss) if x.size == 1 else None, 0.0
    evidence: dict[str, Any] = {"scale": x.scale, "near": near, "logged": logged}
    silent = max(near.values())
    assert not case.right or silent < case.tolerance, evidence
    if case.right or "float32" in case.reach:
        float32 = x.error(next(e for k, e in x.ordinary.items() if "ragged" in k), dtype=torch.float32)
        evidence["float32"] = float32
    if case.right:
        far, batched = x.far(), x.batched((2, 3, 4, 5, 8, 9, 16, 17, 32) if x.size == 1 else (2, 3, 5, 8))
        evidence |= {"far": far, "batches": batched}
        assert x.scale > 0, evidence
        assert max([silent, *far.values(), *batched.values()]) < tolerance, evidence
        assert float32 < 1e-4, evidence
        assert logged != "", evidence
        assert not mutates(x.loss, x.size)
        assert "KL502" not in case.forbidden or not nan_from_masked(x.loss, x.size)
        return evidence
    code = min(case.codes)
    beside = case.defect in ("logged value", "input mutated")  # the gradient itself is right
    if case.level == "error" and not case.reach and not beside:
        assert silent > 1e-3, evidence
        return evidence
    assert silent < tolerance, evidence
    if case.defect == "logged value":
        assert logged == "", evidence
    elif code == "KL505":
        assert mutates(x.loss, x.size)
    elif "float32" in case.reach:
        low, high = (1e-4, 1e-2) if case.level == "warning" else (1e-2, math.inf)
        assert low < float32 < high, evidence
    elif code == "KL206" and case.level == "warning":
        size = int(case.reach.get("rows", 8))
        evidence["sizes"] = {n: x.error(PAIR, n) for n in (2, 4, size)}
        evidence["cut"] = min(non_additive(x.loss, size, 1).values())
        assert max(evidence["sizes"].values()) < tolerance, evidence
        assert evidence["cut"] > 1e-2, evidence
    elif code == "KL502":
        assert nan_from_masked(x.loss, x.size)
    elif code == "KL503":
        assert not_finite(x.loss, Instance(Environment(2, 1, reference=900.0)), 0)
    else:
        environment, rows = reached(case.reach)
        evidence["reached"] = x.error(environment, rows)
        assert evidence["reached"] > 1e-3, evidence
    return evidence

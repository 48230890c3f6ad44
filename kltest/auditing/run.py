"""Audits of a loss on a real model: units are added until the verdict is clear, or there are no more."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from kltest.auditing.named import Part, columns_of
from kltest.auditing.passes import Models, measure
from kltest.auditing.report import Audit, NamedRow
from kltest.errors import KltestError, UsageError
from kltest.grading.options import Options
from kltest.identify.graded import kl_part
from kltest.identify.instances import instances
from kltest.language_models.generation import Rollouts
from kltest.loss.callables import name_of
from kltest.loss.global_state import preserved
from kltest.loss.resolve import resolve
from kltest.moments.reduction import probe
from kltest.report import Verdict
from kltest.rollout import Rollout
from kltest.samples.blocks import HEAVY, Blocks, Sample, angle, coefficient, misfit, norm
from kltest.samples.fits import distance, nearest
from kltest.samples.sketch import SIZE, Sketch
from kltest.truth import counts_alone, of_support, plain
from kltest.truth.next_tokens import is_of_next_tokens
from kltest.version import versions

UNITS = 256
FIRST_LOOK = 16
LEAST = 8
# A prefix weight is hopeless if it leaves fewer effective rollouts than this share of all.
EFFECTIVE = 0.1
# A cosine that is printed as more than 1.
SEEN = 1.0005
TOO_SHORT = "may be too short"
# A narrower interval is one of rounding.
ROUNDING = 1e-3


class Auditing:
    """One audit as far as it has come."""

    def __init__(self, loss: Any, models: Models, options: Options, size: int = SIZE, units: int = UNITS) -> None:
        self.options, self.models, self.most = options, models, units
        with preserved():
            self.loss = kl_part(
                resolve(loss, options.call, options.name), options.expect, options.seed, options.group_size
            )
        self.name = options.name or (loss if isinstance(loss, str) else name_of(loss))
        self.sketch = Sketch(models.policy.language.model, size, options.seed)
        self.looks = max(1, math.ceil(math.log2(max(units, FIRST_LOOK) / FIRST_LOOK)) + 1)
        self.names: dict[str, tuple[Part, ...]] = {}
        self.parts: list[Part] = []
        self.blocks = Blocks()
        self.units, self.rollouts = 0, 0
        self.weights: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.facts: Counter[str] = Counter()
        self.misfits: Counter[float] = Counter()
        self.controls = range(0)
        self.stale, self.divisor, self.largest_gap, self.began = False, 1.0, 0.0, time.monotonic()

    def over(self, source: Iterable[Rollouts], progress: Callable[[int], None] = lambda units: None) -> Audit:
        """Add units until the verdict is clear or there are no more, and return the report."""
        found = None
        with self.sketch.listening(), preserved(self.options.seed):
            for rollouts in islice(source, self.most):
                self.add(rollouts)
                progress(self.units)
                if self.units >= FIRST_LOOK and self.units & (self.units - 1) == 0 and self.units < self.most:
                    found = self.report()
                    if found.verdict != "inconclusive" and not (found.follows and found.follows.rivals):
                        return found
        return self.report()

    def add(self, rollouts: Rollouts) -> None:
        """Measure one unit."""
        if not self.names:
            self._begin(rollouts)
        unit = measure(self.loss, self.models, rollouts, self.parts, self.sketch, divisor=self.divisor)
        self.units, self.rollouts = self.units + 1, self.rollouts + len(rollouts)
        at, gap = unit.tokens, (unit.tokens.logp - unit.tokens.old_logp).abs()
        ratio = at.ref_logp - at.old_logp, at.logp - at.old_logp, 2 * at.logp - at.old_logp - at.ref_logp
        for kind, logs in zip(("reference", "policy", "square"), ratio, strict=True):
            self.weights[kind].append(logs.sum(1).cpu())
        ended = rollouts.ended(self.models.policy.language.end)
        if len(rollouts) > 1 and not self.stale:
            self.facts.update({"kl_variance": float(at.summed_kl.double().var()), "varied": 1.0})
        counts = {"tokens": float(at.live.sum()), "gap": float(gap.sum()), "ended": float(ended.sum())}
        self.facts.update({**counts, **unit.facts})
        self.misfits.update(unit.misfits)
        self.largest_gap = max(self.largest_gap, float(gap.max()))
        self.blocks.add(unit.vectors.numpy())

    def _begin(self, rollouts: Rollouts) -> None:
        """Learn from the first unit which named gradients there are, and if the loss sums over rollouts."""
        self.stale = self.models.sampler is not None or rollouts.old_logp is not None
        full = self.models.sampler is not None
        rewarded = rollouts.reward is not None
        self.names, self.parts, self.controls = columns_of(
            stale=self.stale, full=full, rewarded=rewarded, further=self._further(rollouts)
        )
        if self._sums():
            self.divisor = float(len(rollouts))
            self.loss = self.loss.changed("It sums over rollouts: its gradient was divided by their number")

    def _further(self, rollouts: Rollouts) -> list[str]:
        """Return divergences of next-token distributions: of the loss's support, and those that are declared."""
        names = [name.partition("@")[0] for name in self.options.expect]
        found = [name for name in names if is_of_next_tokens(name)]
        if (support := self.loss.support) is not None:
            k = support.k if rollouts.topk_ids is None else rollouts.topk_ids.shape[-1]
            side = "top" if support.of or rollouts.topk_ids is not None else "own"
            found += [name for name in of_support(k, support.of) if f"_{side}{k}" in name]
        return list(dict.fromkeys(found))

    def _sums(self) -> bool:
        """True if the loss is a sum over the rollouts of a batch, as it shows where `kltest grade` looks."""
        base = Rollout.of(instances("sequence", self.options.seed)[0])
        try:
            with preserved():
                return probe(self.loss, base, np.random.default_rng(0)).reduction == "sum"
        except KltestError:
            return False

    def vector(self, combination: Mapping[str, float]) -> np.ndarray:
        """Return a combination of named gradients as one of the sketched vectors (2 + parts,)."""
        found = np.zeros(2 + len(self.parts))
        for name, scale in combination.items():
            if name != "zero":
                if name not in self.names:
                    raise UsageError(
                        f"--expect {name}: it cannot be estimated on these rollouts, only {', '.join(self.names)}"
                    )
                for part in self.names[name]:
                    found[2 + self.parts.index(part)] += scale
        return found

    def report(self) -> Audit:
        """Return what can be said of the units so far."""
        options, sample = self.options, Sample(self.blocks.vectors).controlled(self.controls)
        rate = options.error_rate / (2 * self.looks)
        raw, own = np.eye(2 + len(self.parts))[:2]
        declared, columns = self.vector(options.expect), {name: self.vector({name: 1.0}) for name in self.names}
        unit = declared if declared.any() else columns["reverse_kl"]
        hopeless = self._hopeless()
        each = rate / (3 * len(columns) + 5)
        rows = [self._row(sample, own, name, column, each, hopeless.get(name, "")) for name, column in columns.items()]
        usable = {row.name: columns[row.name] for row in rows if row.coefficient is not None}
        away = distance(sample, own - declared, unit, np.stack([*usable.values(), unit]), self.controls, rate)
        follows = None
        # What is refuted stands in no other name's place.
        preferred = () if away.low > options.margin else tuple(options.expect)
        if sample.interval(norm(own), each).low > 0 and usable:
            names = {name: column for name, column in usable.items() if not counts_alone(name)}
            follows = nearest(sample, own, names, each, options.margin, declared=preferred)
        missed = None
        if "reverse_kl" in usable:
            later = columns["future_reverse_kl"], columns["reverse_kl"]
            missed = distance(sample, *later, np.stack([*usable.values()]), self.controls, each)
        row = self._row(sample, own, plain(options.expect), unit, each)
        verdict: Verdict = "refuted" if away.low > options.margin else "inconclusive"
        if away.high <= options.margin:
            verdict = "confirmed"
        notes = self.loss.notes
        if TOO_SHORT in row.note:
            notes.append(f"The interval of the declared gradient {row.note}; draw more (--units)")
        unknown = [name for name in options.expect if name in hopeless]
        if unknown:
            verdict = "inconclusive"
            notes.append(f"Nothing can be said of the distance from {unknown[0]}: {hopeless[unknown[0]]}")
        if verdict == "refuted" and not self.loss.takes_beta and row.coefficient and row.coefficient.low > 0:
            left = sample.interval(misfit(own, unit[None]), rate)
            if left.high <= options.margin**2:
                verdict = "inconclusive"
                notes.append(
                    f"It takes no coefficient and agrees up to a factor of {row.coefficient.value:.3g}; `kltest grade` "
                    "tells if that factor is the same for all lengths and batches"
                )
        noise, size = (float(x @ sample.noise @ x) * self.blocks.each for x in (raw - declared, raw))
        signal, square = float(norm(own)(sample.products)), float(norm(own - declared)(sample.products))
        undecided = verdict == "inconclusive" and not unknown
        return Audit(
            target=self.name,
            expect=plain(options.expect),
            verdict=verdict,
            error_rate=options.error_rate,
            margin=options.margin,
            seed=options.seed,
            models={},
            units=len(sample) * self.blocks.each,
            rollouts=self.rollouts,
            tokens=int(self.facts["tokens"]),
            parameters=self.sketch.parameters,
            named=rows,
            follows=follows,
            declared=row,
            distance=away,
            missed=missed,
            sketch_error=self.sketch.error,
            signal_to_noise=signal * self.units / size if size > 0 else math.inf,
            crossing=noise / square * self.rollouts / self.units if away.low > 0 else None,
            needed=self._needed(sample, own - declared, unit) if undecided else None,
            facts=self._facts(),
            notes=notes,
            versions=versions(torch),
            seconds=time.monotonic() - self.began,
        )

    def _row(
        self, sample: Sample, own: np.ndarray, name: str, column: np.ndarray, rate: float, note: str = ""
    ) -> NamedRow:
        if note:
            return NamedRow(name, note=note)
        if sample.interval(norm(column), rate).low <= 0:
            return NamedRow(name, note="not distinguishable from zero")
        found = sample.interval(coefficient(own, column), rate)
        if sample.interval(norm(own), rate).low <= 0:
            return NamedRow(name, found, note="the loss's gradient is not distinguishable from zero: no direction")
        near, carry = angle(sample, own, column, rate), sample.effective(coefficient(own, column))
        notes = ["above 1 by noise"] * (near.value > SEEN)
        if found.width > ROUNDING and carry < HEAVY * len(sample):
            notes.append(f"{TOO_SHORT}: {carry:.0f} of {len(sample)} blocks of prompts carry the noise")
        return NamedRow(name, found, near, "; ".join(notes))

    def _hopeless(self) -> dict[str, str]:
        """Reasons, by name, why a named gradient that needs weights of whole rollouts is not estimated."""
        found: dict[str, str] = {}
        names = {"reference": ["forward_kl"], "square": ["chi_square"]}
        # Under a sampler, prefixes of the policy are weighted by its ratios.
        names["policy"] = [name for name, parts in self.names.items() if any(part.at == "" for part in parts)]
        for kind, weighted in names.items():
            weights = torch.cat(self.weights[kind]).double().softmax(0)
            effective = float(1 / (weights**2).sum())
            if effective < EFFECTIVE * self.rollouts:
                note = f"weights leave {effective:.0f} of {self.rollouts} rollouts: not estimated"
                found |= {name: note for name in weighted if name not in found}
        return found

    def _needed(self, sample: Sample, d: np.ndarray, unit: np.ndarray) -> int | None:
        """Number of units that may decide if ‖E d‖ is within the margin."""
        (square, error), bound = sample.estimate(norm(d)), self.options.margin**2 * float(norm(unit)(sample.products))
        gap = abs(square - bound)
        if gap == 0 or not math.isfinite(error):
            return None
        ratio: float = max(3.5 * error / gap, 1.0)
        more = self.units * (ratio if square < bound else ratio**2)
        return math.ceil(more) if more > self.units else 2 * self.units

    def _facts(self) -> dict[str, float | None]:
        facts, misfits = self.facts, self.misfits
        best = min(misfits, key=misfits.__getitem__) if misfits else None
        return {
            "padded_share": math.sqrt(facts["padded"] / facts["all"]) if facts.get("all") else 0.0,
            "truncated": 1 - facts["ended"] / self.rollouts,
            "kl_variance": facts["kl_variance"] / facts["varied"] if facts["varied"] else None,
            "mean_gap": facts["gap"] / facts["tokens"] if misfits else None,
            "largest_gap": self.largest_gap if misfits else None,
            "temperature": best and best * self.models.temperature,
        }

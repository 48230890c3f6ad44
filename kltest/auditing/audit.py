"""Audits of a loss on a real model: units are added until the verdict is clear, or there are no more."""

import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from kltest import __version__
from kltest.auditing.models import PROMPTS, as_language
from kltest.auditing.named import Part, controls_of, parts_of
from kltest.auditing.passes import CutModel, Models, measure
from kltest.auditing.report import Audit, Row
from kltest.auditing.sketch import SIZE, Sketch
from kltest.auditing.statistics import Sample, angle, coefficient, distance, misfit, nearest, norm
from kltest.auditing.units import drawn, of_batch
from kltest.errors import KltestError, UsageError
from kltest.grading.grader import resolved
from kltest.grading.options import Options
from kltest.identify.identification import ALONE
from kltest.identify.instances import instances
from kltest.identify.uses import kl_part
from kltest.language_models.generation import Rollouts
from kltest.language_models.language import LanguageModel
from kltest.loss.callables import name_of
from kltest.loss.global_state import preserved
from kltest.moments.reduction import probe
from kltest.report import Verdict
from kltest.rollout import Rollout
from kltest.truth import plain

UNITS = 256
# Blocks of units that are kept; with more, pairs of them are averaged.
MOST_BLOCKS = 64
FIRST_LOOK = 16
LEAST = 8
# A prefix weight is hopeless if it leaves fewer effective rollouts than this share of all.
EFFECTIVE = 0.1
# A cosine that is printed as more than 1.
SEEN = 1.0005
# Log-probs of one policy in two programs differ by less than this if both compute in float32.
SAME = 1e-4


def audit(
    loss: Callable[..., Any] | str,
    model: nn.Module | LanguageModel,
    ref: nn.Module | LanguageModel,
    batch: Any = None,
    *,
    sampler: nn.Module | LanguageModel | None = None,
    prompts: Sequence[str] = (),
    units: int = UNITS,
    expect: str | Mapping[str, float] = "reverse_kl",
    placement: str | None = None,
    credit: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    beta: float | None = None,
    error_rate: float = 0.01,
    margin: float = 0.05,
    seed: int = 0,
    group_size: int = 4,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    sketch: int = SIZE,
    name: str | None = None,
    models: Mapping[str, str | None] | None = None,
    progress: Callable[[int], None] = lambda units: None,
) -> Audit:
    """Measure the gradient that a loss follows on a language model, and compare it with the named gradients.

    The loss is called on rollouts as `kltest.grade` calls it; its gradient at the log-probs is pulled back through the
    model. The model's own gradients (`.grad`), mode and random numbers are left as they were.

    Args:
        loss: A callable, or a text as for `kltest.grade`.
        model: The policy: a causal model as of Hugging Face, or a LanguageModel.
        ref: The reference, of the same vocabulary.
        batch: Rollouts, or a mapping of tensors with prompt_ids (B, P) and completion_ids (B, T), perhaps prompt_mask,
            completion_mask, old_per_token_logps (B, T), rewards (B,) and group (B,); or a list of them. None: rollouts
            are drawn for `prompts`.
        sampler: The policy that drew the rollouts, if it is another one.
        prompts: Texts to draw rollouts for; the model must then be a LanguageModel.
        units: Most prompts, each with its rollouts, that are drawn.
        expect: The gradient that is claimed, or a combination.
        placement: Position of the term: loss, reward, shaped-reward or both.
        credit: What a token in the reward is credited with: return, to-go or immediate.
        arguments: Arguments of the loss by name.
        beta: Coefficient of the KL part, passed to the loss.
        error_rate: Highest probability that anything in the report is wrong.
        margin: Largest distance from the declared gradient, as a share of its norm, that is confirmed.
        seed: Seed of the rollouts and of the sketch.
        group_size: Rollouts of a prompt.
        max_new_tokens: Longest rollout.
        temperature: Divisor of the logits of all models.
        sketch: Numbers that are kept of each gradient.
        name: The name of the loss in the report.
        models: The names of model, ref and sampler in the report.
        progress: Called with the number of units after each.

    Returns:
        An Audit: `verdict`, `follows`, `named`, `scalars()` for a log, `to_json()`.

    Raises:
        UsageError: An option, the loss or the batch cannot be used.
        TargetError: The loss fails.
    """
    given = {"expect": expect, "placement": placement, "credit": credit, "arguments": arguments, "beta": beta}
    options = Options.of(**given, error_rate=error_rate, margin=margin, seed=seed, group_size=group_size, name=name)
    policy, reference = as_language(model), as_language(ref)
    drawing = None if sampler is None else as_language(sampler)
    if batch is not None:
        found = of_batch(batch, policy, group_size)
        source: Iterable[Rollouts] = found
        units = min(units, len(found))
        if units < LEAST:
            raise UsageError(f"{units} prompts with rollouts are too few for intervals; give at least {LEAST}")
    else:
        texts = list(prompts) or PROMPTS
        source = drawn(
            drawing or policy,
            texts,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
    with _still(policy, reference, drawing):
        third = None if drawing is None else CutModel(drawing)
        run = Auditing(loss, Models(CutModel(policy), CutModel(reference), third, temperature), options, sketch, units)
        return replace(run.over(source, progress), models=dict(models or {}))


class Auditing:
    """One audit as far as it has come."""

    def __init__(self, loss: Any, models: Models, options: Options, size: int = SIZE, units: int = UNITS) -> None:
        self.options, self.models, self.most = options, models, units
        with preserved():
            self.loss = kl_part(resolved(loss, options), options.expect, options.seed, options.group_size)
        self.name = options.name or (loss if isinstance(loss, str) else name_of(loss))
        self.sketch = Sketch(models.policy.language.model, size, options.seed)
        self.looks = max(1, math.ceil(math.log2(max(units, FIRST_LOOK) / FIRST_LOOK)) + 1)
        self.names: dict[str, tuple[Part, ...]] = {}
        self.parts: list[Part] = []
        self.blocks, self.filled = np.empty(0), 0
        self.partial: list[torch.Tensor] = []
        self.each, self.units, self.rollouts = 1, 0, 0
        self.weights: dict[str, list[torch.Tensor]] = {"reference": [], "policy": [], "square": []}
        self.facts: dict[str, float] = {}
        self.misfits: dict[float, float] = {}
        self.controls = range(0)
        self.divisor, self.began = 1.0, time.monotonic()

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
        at, drawn = unit.tokens, unit.tokens.old_logp.sum(1)
        self.weights["reference"].append((at.ref_logp.sum(1) - drawn).cpu())
        self.weights["policy"].append((at.logp.sum(1) - drawn).cpu())
        self.weights["square"].append((at.logp.sum(1) - drawn + at.total).cpu())
        gap = (at.logp - at.old_logp).abs()
        counts = {"tokens": float(at.live.sum()), "gap": float(gap.sum()), **unit.facts}
        ended = torch.isin(rollouts.tokens, torch.tensor(self.models.policy.language.end, device=gap.device))
        counts["ended"] = float((ended & rollouts.mask).any(1).sum())
        for key, value in counts.items():
            self.facts[key] = self.facts.get(key, 0.0) + value
        self.facts["largest gap"] = max(self.facts.get("largest gap", 0.0), float(gap.max()))
        for divisor, misfit_there in unit.misfits.items():
            self.misfits[divisor] = self.misfits.get(divisor, 0.0) + misfit_there
        self.partial.append(unit.vectors)
        if len(self.partial) == self.each:
            if self.filled == MOST_BLOCKS:
                for half in range(MOST_BLOCKS // 2):
                    self.blocks[half] = (self.blocks[2 * half] + self.blocks[2 * half + 1]) / 2
                self.filled, self.each = MOST_BLOCKS // 2, 2 * self.each
                return
            self.blocks[self.filled] = torch.stack(self.partial).mean(0).numpy()
            self.filled, self.partial = self.filled + 1, []

    def _begin(self, rollouts: Rollouts) -> None:
        """Learn from the first unit which named gradients there are, and if the loss sums over rollouts."""
        stale = self.models.sampler is not None or rollouts.old_logp is not None
        full = self.models.sampler is not None
        self.names = parts_of(stale=stale, full=full, rewarded=rollouts.reward is not None)
        named = dict.fromkeys(part for parts in self.names.values() for part in parts)
        controls = controls_of(stale=stale, full=full)
        self.parts = [*named, *controls]
        self.controls = range(2 + len(named), 2 + len(self.parts))
        if self._sums():
            self.divisor = float(len(rollouts))
            self.loss.notes.append("It sums over rollouts: its gradient was divided by their number")
        # Memory is taken when a block is written.
        shape = (MOST_BLOCKS, 2 + len(self.parts), self.sketch.size)
        self.blocks = np.empty(shape, np.float64 if self.sketch.dtype == torch.float64 else np.float32)

    def _sums(self) -> bool:
        """True if the loss is a sum over the rollouts of a batch, as it shows where `kltest grade` looks."""
        base = Rollout.of(instances("sequence", self.options.seed)[0])
        try:
            with preserved():
                return probe(self.loss, base, np.random.default_rng(0), few=True).reduction == "sum"
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
        options, sample = self.options, Sample(self.blocks[: self.filled]).controlled(self.controls)
        rate = options.error_rate / (2 * self.looks)
        raw, own = np.eye(2 + len(self.parts))[:2]
        truth = self.vector({"reverse_kl": 1.0})
        declared = self.vector(options.expect)
        columns = {name: self.vector({name: 1.0}) for name in self.names}
        hopeless = self._hopeless()
        each = rate / (3 * len(columns) + 4)
        rows = [self._row(sample, own, name, column, each, hopeless.get(name, "")) for name, column in columns.items()]
        usable = {row.name: columns[row.name] for row in rows if row.coefficient is not None}
        follows = None
        if sample.interval(norm(own), each).low > 0 and usable:
            follows = nearest(sample, own, {n: c for n, c in usable.items() if n not in ALONE}, each, options.margin)
        d, unit = own - declared, declared if declared.any() else truth
        named = np.stack([*usable.values(), unit])
        away = distance(sample, d, unit, named, self.controls, rate)
        row = self._row(sample, own, plain(options.expect), unit, each)
        verdict: Verdict = "confirmed" if away.high <= options.margin else "inconclusive"
        if away.low > options.margin:
            verdict = "refuted"
        notes = list(self.loss.notes)
        if verdict == "refuted" and not self.loss.takes_beta and row.coefficient and row.coefficient.low > 0:
            share = sample.interval(misfit(own, unit[None]), rate)
            if share.high <= options.margin**2:
                verdict = "inconclusive"
                notes.append(
                    f"It takes no coefficient and agrees up to a factor of {row.coefficient.value:.3g}; `kltest grade` "
                    "tells if that factor is the same for all lengths and batches"
                )
        square, error = sample.estimate(norm(d))
        noise, size = (float(x @ sample.noise @ x) * self.each for x in (raw - declared, raw))
        signal = float(own @ sample.products @ own)
        return Audit(
            target=self.name,
            expect=plain(options.expect),
            verdict=verdict,
            error_rate=options.error_rate,
            margin=options.margin,
            seed=options.seed,
            models={},
            units=len(sample) * self.each,
            rollouts=self.rollouts,
            tokens=int(self.facts["tokens"]),
            parameters=self.sketch.parameters,
            named=rows,
            follows=follows,
            declared=row,
            distance=away,
            sketch_error=self.sketch.error,
            signal_to_noise=signal * self.units / size if size > 0 else math.inf,
            crossing=noise / square * self.rollouts / self.units if away.low > 0 else None,
            needed=self._needed(square, error, float(unit @ sample.products @ unit), rate, len(sample))
            if verdict == "inconclusive"
            else None,
            facts=self._facts(),
            notes=notes,
            versions={"kltest": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
            seconds=time.monotonic() - self.began,
        )

    def _row(self, sample: Sample, own: np.ndarray, name: str, column: np.ndarray, rate: float, note: str = "") -> Row:
        if note:
            return Row(name, note=note)
        if sample.interval(norm(column), rate).low <= 0:
            return Row(name, note="not told from zero")
        found = Row(name, sample.interval(coefficient(own, column), rate))
        if sample.interval(norm(own), rate).low <= 0:
            return replace(found, note="the loss's gradient is not told from zero: no direction")
        near = angle(sample, own, column, rate)
        return replace(found, cosine=near, note="above 1 by noise" if near.value > SEEN else "")

    def _hopeless(self) -> dict[str, str]:
        """Reasons, by name, why a named gradient that needs weights of whole rollouts is not estimated."""
        found = {}
        for kind, name in (("reference", "forward_kl"), ("square", "chi_square")):
            weights = torch.cat(self.weights[kind]).double().softmax(0)
            effective = float(1 / (weights**2).sum())
            if effective < EFFECTIVE * self.rollouts:
                found[name] = f"weights leave {effective:.0f} of {self.rollouts} rollouts: not estimated"
        return found

    def _needed(self, square: float, error: float, unit: float, rate: float, blocks: int) -> int | None:
        gap = abs(square - self.options.margin**2 * unit)
        if gap == 0 or not math.isfinite(error):
            return None
        ratio = max(3.5 * error / gap, 1.0)
        more = self.units * ratio ** (1 if square < self.options.margin**2 * unit else 2)
        return math.ceil(more) if more > self.units else 2 * self.units

    def _facts(self) -> dict[str, float | None]:
        facts, misfits = self.facts, self.misfits
        best = min(misfits, key=misfits.__getitem__) if misfits else None
        return {
            "padded_share": math.sqrt(facts["padded"] / facts["all"]) if facts.get("all") else 0.0,
            "truncated": 1 - facts["ended"] / self.rollouts,
            "mean_gap": facts["gap"] / facts["tokens"] if misfits else None,
            "largest_gap": facts["largest gap"] if misfits else None,
            "temperature": best and best * self.models.temperature,
        }


class _still:
    """Models in evaluation mode; they are put back into theirs at the end."""

    def __init__(self, *languages: LanguageModel | None) -> None:
        self.models = [one.model for one in languages if one is not None]

    def __enter__(self) -> None:
        self.modes = [(module, module.training) for model in self.models for module in model.modules()]
        for model in self.models:
            model.eval()

    def __exit__(self, *_: object) -> None:
        for module, mode in self.modes:
            module.training = mode

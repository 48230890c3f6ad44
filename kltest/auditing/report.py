"""The result of an audit as plain data: text, and JSON in the schema kltest.audit/1."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

from kltest.errors import KltestError
from kltest.render.tables import PLAIN, Terminal, table
from kltest.report import Published, RefutedError, Verdict
from kltest.samples.blocks import Interval
from kltest.samples.fits import Combination
from kltest.truth import ATLAS


@dataclass(frozen=True)
class NamedRow:
    """Result for one named gradient: c of c·E y nearest to the loss's gradient, and the cosine with it.

    Both are None with the reason in `note` if the named gradient is indistinguishable from zero or not estimated.
    """

    name: str
    coefficient: Interval | None = None
    cosine: Interval | None = None
    note: str = ""


@dataclass(frozen=True)
class Audit(Published):
    """The result of an audit.

    Attributes:
        target, expect: The loss, and the declared gradient.
        verdict: "confirmed", "refuted" or "inconclusive".
        named: A row for each named gradient, in the order of the atlas.
        follows: The nearest short combination; None if nothing can be said.
        declared: The same as a row of `named`, of the declared gradient.
        distance: ‖E d‖/‖E t‖ with d the loss's gradient less the declared one, t.
        missed: ‖future_reverse_kl‖/‖reverse_kl‖, the share of ∇KL(π‖ref) that a token-level term misses at these
            weights; None if ∇KL(π‖ref) is not distinguishable from zero, or not estimated.
        sketch_error: Bound on the standard error that compression adds, as a share of ‖E d‖.
        signal_to_noise: ‖E g‖²·units/tr Cov of the mean over all units.
        crossing: Number of rollouts at which ‖E d‖² overtakes the noise of their mean; None if E d may be zero.
        needed: Number of units that may decide, if it is inconclusive.
        facts: What the rollouts showed, by name.
        notes: Sentences.
    """

    SCHEMA = "kltest.audit/1"
    target: str
    expect: str
    verdict: Verdict
    error_rate: float
    margin: float
    seed: int
    models: dict[str, str | None]
    units: int
    rollouts: int
    tokens: int
    parameters: int
    named: list[NamedRow]
    follows: Combination | None
    declared: NamedRow
    distance: Interval
    missed: Interval | None
    sketch_error: float
    signal_to_noise: float
    crossing: float | None
    needed: int | None
    facts: dict[str, float | None]
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def scalars(self) -> dict[str, float]:
        """Return the numbers for a training log: how the declared gradient is followed, and the noise."""
        found = {"distance": self.distance.value, "signal_to_noise": self.signal_to_noise}
        declared = self.declared
        for name, one in (
            ("cosine", declared.cosine),
            ("coefficient", declared.coefficient),
            ("missed", self.missed),
        ):
            if one is not None:
                found |= one.named(name)
        return found

    def raise_for_failure(self) -> None:
        """Raise RefutedError unless the verdict is confirmed."""
        if self.verdict != "confirmed":
            raise RefutedError(self.to_text()) if self.verdict == "refuted" else KltestError(self.to_text())

    def to_text(self, terminal: Terminal = PLAIN) -> str:
        """Return the report for people."""
        estimated = [row for row in self.named if row.coefficient is not None]
        rows = [[row.name, _shown(row.coefficient), _shown(row.cosine), row.note] for row in estimated]
        heads = ("named gradient", "coefficient", "cosine", "")
        others: dict[str, list[str]] = {}
        for row in self.named:
            if row.coefficient is None:
                others.setdefault(row.note, []).append(row.name)
        lines = [
            *self._first_lines(),
            "",
            *([table(heads, rows, right=heads[1:3], whole=heads[:3], terminal=terminal)] if rows else []),
            *(f"{note[0].upper()}{note[1:]}: {', '.join(names)}." for note, names in others.items()),
            "",
            f"All intervals hold together at {100 * (1 - self.error_rate):g} %. {self.units} prompts, {self.rollouts} "
            f"rollouts, {self.tokens:,} tokens, {self.parameters:,} weights, {self.seconds:.0f} s.",
            *_of_rollouts(self.facts),
            *self.notes,
        ]
        return "\n".join(lines).rstrip() + "\n"

    def _first_lines(self) -> Iterator[str]:
        yield f"{self.verdict.upper()}: {self.target} follows {words(self.follows)}; declared: {self.expect}"
        if self.follows and self.follows.rivals:
            others = ", ".join(" and ".join(one) for one in self.follows.rivals[:4])
            yield f"Not distinguishable from that: {others}."
        distance, margin = _percent(self.distance), f"margin {100 * self.margin:g} %"
        yield f"Distance from the declared gradient: {distance} of its norm; {margin}."
        if self.needed is not None:
            yield f"About {self.needed:,} units may decide (--units)."
        crossing = "" if self.crossing is None else f"; bias overtakes noise at {max(self.crossing, 1):,.0f} rollouts"
        yield f"Signal to noise of these rollouts: {self.signal_to_noise:.3g}{crossing}."
        if self.missed is not None:
            yield f"Share of ∇KL(π‖ref) that a token-level term misses here: {_percent(self.missed)}."


def _of_rollouts(facts: dict[str, float | None]) -> Iterator[str]:
    """Findings in the rollouts, a sentence each."""
    if share := facts["padded_share"]:
        yield f"Padding is not masked: {100 * share:.2g} % of the gradient at log-probs is at padded positions."
    if share := facts["truncated"]:
        yield f"{100 * share:.0f} % of the rollouts have no end token."
    if (variance := facts["kl_variance"]) is not None:
        yield f"Variance of the summed next-token KLs among rollouts of a prompt: {variance:.3g} nats²."
    if facts["mean_gap"] is not None:
        yield (
            f"The sampler's log-probs differ from the model's by {facts['mean_gap']:.2g} on average and "
            f"{facts['largest_gap']:.2g} at most; a temperature of {facts['temperature']:g} fits them best."
        )


def words(follows: Combination | None) -> str:
    """Return a combination in words, as `0.98 [0.95, 1.01]·E_π[Σ_t ∇KL_t(ref‖π)] (local_forward_kl)`."""
    if follows is None:
        return "nothing distinguishable from zero"
    terms = (f"{_shown(one)}·{ATLAS[name].formula} ({name})" for name, one in follows.terms.items())
    return " + ".join(terms)


def _percent(one: Interval) -> str:
    value, low, high = (100 * end for end in astuple(one))
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"


def _shown(one: Interval | None) -> str:
    return "–" if one is None else f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"

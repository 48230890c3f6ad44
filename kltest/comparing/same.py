"""Compare two losses: call both with every batch, find the smallest on which they differ, and write it as a program."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kltest.comparing.cases import Case, cases, rollout, simpler
from kltest.comparing.comparison import Comparison, Tried
from kltest.comparing.differences import LOGGED, Limit, differences, explanation, gradients, limits, ratio
from kltest.comparing.sides import KL, Facts, Seen, Side, definition, facts, on_ranks, printed
from kltest.counterexample.batch import program
from kltest.counterexample.program import LOW_PRECISION, TOLERANCES
from kltest.counterexample.sources import NoSourceError
from kltest.errors import TargetError, UsageError
from kltest.grading.forms import positive, whole
from kltest.grading.jobs import Job
from kltest.grading.options import OPTIONS, Options
from kltest.loss.callables import name_of
from kltest.loss.outcome import Call
from kltest.moments.tolerances import TOLERANCES as ALLOWED
from kltest.version import versions

# Times that the search for a smaller input tries all that are simpler; numeric parameters that are varied.
ROUNDS, NUMBERS = 12, 6
# What a program may pick from what a loss returned: the loss, and a logged number by its name.
LOSSES, BESIDE = ("", "[0]", ".loss", "['loss']"), ("[1][{0!r}]", "[{0!r}]", ".{0}", "[1]")

Arrays = Sequence[np.ndarray]


def same(
    a: Callable[..., Any] | str,
    b: Callable[..., Any] | str,
    *,
    arguments: Mapping[str, Any] | None = None,
    arguments_a: Mapping[str, Any] | None = None,
    arguments_b: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    ranks: int = 1,
    timeout: float | None = None,
    isolated: bool = False,
) -> Comparison:
    """Compare two implementations of a loss: value, gradient and logged numbers, on every batch that is tried.

    Args:
        a: A loss, as `kltest.grade` takes it. It is compared whole: nothing is subtracted from it.
        b: The other one.
        arguments: Arguments of both, by name.
        arguments_a: Arguments of the first alone.
        arguments_b: Arguments of the second alone.
        tolerance: Largest relative difference that counts as none; by default that of rounding in each type.
        seed: Seed of the batches, and of random numbers that the losses draw, before each call.
        ranks: With 2, both also run on two processes, each with half of the rows, against one process with all.
        timeout: Seconds that all may take in child processes; None for no limit.
        isolated: Call each loss in a child process of its own, and not in this one.

    Returns:
        A Comparison: `verdict` is "same", "differ" or "undecided", `smallest` the smallest batch on which they differ,
        `program` a program that shows it.

    Raises:
        UsageError: A loss cannot be found, or a parameter of it cannot be filled.
    """
    whole(0)(seed, "seed")
    whole(1)(ranks, "ranks")
    if tolerance is not None:
        positive()(tolerance, "tolerance")
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    one, other = (
        _side(loss, {**(arguments or {}), **(own or {})}, seed, isolated, timeout, deadline)
        for loss, own in ((a, arguments_a), (b, arguments_b))
    )
    found = Comparison(one.name, other.name, seed, versions=versions(torch))
    try:
        _Comparing(one, other, found, tolerance).run(ranks)
    except TargetError as error:
        found.verdict = "differ" if any(one.status == "differ" for one in found.tried) else "undecided"
        found.reason = str(error)
        found.notes += [str(error)] * (found.verdict == "differ")
    return found


def _side(
    loss: Callable[..., Any] | str,
    arguments: Mapping[str, Any],
    seed: int,
    isolated: bool,
    limit: float | None,
    deadline: float,
) -> Side:
    given = {"arguments": OPTIONS["arguments"].form(arguments, "arguments")} if arguments else {}
    more: dict[str, Any] = {"seed": seed, "isolated": isolated, "limit": limit, "deadline": deadline}
    if not isinstance(loss, str):
        return Side(name_of(loss), loss, Call(**given), **more)
    jobs = Job.all_of(loss, given)
    if len(jobs) > 1:
        raise UsageError(f"{loss} has {len(jobs)} settings, and two are compared: {jobs[0].name}, {jobs[1].name} …")
    (job,) = jobs
    return Side(job.name, job.target, Options(**job.given).call, **more)


@dataclass
class _Comparing:
    """One comparison as far as it has come."""

    a: Side
    b: Side
    found: Comparison
    tolerance: float | None
    known: list[Facts] = field(default_factory=list)

    def run(self, ranks: int) -> None:
        """Compare on all batches, then look for the smallest on which they differ."""
        found = self.found
        self.known = [side.ask(facts) for side in (self.a, self.b)]
        for side, known in zip((self.a, self.b), self.known, strict=True):
            side.home = known.file
        found.notes += self._notes()
        listed = self._cases()
        # The same again in the end: a loss that keeps state, or draws from the system, does not repeat itself.
        again = [one for one in listed if len(one.rows) // one.step in (5, 8) and not one.special][:3]
        pairs = list(
            zip([*listed, *again], self.a.seen([*listed, *again]), self.b.seen([*listed, *again]), strict=True)
        )
        found.tried += [self._tried(*pair) for pair in pairs[: len(listed)]]
        found.notes += _only_one_logs(pairs)
        if reason := self._unrepeatable(pairs, len(listed)):
            found.reason = reason
            return
        differ = [(one, pair) for pair, one in zip(pairs, found.tried, strict=False) if one.status == "differ"]
        stopped = next((each.refused for _, *both in pairs for each in both if each.stopped), "")
        if differ:
            found.explained = self._explained(pairs)
            tried, pair = min(differ, key=lambda one: (one[0].at_padding, one[1][0].special, _size(one[1][0])))
            self._smallest(tried, *pair)
        if ranks > 1 and not stopped:
            self._on_ranks(pairs, ranks)
        if any(one.status == "differ" for one in found.tried):
            found.verdict = "differ"
        elif stopped or all(one.status == "not tried" for one in found.tried if one.family != "precision"):
            found.reason = stopped or f"nothing could be compared in float64: {found.tried[0].why}"
        else:
            found.verdict = "same"

    def _notes(self) -> Iterator[str]:
        for known, letter in zip(self.known, "AB", strict=True):
            yield from (f"{letter}: {note}" for note in known.notes)
        a, b = self.known
        ours, theirs = [*a.defaults.values()], [*b.defaults.values()]
        if a.beta is b.beta is None and ours and theirs and ours != theirs:
            yield f"the default of the coefficient is {ours[0]} in A, {theirs[0]} in B: both were given β in its place"
        if a.dtype != b.dtype:
            yield f"A computes in {a.dtype} and B in {b.dtype}, given float64: what that costs counts as a difference"

    def _cases(self) -> list[Case]:
        a, b = self.known
        shared = [name for name in a.numbers if name in b.numbers][:NUMBERS]
        groups = tuple(dict.fromkeys(one.group for one in (a, b) if one.group)) or (2, 4)
        fixed = a.beta is not None or b.beta is not None
        return cases(
            self.found.seed,
            reads=(a.reads | b.reads) - {"beta"} if fixed else a.reads | b.reads,
            logits="logits" in a.reads & b.reads,
            numbers={name: a.numbers[name] for name in shared},
            groups=groups,
            upstream=3 if {a.returned, b.returned} <= {"rows", "tokens"} else 1,
            # Eight at most: long batches have few rows.
            step=min(max(a.step, b.step), 8),
        )

    def _limit(self, case: Case) -> Limit:
        return limits(case, [one.dtype for one in self.known], self.tolerance)

    def _tried(self, case: Case, a: Seen, b: Seen, words: str = "") -> Tried:
        refused = [f"{letter}: {one.refused}" for letter, one in zip("AB", (a, b), strict=True) if one.refused]
        batch = f"{case.words}{words}"
        if case.floats != "float64" and {*a.gradients} != {*b.gradients}:
            refused = refused or ["log-probs and logits that are rounded are not the same input"]
        if refused:
            why = f"A and B: {a.refused}" if len(refused) > 1 else refused[0]
            return Tried(case.family, batch, "not tried", why)
        found = differences(case, a, b, self._limit(case))
        return Tried(case.family, batch, "differ" if found else "same", differences=found)

    def _unrepeatable(self, pairs: Sequence[tuple[Case, Seen, Seen]], count: int) -> str:
        """Say which loss gives something else when it is called with one batch again; "" for none."""
        for case, *later in pairs[count:]:
            earlier = next(both for one, *both in pairs if one == case)
            for letter, one, other in zip("AB", earlier, later, strict=True):
                if one.refused or other.refused:
                    continue
                allowed = ALLOWED[self.known["AB".index(letter)].dtype].repeated
                if off := differences(case, one, other, Limit(allowed, 0.0, allowed)):
                    what = off[0]
                    return (
                        f"{letter} does not repeat itself: called again with {case.words} {what.what}{what.place} is "
                        f"{what.b:.6g} where it was {what.a:.6g}, with the same random numbers"
                    )
        return ""

    def _explained(self, pairs: Sequence[tuple[Case, Seen, Seen]], names: tuple[str, str] = ("A", "B")) -> str:
        usual = [pair for pair in pairs if pair[0].floats == "float64" and not (pair[1].refused or pair[2].refused)]
        ratios = (ratio(*pair, self._limit(pair[0])) for pair in usual)
        return explanation([one for one in ratios if one is not None], names)

    def _on_ranks(self, pairs: Sequence[tuple[Case, Seen, Seen]], ranks: int) -> None:
        """Compare each loss on several ranks with itself on one, and both on several."""
        even = [pair for pair in pairs if len(pair[0].rows) % ranks == 0 and not pair[0].special]
        groups = [pair for pair in pairs if pair[0].group and len(pair[0].rows) == ranks * pair[0].group]
        taken, several = [*even[:12], *groups], f" on {ranks} ranks"
        spread = {}
        for letter, side in (("A", self.a), ("B", self.b)):
            with tempfile.TemporaryDirectory(prefix="kltest-ranks-") as folder:
                spread[letter] = on_ranks(side, [case for case, *_ in taken], ranks, Path(folder))
            place, words = "AB".index(letter), f", {letter} on one and{several}"
            together = [
                (replace(case, family="ranks"), replace(both[place], returned="one"), one)
                for (case, *both), one in zip(taken, spread[letter], strict=True)
            ]
            rows = [self._tried(case, one, other, words) for case, one, other in together]
            self.found.tried += rows
            if any(one.status == "differ" for one in rows):
                words = self._explained(together, (f"{letter} on one", f"{letter}{several}"))
                self.found.notes.append(f"{letter}{several} is not {letter} on one{words and f': {words}'}")
        for (case, *_), a, b in zip(taken, *spread.values(), strict=True):
            self.found.tried.append(self._tried(replace(case, family="ranks"), a, b, several))

    def _smallest(self, tried: Tried, case: Case, a: Seen, b: Seen) -> None:
        """Simplify a batch as long as they differ there, and write the program."""
        exact = not any({"logits", "ref_logits"} & one.reads for one in self.known)
        for _ in range(ROUNDS):
            simple = list(simpler(case, rounds=exact))
            for pair in zip(simple, self.a.seen(simple), self.b.seen(simple), strict=True):
                one = self._tried(*pair)
                if one.status == "differ" and one.at_padding == tried.at_padding:
                    tried, (case, a, b) = one, pair
                    break
            else:
                break
        self.found.smallest = tried
        try:
            self.found.program = self._program(case, a, b)
        except NoSourceError as reason:
            self.found.unwritten = str(reason)

    def _program(self, case: Case, a: Seen, b: Seen) -> str:
        called = [side.ask(definition, case) for side in (self.a, self.b)]
        if reasons := [one for one in called if isinstance(one, str)]:
            raise NoSourceError(reasons[0])
        batch = rollout(case)
        used = [{*one.gradients} for one in (a, b)]
        leaves = ["raw"] if used[0] != used[1] and all(used) else sorted(used[0] | used[1], reverse=True)
        logged = self.found.smallest.differences[0].what if self.found.smallest else ""
        key, of_logged = logged.removeprefix(LOGGED), logged.startswith(LOGGED)
        fields = {name: batch.peek(name).detach().numpy() for name in batch.keys()}  # noqa: SIM118
        more: dict[str, Any] = {
            "upstream": case.weights.tolist() if a.returned != "scalar" else [float(case.weights[0])],
            "leaves": leaves,
        }
        words = f"A: {self.a.name}   B: {self.b.name}   {case.words}"
        picks = [one.format("kl" if key == KL else key) for one in BESIDE] if of_logged else LOSSES
        wanted = [one.logged[key] if of_logged else one.value for one in (a, b)]
        shown: list[list[np.ndarray]] = [[], []]
        if not of_logged and leaves == ["raw"]:
            shown = [[one] for one in gradients(batch, a, b)]
        elif not of_logged:
            shown = [[one.gradients[leaf] for leaf in leaves if leaf in one.gradients] for one in (a, b)]
        for first, second in product(picks, picks):
            text = program(words, called, fields, picks=(first, second), **more)
            if self._agrees(self.a.ask(printed, text), wanted, shown, batch.peek("mask").numpy() != 0):
                return text
        raise NoSourceError("no short program gives these numbers: a loss is called in a special way")

    def _agrees(
        self,
        lines: Sequence[Any],
        values: Sequence[np.ndarray],
        shown: Sequence[Sequence[np.ndarray]],
        live: np.ndarray,
    ) -> bool:
        """True if a program printed the values that were seen, and the gradients at live positions."""
        exact = all(one.dtype == "float64" for one in self.known)
        limit = TOLERANCES["float64"] if exact else LOW_PRECISION

        def near(got: Any, one: np.ndarray) -> bool:
            return (
                got is not None
                and np.shape(got) == one.shape
                and np.allclose(np.array(got), one, limit, 1e-9, equal_nan=True)
            )

        found = {(line[0], line[1]): line[2:] for line in lines}
        for letter, value, wanted in zip("AB", values, shown, strict=True):
            if not near(found.get((letter, "value"), [None])[0], value):
                return False
            got = [np.array(one) for one in found.get((letter, "gradient"), []) if one is not None]
            places = [live if one.ndim == 2 else live[..., None] for one in wanted]
            pairs = zip(got, wanted, places, strict=False)
            if wanted and (len(got) != len(wanted) or not all(near(g * p, w * p) for g, w, p in pairs)):
                return False
        return True


def _size(case: Case) -> tuple[int, ...]:
    kind, _, number = case.environment.partition(" ")
    width = {"long": int(number or 0), "many": int(number or 0), "bandit": 1}.get(kind, 4) if kind != "far" else 3
    return len(case.rows) * width, len(case.rows), case.sampler == "stale"


def _only_one_logs(pairs: Sequence[tuple[Case, Seen, Seen]]) -> Iterator[str]:
    """Yield notes on logged numbers, and gradients, that one of the losses has alone."""
    both = [(a, b) for _, a, b in pairs if not (a.refused or b.refused)]
    for letter, one, other in (("A", 0, 1), ("B", 1, 0)):
        keys = {key for pair in both for key in pair[one].logged.keys() - pair[other].logged.keys()}
        if keys := keys - ({KL} if "kl" in keys else set()):
            yield f"only {letter} logs {', '.join(sorted(keys))}: not compared"
        for leaf in ("logp", "logits"):
            if any(
                leaf in p[one].gradients and not p[one].gradients[leaf].any() and not p[other].gradients for p in both
            ):
                yield f"the gradient of {letter} at {leaf} is zero, where the other has none at all"
    if any(a.returned != b.returned for a, b in both):
        kinds = {"scalar": "one number", "rows": "a number a row", "tokens": "a number a token"}
        a, b = next((a, b) for a, b in both if a.returned != b.returned)
        yield (
            f"A returns {kinds[a.returned]}, B {kinds[b.returned]}: their objectives are compared, sums over tokens "
            "and means over rows"
        )

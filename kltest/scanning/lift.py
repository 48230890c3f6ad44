"""Lifting a KL term out of its function: a backward slice from where it arrives, for each choice of the configuration
that changes it, as a function of rollout fields."""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kltest.scanning.arithmetic import refusal
from kltest.scanning.choices import Asked, Remembered, named, telling
from kltest.scanning.conditions import UNMASKED, NotLiftedError, Undecided
from kltest.scanning.ends import ITSELF, End, ends_of, relevant
from kltest.scanning.facts import Facts
from kltest.scanning.flows import LOG_RATIO, SHIFTED
from kltest.scanning.follow import tree_of
from kltest.scanning.formulas import formula
from kltest.scanning.imported import imported
from kltest.scanning.leaves import Leaves
from kltest.scanning.linear import Statement, linear
from kltest.scanning.slicing import UNREACHED_END, UNREACHED_TERM, UNRETURNED, Slice
from kltest.scanning.sources import Source
from kltest.scanning.syntax import names_in
from kltest.scanning.tainted import PART
from kltest.scanning.terms import Term
from kltest.scanning.tree import Tree
from kltest.scanning.variants import Lifted, averaged, holds
from kltest.symbolic.words import says

MOST_VARIANTS = 24
MANY = 6
"""More variants than these are not told if others, of an end nearer to the term, are fewer."""
MOST_TRIED = 200
"""Choices of a configuration that are tried for one end of a term."""
UNREACHED = frozenset({"raises", UNREACHED_END, UNREACHED_TERM, UNRETURNED})
"""Configurations in which there is no term, and so no variant of it."""
NAME = "kl_term"


def lifted(tree: Tree, term: Term, *, run: bool = False) -> list[Lifted]:
    """Return the variants of a term, each lifted or with the reason why not; with `run` what is no arithmetic, too.

    A helper that some callers put into a loss and others into a reward is graded as both.
    """
    places = ["loss", "reward"] if term.place == "both" else [term.place]
    found = [variant for place in places for variant in _variants(tree, term, place, run)]
    if term.place == "both" and _is_differentiated(tree, term):
        found = [
            _refused(each, "its gradient goes through the reward as well: nothing detaches it there")
            if each.place != "loss" and "detach" not in each.source
            else each
            for each in found
        ]
    if term.reached == {"reward"}:
        return [_as_reward(variant) for variant in found]
    both = term.reached >= {"loss", "reward"}
    return [*found, *(_as_reward(variant) for variant in found if both and not variant.refused)]


def _as_reward(variant: Lifted) -> Lifted:
    """Return the variant of a helper where its callers put it into a reward: there its value counts."""
    if re.search(r"\b(\w+) - \1\.detach\(\)", variant.source) is None:
        return replace(variant, place="reward")
    why = "its value is not in what could be cut out, which is for its gradient: x - x.detach() is zero"
    return replace(_refused(variant, why), place="reward")


def _refused(variant: Lifted, why: str) -> Lifted:
    return replace(variant, source="", refused=variant.refused or why)


def _is_differentiated(tree: Tree, term: Term) -> bool:
    """Return True if a term arrives in a reward with its gradient."""
    arrivals = tree.followed(term.function).arrivals
    return any(each.kind == "reward" and each.flow.seed in term.seeds and not each.detached for each in arrivals)


def _variants(tree: Tree, term: Term, place: str, run: bool) -> list[Lifted]:
    """Try the ends of the term in order, the last one first; keep the first at which every variant can be lifted.

    One that every configuration reaches goes before those of single branches, as of each way to average a loss. If it
    has many variants, one nearer to the term may have fewer: what later becomes of the first of them is told then.
    """
    best: list[Lifted] = []
    told: list[list[Lifted]] = []
    whole: list[Lifted] = []
    later: list[Lifted] = []
    facts = Facts(term, relevant(term))
    for end in ends_of(tree, term, place):
        attempts, everywhere = _Attempts(tree, facts, place, end, run).explored()
        good = [attempt for attempt in attempts if not attempt.refused]
        if any(attempt.refused.endswith(PART) for attempt in attempts):
            return attempts  # a part of a sum over the vocabulary is no term
        if good and len(good) == len(attempts):
            whole = whole or attempts
            if everywhere:
                if len(attempts) <= MANY:
                    attempts = [*attempts, *averaged(attempts, later)]
                if not told or holds(attempts) >= holds(told[0]):
                    told.append(attempts)
                if len(good) <= MANY:
                    break
        if not best or len(good) > len([each for each in best if not each.refused]):
            best = attempts
        later += good
    return (
        min(told, key=len, default=whole)
        or best
        or [
            Lifted(
                term,
                "",
                place,
                refused="in each configuration that was tried the function leaves it out, or ends or raises before it",
            )
        ]
    )


class _Attempts:
    """Attempts to lift a term up to one end, one for each choice of the configuration; `values` can be chosen."""

    def __init__(self, tree: Tree, facts: Facts, place: str, end: End, run: bool) -> None:
        self.tree, self.facts, self.place, self.end, self.run = tree, facts, place, end, run
        self.values: dict[str, Sequence[Any]] = {}
        self.made: Remembered[Lifted] = Remembered()

    def explored(self) -> tuple[list[Lifted], bool]:
        """Return the variants of the term, and whether every configuration that was tried reaches its end.

        From each variant that is new, every choice it depends on is changed alone. A choice that changes nothing leads
        nowhere, so that only those are combined that matter.
        """
        found: dict[str, Lifted] = {}
        reached: set[Any] = set()
        waiting: list[tuple[dict[str, Any], str, Any]] = [({}, "", None)]
        tried = 0
        while waiting and len(found) < MOST_VARIANTS and tried < MOST_TRIED:
            tried += 1
            wanted, changed, before = waiting.pop(0)
            choice, variant = self._completed(wanted)
            outcome = variant.same or (variant.refused, *choice)
            if changed and outcome == before and outcome in found:
                found[outcome].alike.setdefault(changed, []).append(wanted[changed])
            if outcome in reached:
                continue
            reached.add(outcome)
            variant.choice = choice
            if variant.refused not in UNREACHED:
                found.setdefault(variant.same or variant.refused, variant)
            for text, taken in choice.items():
                others = [other for other in self.values[text] if other is not taken]
                waiting += [({**choice, text: other}, text, outcome) for other in others]
        told = telling([variant.choice for variant in found.values()])
        for variant in found.values():
            variant.variant = named({text: value for text, value in variant.choice.items() if text in told})
        return list(found.values()), all(outcome[0] != UNREACHED_END for outcome in reached)

    def _completed(self, wanted: Mapping[str, Any]) -> tuple[dict[str, Any], Lifted]:
        """Return the variant for what is wanted of the choices, the first value of the others, and those it depends
        on."""
        choice = Asked(wanted)
        while True:
            try:
                return choice.asked, self._cut(choice)
            except Undecided as undecided:
                self.values[undecided.text] = undecided.values
                choice = Asked({**choice, undecided.text: undecided.values[0]})
            except NotLiftedError as error:
                return choice.asked, Lifted(self.facts.term, "", self.place, refused=str(error))

    def _cut(self, choice: Asked) -> Lifted:
        """Return the variant of a term for one choice of the configuration.

        Raises Undecided where a further choice matters, NotLiftedError where it cannot be lifted.
        """
        if "Function" in self.tree.bases.get(self.facts.term.function.owner, ()):
            raise NotLiftedError("its gradient is written by hand, in backward")
        leaves = Leaves(self.tree, self.facts, choice)
        code = linear(self.facts, self.end.line, leaves)
        if code.raises:
            raise NotLiftedError("raises")
        found = Slice(self.facts, self.end, code.statements)
        key = (frozenset(leaves.looped), found.decisive())
        made = self.made.get(key, choice, lambda: _written(found, leaves, self.place, self.end, self.run))
        return replace(made, alike={})


def _written(found: Slice, leaves: Leaves, place: str, end: End, run: bool) -> Lifted:
    """Return the variant of a term that is cut out of a slice; raises as `_Attempts` do."""
    tree, term = leaves.tree, leaves.term
    kept, result = found.cut_out(leaves)
    if place == "reward":
        result = ast.UnaryOp(ast.USub(), result) if _is_reward(end) else result
    function, result = _function(kept, result, leaves)
    if len(leaves.hows) == 1 and leaves.unclear and not leaves.rollouts:
        again = Leaves(tree, leaves.facts, leaves.choice, *leaves.hows)
        again.looped = leaves.looped
        return _written(found, again, place, end, run)
    more, line = refusal(ast.fix_missing_locations(function), frozenset(leaves.helping))
    helpers = [] if more and not run else leaves.helpers()
    module = _OfNumbers().visit(ast.Module(body=[*helpers, function], type_ignores=[]))
    ast.fix_missing_locations(module)
    more = more or refusal(module, frozenset(leaves.helping))[0]
    if reason := leaves.missing or (not run and more):
        runs_more = bool(more and not leaves.missing)
        at = 0 if leaves.missing else line
        return Lifted(term, "", place, refused=reason, notes=leaves.notes, runs_more=runs_more, at=at)
    if len({name.removesuffix("logits").removesuffix("logp") for name in leaves.fields if "log" in name}) < 2:
        raise NotLiftedError(
            "both sides look like one: nothing says whose probabilities are which, as the name ref_logp would"
        )
    if place == "loss" and not {"logp", "logits"} & set(leaves.fields):
        raise NotLiftedError("nothing of the policy is in it, as far as names say")
    source = ast.unparse(module)
    forms, wanted = _forms(source), _linear(term.forms_of([statement.line for statement in kept]))
    if not forms & wanted:
        made = " and ".join(sorted(forms)) or "a part without a log-ratio"
        reason = f"the function computes {' or '.join(sorted(wanted))}, and only {made} could be cut out"
        return Lifted(term, "", place, refused=reason, notes=list(leaves.notes))
    fields = tuple(leaves.fields)
    if term.whole and not any(f"{word}(" in source for word in ("sum", "mean", "kl_divergence")):
        source = source.replace(f"return {ast.unparse(result)}", f"return ({ast.unparse(result)}).sum(-1)")
    if place == "logged":
        value, whose = ast.unparse(result), min(name for name in fields if "log" in name)
        source = source.replace(f"return {value}", f"return (0 * {whose}.sum(), {{'kl': {value}}})")
    place = "advantage" if place == "reward" and says(end.name, "adv", "returns") else place
    source = f"{imported(tree, term.function.source, module)}{source}" if more else source
    notes = [*leaves.notes, *([] if "mask" in fields or leaves.facts.sees_masks else [UNMASKED])]
    written, complete = formula(kept, result)
    same = re.sub(r" / 1(\.0)?(?![\d.])", "", written) if complete else source
    if re.search(r"·0(\.0)?$", written):
        raise NotLiftedError(UNREACHED_TERM)
    return Lifted(term, "", place, source, written, "", fields, notes, bool(more), same=same, forms=forms)


@lru_cache(maxsize=1000)
def _forms(source: str) -> frozenset[str]:
    """Return the forms that a lifted function makes of its log-probs."""
    text = f"{source}\n"
    tree = tree_of([Source(Path(), text, ast.parse(text))])
    return _linear(flow.form for flow in tree.followed(tree.functions[-2]).returned.flows)


def _linear(forms: Iterable[str]) -> frozenset[str]:
    return frozenset(LOG_RATIO if form == SHIFTED else form for form in forms)


def _is_reward(end: End) -> bool:
    """Return True if what arrives is added to a reward, so that its negative is the cost."""
    return end.line != ITSELF and not says(end.name, "penalty", "cost")


def _function(kept: list[Statement], result: ast.expr, leaves: Leaves) -> tuple[ast.FunctionDef, ast.expr]:
    bound: set[str] = set()
    body = [_made(statement, leaves, bound) for statement in kept]
    result = leaves.fill(result, bound)
    body.append(ast.Return(result))
    parameters = [ast.arg(name) for name in leaves.fields]
    given = ast.arguments(posonlyargs=[], args=parameters, kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.FunctionDef(NAME, given, body, [], lineno=1), result


def _made(statement: Statement, leaves: Leaves, bound: set[str]) -> ast.stmt:
    """Return a statement as code, with names filled that are not `bound`; the one that it binds is added to them."""
    if statement.augmented is not None and statement.target not in bound:
        raise NotLiftedError(f"nothing of a rollout stands for {statement.target}")
    statement.value = leaves.fill(statement.value, bound)
    made: ast.stmt
    if statement.over is not None:
        bound |= names_in(statement.over)
        made = ast.For(statement.over, statement.value, [_made(each, leaves, bound) for each in statement.loop], [])
        return made
    bound.add(str(statement.target))
    same = isinstance(statement.value, ast.Name) and statement.value.id in leaves.masks
    (leaves.masks.add if same else leaves.masks.discard)(str(statement.target))
    target = ast.Name(str(statement.target), ast.Store())
    made = ast.Assign([target], statement.value, lineno=statement.line)
    if statement.augmented is not None:
        made = ast.AugAssign(target, statement.augmented, statement.value)
    if statement.quiet:
        call = ast.parse("torch.no_grad()", mode="eval").body
        made = ast.With([ast.withitem(call)], [made])
    return made


class _OfNumbers(ast.NodeTransformer):
    """Make tensors of numbers that torch's functions are given, where the function read a tensor that was no field."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), "log" | "log1p" | "exp" | "expm1" | "sqrt"), [given]):
                if all(
                    isinstance(each, ast.Constant | ast.UnaryOp | ast.BinOp | ast.operator | ast.unaryop)
                    for each in ast.walk(given)
                ):
                    node.args = [ast.parse(f"torch.tensor({ast.unparse(given)})", mode="eval").body]
        return node

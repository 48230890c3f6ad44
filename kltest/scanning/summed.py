"""Fields for log-probs of whole rollouts: what a function has added up, or averaged, before the term begins."""

import ast
import copy

from kltest.scanning.facts import Facts
from kltest.scanning.tree import Tree
from kltest.scanning.units import GUESSED, MEAN, SAID, SUM, TOKENS


class Summed:
    """Puts sums of fields in place of names; `rollouts` says sum or mean if that is true of all of which nothing is
    known, `hows` which of them were found, `unclear` of which names nothing is known."""

    tree: Tree
    facts: Facts
    fields: dict[str, None]
    notes: list[str]
    missing: str

    def __init__(self, rollouts: str = "") -> None:
        self.rollouts = rollouts
        self.hows: set[str] = set()
        self.unclear: set[str] = set()
        self.called_so: dict[str, ast.expr] = {}

    def reduced(self, name: str, node: ast.expr, target: str = "") -> ast.expr | None:
        """Return the sum or mean of a rollout's log-probs if the function has that; None for those of tokens.

        What is only called that of a sequence is one of tokens if something is done to it that takes tokens.
        """
        text, units = target or ast.unparse(node), self.tree.units.of(node, self.facts.term.function)
        if SAID in units:
            units = units - {SAID} | {TOKENS if self.facts.has_tokens(text) else SUM}
        if units <= {GUESSED} and not self.facts.has_tokens(text):
            self.unclear.add(text)
            units = frozenset({self.rollouts}) - {""}
        if not units & {SUM, MEAN}:
            return None
        if len(units) > 1:
            self.missing = f"{text} may be log-probs of tokens or of whole rollouts, added up or averaged"
        how = SUM if SUM in units else MEAN
        self.hows.add(how)
        self.fields["mask"] = None
        self.notes.append(f"{text} is taken to be the {how} of each rollout's log-probs, over its live tokens")
        found = ast.parse(f"({name} * mask).sum(-1){' / mask.sum(-1)' if how == MEAN else ''}", mode="eval").body
        if text == name and not target:
            self.called_so[name] = found
        return found

    def of_rollouts(self, name: str) -> ast.expr | None:
        """Return what stands for a parameter that is called as the field of which it is a sum."""
        return copy.deepcopy(self.called_so.get(name))

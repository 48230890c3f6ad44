"""Names that differ in a mark alone, as `log_probs_a` and `log_probs_b`: callers, or the mark, say whose they are.

What is called the same in two places, as `new["logprobs"]` and `batch["logprobs"]`, is the sampler's if it is stored.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from kltest.scanning.sides import POLICY, REFERENCE, side, who_of
from kltest.scanning.sources import Source
from kltest.scanning.syntax import FUNCTIONS, FunctionNode, chain, identifiers, parameters
from kltest.symbolic.words import says, says_kl, words

_MARK = re.compile(r"^([st])_(?=\w)|_?([12ST])$|_([abst])$|^(target)_")
_SECOND = {"1": "2", "a": "b", "s": "t", "S": "T", "": "target"}
_PREDICTS = ("predict", "student", "vocab", "output")
_ANYONE = ("1", "a")
"""Marks that state nobody: only of parameters, of what is called a divergence or an entropy."""
_TWIN = re.compile(r"([Ll]og_?p|[Ll]ogit|[Pp]rob)\w*?(_?[12ST]|_[abst])\b|\b(target|[st])_\w*(log_?p|logit|prob)")
"""Text of a file that names one of two so."""
_HOLDERS = ("batch", "rollout", "buffer", "memory", "memories", "experience", "stored", "sample", "data")
"""Beginnings of the words of where rollouts are stored."""
_STORED = re.compile(r"""[\]\w][.\["']+\w*([Ll]og_?p|[Pp]rob)\w*["'\]]* - \w+[.\["']+\w*([Ll]og_?p|[Pp]rob)""")


def name_twins(sources: Sequence[Source]) -> None:
    """Put `ref_` or `old_` before that one of two names that is not the policy's, in its function and its calls."""
    for source in sources:
        if _STORED.search(source.text):
            _name_stored(source.tree)
    functions = [
        (node, pair)
        for source in sources
        if _TWIN.search(source.text)
        for node in ast.walk(source.tree)
        if isinstance(node, FUNCTIONS)
        for pair in _twins(node)
    ]
    calls: dict[str, list[ast.Call]] = {node.name: [] for node, _ in functions}
    for source in sources:
        if any(name in source.text for name in calls):
            for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
                calls.get(chain(call.func).rsplit(".", 1)[-1], []).append(call)
    found: list[tuple[FunctionNode, tuple[str, str], set[tuple[str, str]]]] = []
    for function, (first, second) in functions:
        given = parameters(function)
        told = {pair for call in calls[function.name] if (pair := _told(call, given, first, second))}
        found.append((function, (first, second), told or {(POLICY, REFERENCE)}))
    for function, names, told in found:
        if len(told) == 1:
            whose = {name: who for name, who in zip(names, told.pop(), strict=True) if who != POLICY}
            _rename([function, *calls[function.name]], whose)


def _name_stored(tree: ast.Module) -> None:
    """Put `old_` before the key of what is read from where rollouts are stored, in functions that subtract it from what
    is called the same elsewhere."""
    for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        inside = list(ast.walk(function))
        stored: set[str] = set()
        for node in inside:
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                names = [chain(each) for each in (node.left, node.right)]
                (one, key), (other, same) = (name.rpartition(".")[::2] for name in names)
                kept = [name for name, holder in zip(names, (one, other), strict=True) if says(holder, *_HOLDERS)]
                if one and other and key == same and (stated := side(key)) and not stated.sure and len(kept) == 1:
                    stored.update(kept)
        for node in inside if stored else ():
            match node:
                case ast.Subscript(_, ast.Constant(str(key)) as place) if chain(node) in stored:
                    place.value = f"old_{key}"
                case ast.Attribute(_, key) if chain(node) in stored:
                    node.attr = f"old_{key}"


def _twins(function: FunctionNode) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of a function that state one quantity and nobody, and differ in their mark."""
    given = parameters(function)
    stored = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    marked: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys([*given, *stored]):
        if (stated := side(name)) and (not stated.sure or says(name, *_PREDICTS)):
            found = _MARK.search(name)
            mark = next(filter(None, found.groups()), "") if found else ""
            marked[name] = (f"{stated.quantity} {_MARK.sub('', name)}", mark)
    divergence = says_kl(function.name) or says(function.name, "entropy", "xent", "cross", "div")
    for one, other in combinations(marked, 2):
        (stem, mark), (same, second) = marked[one], marked[other]
        if stem == same and _SECOND.get(second) == mark:
            one, other, mark, second = other, one, second, mark
        anyone = divergence and one in given and other in given
        # What is predicted is a policy's, also by another name: predicted_logits and target_logits.
        alike = stem == same or (second == "target" and stem[:4] == same[:4] and says(one, *_PREDICTS))
        if alike and _SECOND.get(mark) == second and (mark not in _ANYONE or anyone):
            yield one, other


def _told(call: ast.Call, given: Sequence[str], first: str, second: str) -> tuple[str, str] | None:
    """Return whose two arguments of a call are, None if they do not tell."""
    written = dict(zip(given, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
    one, other = (_who(written[name]) if name in written else None for name in (first, second))
    if (one or POLICY) == (other or POLICY):
        return None
    return (one or POLICY, other or POLICY)


def _who(node: ast.expr) -> str | None:
    return who_of(" ".join([*words(chain(node)), *identifiers(node)]))


def _rename(nodes: Iterable[ast.AST], whose: dict[str, str]) -> None:
    for node in nodes:
        inside = ast.walk(node) if isinstance(node, FUNCTIONS) else node.keywords  # type: ignore[attr-defined]
        for inner in inside:
            if isinstance(inner, ast.Name):
                inner.id = f"{whose.get(inner.id, '')}{inner.id}"
            elif isinstance(inner, ast.arg) or (isinstance(inner, ast.keyword) and not isinstance(node, FUNCTIONS)):
                inner.arg = f"{whose.get(inner.arg or '', '')}{inner.arg}" if inner.arg else None  # type: ignore[assignment]

"""Rewrites of a function's source that may make its KL term follow what is declared; each is tried, none trusted."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from kltest.grading.fixing.definition import Edit, Editable
from kltest.grading.fixing.seen import Body, Seen
from kltest.truth import support_named

# Text of these binds tighter than any operator.
TIGHT = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.List, ast.Tuple)
# Kinds of changes that keep the value of an expression and replace its gradient.
KEEP_THE_VALUE = ("straight-through", "logits")
# In these, an expression needs no parentheses around it.
LOOSE = (ast.Assign, ast.AnnAssign, ast.Return, ast.keyword, ast.Expr, ast.AugAssign, ast.Tuple, ast.List, ast.Dict)


@dataclass(frozen=True)
class Rewrite:
    """One change: its edits, and in words what it does. `kind` is one word a kind of change; a fix and its alternative
    are of two kinds. `needs_logits`: whole next-token distributions enter the term. `at` is the expression in whose
    place something else is written. `shared` says what comes to it by other branches; `scaled`: the KL term has a
    coefficient in the source."""

    edits: tuple[Edit, ...]
    words: str
    kind: str
    needs_logits: bool = False
    at: ast.expr | None = None
    shared: str = ""
    scaled: bool = False

    def size(self, definition: Editable) -> tuple[int, int]:
        """Return how many lines change, and what is written less twice what is replaced: whole expressions go first."""
        lines = 0
        for edit in self.edits:
            old = definition.text[edit.start : edit.end]
            lines += edit.text.count("\n") if edit.start == edit.end else old.count("\n") + edit.text.count("\n") + 2
        return lines, sum(len(edit.text) - 2 * (edit.end - edit.start) for edit in self.edits)


@dataclass(frozen=True)
class Term:
    """An expression with the declared expected gradient: for a token (B, T), and the sum over a row's tokens (B,).

    `words` and `row_words` say what they are.
    """

    tokens: str
    row: str
    words: str
    row_words: str
    needs_logits: bool = False
    is_value: bool = False


@dataclass(frozen=True)
class Texts:
    """Source texts, in one statement, of what terms are made of; None if the function does not have it there.

    If `careful`, what stands at padded positions is not even multiplied by zero, since it may be NaN.
    """

    names: Mapping[str, str]
    careful: bool = False

    @property
    def log_ratio(self) -> str | None:
        """The text of log π/π_ref, with the gradient of log π."""
        if "log_ratio" in self.names:
            return self.names["log_ratio"]
        return self.difference("logp", "ref_logp")

    def difference(self, one: str, other: str) -> str | None:
        """Return the text of the difference of two fields."""
        if one not in self.names or other not in self.names:
            return None
        return f"({self.names[one]} - {self.names[other]})"

    def masked(self, tokens: str) -> str:
        """Return the text of numbers that count at live tokens only."""
        mask = self.names.get("mask")
        if mask is None:
            return tokens
        return f"{_tightened(tokens)}.masked_fill({mask} == 0, 0.0)" if self.careful else f"{tokens} * {mask}"

    def safe(self, tokens: str) -> str:
        """Return the text of numbers that are not to be NaN at padded positions, if that is asked for."""
        return self.masked(tokens) if self.careful else tokens

    def total(self, tokens: str, *, keep: bool = False) -> str:
        """Return the text of the sum over a row, (B,), or (B, 1) if `keep`."""
        return f"{_tightened(self.masked(tokens))}.sum(-1{', keepdim=True' * keep})"

    def ratios(self, dim: int = 2) -> Iterator[tuple[str, str]]:
        """Yield importance ratios, in words and as text, for numbers per token (`dim` 2) or row: of all tokens of the
        rollout, and of those up to a token."""
        if log := self.difference("logp", "old_logp"):
            yield "the ratio of the whole rollout", f"{self.total(log, keep=dim == 2)}.exp()"
            if dim == 2:
                yield "the ratio of the tokens so far", f"{_tightened(self.masked(log))}.cumsum(-1).exp()"

    def terms(self, declared: Mapping[str, float]) -> Iterator[Term]:
        """Yield terms that follow the KL's part of a declared gradient, the plainest first; none if that is a sum."""
        declared = {name: coefficient for name, coefficient in declared.items() if "entropy" not in name}
        u, logp = self.log_ratio, self.names.get("logp")
        ratios: list[tuple[str, str]] = [("", ""), *self.ratios()]
        if len(declared) != 1:
            return
        ((name, coefficient),) = declared.items()
        times = "" if coefficient == 1 else f"{coefficient:g} * "
        yield from self._of_support(name, times)
        if u is None:
            return
        for ratio, weight in ratios:
            with_ratio = f", times {ratio}" if ratio else ""
            weighted = f"{times}{weight}.detach() * " if weight else times
            if name == "reverse_kl":
                back = f"{self.total(u, keep=True)}.detach()"
                square = f"{times}0.5 * {self.total(u)} ** 2"
                if ratio:
                    square = f"({self.masked(f'{weighted}{back} * {logp or u}')}).sum(-1)"
                words = f"the rollout's log-ratio, detached, times log π{with_ratio}"
                squared = words if ratio else "½ (log-ratio of the rollout)²"
                yield Term(self.safe(f"{weighted}{back} * {logp or u}"), square, words, squared)
            elif name == "local_reverse_kl":
                tokens = f"{weighted}0.5 * {u} ** 2"
                words = f"½ (log-ratio)² of a token{with_ratio}"
                yield Term(self.safe(tokens), self.total(tokens), words, f"the sum of {words}", is_value=not ratio)
            elif name in ("forward_kl", "local_forward_kl"):
                whole = f"(-{self.total(u, keep=True)}).exp()" if name == "forward_kl" else f"(-{u}).exp()"
                tokens = f"{weighted}{whole}.detach() * -{logp or u}"
                words = f"minus π_ref/π, detached, times log π{with_ratio}"
                yield Term(self.safe(tokens), self.total(tokens), words, f"the sum of {words}")
        policy, reference = self.names.get("logits"), self.names.get("ref_logits")
        if name == "local_reverse_kl" and policy and reference:
            tokens = f"{times}({policy}.exp() * ({policy} - {reference})).sum(-1)"
            words = "the KL of the whole next-token distribution"
            yield Term(
                self.safe(tokens), self.total(tokens), words, f"the sum of {words}", needs_logits=True, is_value=True
            )

    def _of_support(self, name: str, times: str) -> Iterator[Term]:
        """Yield the sum over the likeliest tokens that a name of a support means."""
        stated, both = support_named(name), [self.names.get(one) for one in ("topk_logp", "ref_topk_logp")]
        if stated is None or None in both:
            return
        policy, reference = (one + ".log_softmax(-1)" * (stated.kind == "renormalised") for one in both if one)
        a, b = (policy, reference) if stated.direction == "reverse" else (reference, policy)
        tokens, words = f"({a}.exp() * ({a} - {b})).sum(-1)", "the sum over the likeliest tokens"
        if stated.kind == "tail":
            # Rounding may leave less than nothing outside, and padding does.
            rest, other = (f"(1 - {one}.exp().sum(-1)).clamp(min=1e-12)" for one in (a, b))
            tokens, words = f"({tokens} + {rest} * ({rest} / {other}).log())", f"{words}, with all others as one"
        elif stated.kind:
            words = "the KL of both distributions within the likeliest tokens"
        tokens = f"{times}{tokens}"
        yield Term(self.safe(tokens), self.total(tokens), words, f"the sum of {words}", is_value=True)


@dataclass
class Rewrites:
    """Candidates for a function: one place, one operation each."""

    body: Body
    declared: Mapping[str, float]
    written_into: Sequence[str] = ()
    careful: bool = False
    _parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    _known: dict[ast.stmt, dict[str, str]] = field(default_factory=dict)
    # Names of what was multiplied with a coefficient.
    _scaled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in ast.walk(self.definition.node):
            self._parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
        for statement in self.body.scopes:  # names that are known so far count for the next
            if isinstance(statement, ast.Assign | ast.AugAssign) and self._coefficients(statement.value):
                self._scaled |= {one.id for one in _targets(statement) if isinstance(one, ast.Name)}

    @property
    def definition(self) -> Editable:
        """The function."""
        return self.body.definition

    def all(self) -> list[Rewrite]:
        """Return all candidates, those that change fewest lines and characters first, each text once."""
        found: dict[tuple[Edit, ...], Rewrite] = {}
        scaled = any(self._coefficients(statement) for statement in self.body.scopes)
        # Of every expression some dozen changes are made.
        coefficients = {one.node: self._coefficients(one.node) for one in self.body.expressions}
        shared = {one.node: self._other_branches(one.node) for one in self.body.expressions}
        for change in self._all():
            if change.at is None:
                found.setdefault(change.edits, replace(change, scaled=scaled))
            elif self._keeps(change, coefficients[change.at]):
                found.setdefault(change.edits, replace(change, shared=shared[change.at], scaled=scaled))
        return sorted(found.values(), key=lambda change: change.size(self.definition))

    def _all(self) -> Iterator[Rewrite]:
        yield from self._at_the_start()
        yield from self._statements()
        yield from self._in_place()
        for seen in self.body.expressions:
            written = Texts(self._names(seen.statement), self.careful)
            yield from self._simpler(seen)
            yield from self._constant(seen)
            yield from self._other_field(seen, written)
            if seen.is_kl:
                yield from self._another_term(seen, written)
                yield from self._another_value(seen, written)
                yield from self._another_sum(seen, written)
                yield from self._with_factor(seen, written)
            elif seen.of_sampler and seen.value.dim():
                for words, ratio in written.ratios(seen.value.dim()):
                    yield self._instead(seen, ratio, f"the ratio becomes {words}", "ratio")

    def _other_branches(self, node: ast.expr) -> str:
        """Return which branches give what an expression reads another value, "" if none does."""
        above: list[ast.AST] = [node]
        while (parent := self._parents.get(above[-1])) is not None:
            above.append(parent)
        read, left = set(), [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        while left:
            name = left.pop()
            if name not in read:
                read.add(name)
                for statement in self._assigned.get(name, ()):
                    left += [inner.id for inner in ast.walk(statement.value) if isinstance(inner, ast.Name)]
        places = {self._branch_of(one) for name in read for one in self._assigned.get(name, ())}
        for branch in places:
            if branch is not None and branch not in above:
                return f"the other branches of `if {_short(self.definition.source(branch.test))}`"
        return ""

    def _branch_of(self, statement: ast.AST) -> ast.If | None:
        node = self._parents.get(statement)
        while node is not None and not isinstance(node, ast.If):
            node = self._parents.get(node)
        return node

    @cached_property
    def _assigned(self) -> dict[str, list[ast.Assign | ast.AugAssign]]:
        """The statements that give each name a value."""
        found: dict[str, list[ast.Assign | ast.AugAssign]] = {}
        for node in ast.walk(self.definition.node):
            if isinstance(node, ast.Assign | ast.AugAssign):
                for target in _targets(node):
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, []).append(node)
        return found

    def _keeps(self, change: Rewrite, coefficients: Sequence[ast.expr]) -> bool:
        """Return True if the coefficients of the expression that is replaced are in the text in its place as well."""
        text = "" if change.kind in KEEP_THE_VALUE else change.edits[-1].text
        return all(self.definition.source(one) in text for one in coefficients)

    def _coefficients(self, node: ast.AST) -> list[ast.expr]:
        """Return the numbers with which what moves with the reference is multiplied, and names of what is so."""
        found: list[ast.expr] = []
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in self._scaled:
                found.append(inner)
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mult):
                for one, other in ((inner.left, inner.right), (inner.right, inner.left)):
                    if self._is_number(one) and any(self._moves(part) for part in ast.walk(other)):
                        found.append(one)
        return found

    def _is_number(self, node: ast.expr) -> bool:
        """Return True for a number that is no part of an estimator, as ½ is."""
        inner = node.operand if isinstance(node, ast.UnaryOp) else node
        if isinstance(inner, ast.Constant):
            return inner.value not in (0.5, 1, 2)
        within = [self._seen[one] for one in ast.walk(node) if one in self._seen]
        return all(one.value.dim() == 0 and not one.trainable and not one.of_reference for one in within)

    def _moves(self, node: ast.AST) -> bool:
        return node in self._seen and self._seen[node].of_reference

    @cached_property
    def _seen(self) -> dict[ast.AST, Seen]:
        return {one.node: one for one in self.body.expressions}

    def _names(self, statement: ast.stmt) -> dict[str, str]:
        if statement not in self._known:
            names = self.body.names(statement)
            self._known[statement] = {name: _tightened(text) for name, text in names.items()}
        return self._known[statement]

    # One kind of change each.

    def _at_the_start(self) -> Iterator[Rewrite]:
        """Copy what is written into, and normalise logits."""
        first = self.definition.node.body[0]
        if ast.get_docstring(self.definition.node, clean=False) is not None:
            if len(self.definition.node.body) == 1:
                return
            first = self.definition.node.body[1]
        if first not in self.body.scopes:
            return
        names = self._names(first)
        lines = [f"{name} = {name}.clone()" for name in self.written_into]
        if lines and (edit := self._before(first, lines)):
            yield Rewrite((edit,), "it works on copies of what it is given", "copies")
        logits = [names[key] for key in ("logits", "ref_logits", "old_logits") if names.get(key, "").isidentifier()]
        if logits and (edit := self._before(first, [f"{name} = {name}.log_softmax(-1)" for name in logits])):
            yield Rewrite((edit,), "logits are normalised first", "normalised")

    def _simpler(self, seen: Seen) -> Iterator[Rewrite]:
        """An operation is left out: a clamp, a division, a window, a detach, a product with a gate."""
        for inner in self.body.expressions:
            if inner.node is seen.node or not (inner.like(seen) and self._inside(inner.node, seen.node)):
                continue
            if not any(self._is_another_term(other, seen, inner) for other in self.body.expressions):
                text = self.definition.source(inner.node)
                yield self._instead(seen, text, f"{self._shown(seen)} becomes {_short(text)}", "left-out", inner.node)

    def _is_another_term(self, other: Seen, seen: Seen, kept: Seen) -> bool:
        """Return True if leaving out all of an expression but `kept` loses a summand that is no part of the KL term."""
        parent = self._parents[other.node]
        if not (isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub)):
            return False
        lost = self._inside(other.node, seen.node) and not self._inside(kept.node, other.node)
        return lost and not self._inside(other.node, kept.node) and other.trainable and not other.of_reference

    def _statements(self) -> Iterator[Rewrite]:
        """A statement that gives a name another value is left out, or a condition with all that depends on it."""
        for statement, scope in self.body.scopes.items():
            again = [one for one in _targets(statement) if isinstance(one, ast.Name) and one.id in scope]
            gate = isinstance(statement, ast.If) and not statement.orelse
            block = next(
                (
                    part
                    for part in vars(self._parents[statement]).values()
                    if isinstance(part, list) and statement in part
                ),
                [],
            )
            if (again or gate) and len(block) > 1 and (edit := self._lines_of(statement)):
                text = self.definition.source(statement).split("\n", 1)[0]
                yield Rewrite((edit,), f"{_short(text)} is left out", "statement")

    def _in_place(self) -> Iterator[Rewrite]:
        """A result is given a name in place of being written into something: `x.mul_(y)` and `x *= y`."""
        for statement in self.body.scopes:
            text = ""
            if isinstance(statement, ast.AugAssign):
                operation = ast.unparse(ast.BinOp(ast.Name("x"), statement.op, ast.Name("y")))[1:-1].strip()
                target = self.definition.source(statement.target)
                text = f"{target} = {target} {operation} {self._tight(statement.value)}"
            call = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(call, ast.Call) and (done := self._not_in_place(call)):
                owner = self.definition.source(call.func.value)  # type: ignore[attr-defined]
                text = f"{owner} = {done}" if owner.isidentifier() else ""
            if text:
                yield Rewrite((Edit(*self.definition.span(statement), text),), f"{_short(text)}", "in-place")
        for seen in self.body.expressions:
            if isinstance(seen.node, ast.Call) and (done := self._not_in_place(seen.node)):
                yield self._instead(seen, done, f"{self._shown(seen)} becomes {_short(done)}", "in-place")

    def _not_in_place(self, call: ast.Call) -> str:
        """Return a call of a method that writes into its object as that of the method that does not, "" for others."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if not name.endswith("_") or name.endswith("__") or not hasattr(torch.Tensor, name[:-1]):
            return ""
        start = self.definition.span(call.func)[1]
        text, begin = self.definition.source(call), self.definition.span(call)[0]
        return f"{text[: start - begin - 1]}{text[start - begin :]}"

    def _lines_of(self, statement: ast.stmt) -> Edit | None:
        """The lines of a statement, None if it shares one."""
        after = self._after(statement, [])
        start = self.definition.starts[statement.lineno - 1]
        return Edit(start, after.start, "") if after else None

    def _constant(self, seen: Seen) -> Iterator[Rewrite]:
        """A factor is detached."""
        if seen.trainable and not self._is_called(seen.node, "detach"):
            yield self._instead(
                seen, f"{self._tight(seen.node)}.detach()", f"{self._shown(seen)} is detached now", "detach"
            )

    def _other_field(self, seen: Seen, written: Texts) -> Iterator[Rewrite]:
        """The mask in place of another one, the policy's log-probs in place of the sampler's."""
        mask, live = written.names.get("mask"), self.body.batch.peek("mask") != 0
        zero_or_one = bool(((seen.value == 0) | (seen.value == 1)).all())
        if mask and seen.value.shape == live.shape and zero_or_one and not torch.equal(seen.value != 0, live):
            yield self._instead(seen, mask, f"{self._shown(seen)} becomes {mask}", "mask")
        text = self.definition.source(seen.node)
        logp = written.names.get("logp")
        if logp and _tightened(text) == written.names.get("old_logp"):
            yield self._instead(seen, logp, f"{text} becomes {logp}", "field")

    def _another_term(self, seen: Seen, written: Texts) -> Iterator[Rewrite]:
        """The gradient of another term in place of its own: with its value, or with that of the expression."""
        if self._is_summand(seen):
            return
        for term in written.terms(self.declared):
            tokens = written.masked(_tightened(term.tokens)) if self._is_zero_at_padding(seen) else term.tokens
            text = {2: tokens, 1: term.row, 0: f"{_tightened(term.row)}.mean()"}.get(seen.value.dim())
            if text is None:
                continue
            what = term.words if seen.value.dim() == 2 else term.row_words
            if term.is_value or seen.value.dim() < 2:
                yield self._instead(seen, text, f"{self._shown(seen)} becomes {what}", "term", None, term.needs_logits)
            words = f"the gradient of {self._shown(seen)} becomes that of {what}; its value stays"
            kind = "logits" if term.needs_logits else "straight-through"
            yield self._straight_through(seen, text, words, kind, term.needs_logits)

    def _is_summand(self, seen: Seen) -> bool:
        """Return True for a summand of an estimator: that is replaced as a whole."""
        parent = self._parents[seen.node]
        while isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub):
            whole = self._seen.get(parent)
            if whole is not None and whole.is_kl and whole.like(seen):
                return True
            parent = self._parents[parent]
        return False

    def _is_zero_at_padding(self, seen: Seen) -> bool:
        """Return True for numbers per token that are zero wherever there is none, as they are to stay."""
        dead = self.body.batch.peek("mask") == 0
        return seen.value.shape == dead.shape and bool(dead.any()) and not seen.value[dead].any()

    def _another_value(self, seen: Seen, written: Texts) -> Iterator[Rewrite]:
        """A value for a reward: the log-ratio of the token or of the rollout, or its own sum over the rollout."""
        u, dim = written.log_ratio, seen.value.dim()
        own = self._tight(seen.node)
        values = []
        if dim == 2:
            values = [u, u and written.total(u, keep=True), written.total(own, keep=True)]
        elif dim == 1:
            values = [u and written.total(u)]
        elif dim == 0:
            values = [u and f"{written.total(u)}.mean()"]
        for value in filter(None, values):
            value = written.masked(value) if self._is_zero_at_padding(seen) else value
            bare = value[1:-1] if value == u and value.startswith("(") else value
            yield self._instead(seen, bare, f"{self._shown(seen)} becomes {_short(bare)}", "value")
            if seen.trainable:
                yield self._instead(
                    seen, f"{value}.detach()", f"{self._shown(seen)} becomes {_short(value)}, detached", "value"
                )

    def _another_sum(self, seen: Seen, written: Texts) -> Iterator[Rewrite]:
        """The sum over live tokens and the mean over rows, in place of another reduction."""
        for inner in self.body.expressions:
            dims = inner.value.dim(), seen.value.dim()
            if dims[0] <= dims[1] or dims[0] > 2 or not inner.is_kl or not self._inside(inner.node, seen.node):
                continue
            text = self._tight(inner.node)
            texts = [text] if dims[0] == 1 else [written.total(text), f"{text}.sum(-1)"]
            for row in dict.fromkeys(texts):
                whole = row if dims[1] == 1 else f"{row}.mean()"
                words = "summed over the tokens of a row" if dims[1] == 1 else "summed over tokens, averaged over rows"
                yield self._instead(
                    seen, whole, f"{_short(self.definition.source(inner.node))} becomes {words}", "reduction"
                )

    def _with_factor(self, seen: Seen, written: Texts) -> Iterator[Rewrite]:
        """A sign, a mask, or an importance ratio."""
        own = self._tight(seen.node)
        yield self._instead(seen, f"-{own}", f"{self._shown(seen)} gets the other sign", "sign")
        if seen.value.dim() == 2 and (mask := written.names.get("mask")):
            yield self._instead(seen, f"{own} * {mask}", f"{self._shown(seen)} is masked now", "mask")
            filled = f"{own}.masked_fill({mask} == 0, 0.0)"
            yield self._instead(seen, filled, f"{self._shown(seen)} becomes zero at padded positions", "mask")
        for words, ratio in written.ratios(seen.value.dim()) if seen.value.dim() else ():
            yield self._instead(
                seen, f"{ratio}.detach() * {own}", f"{self._shown(seen)} is multiplied now by {words}", "ratio"
            )
            undetached = f"{self._shown(seen)} is multiplied now by {words}, not detached"
            yield self._instead(seen, f"{ratio} * {own}", undetached, "ratio")

    # Texts.

    def _instead(
        self,
        seen: Seen,
        text: str,
        words: str,
        kind: str,
        part: ast.expr | None = None,
        needs_logits: bool = False,
    ) -> Rewrite:
        """Write a text in place of an expression; `part` is the expression whose text it is."""
        node = ast.parse(f"({text})", mode="eval").body if part is None else part
        start, end = self.definition.span(seen.node)
        enclosed = self.definition.text[start - 1] + self.definition.text[end : end + 1] == "()"
        loose = (
            enclosed
            or isinstance(node, TIGHT)
            or isinstance(self._parents[seen.node], LOOSE)
            or self._is_argument(seen.node)
        )
        edit = Edit(start, end, text if loose else f"({text})")
        return Rewrite((edit,), words, kind, needs_logits, seen.node)

    def _straight_through(self, seen: Seen, text: str, words: str, kind: str, needs_logits: bool) -> Rewrite:
        """Keep the value of an expression and exchange its gradient; on lines of their own where that can be."""
        name, statement = "surrogate", seen.statement
        while name in self.body.scopes[statement]:
            name += "_"
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        if isinstance(target, ast.Name) and statement.value is seen.node:  # type: ignore[attr-defined]
            kept = f"{target.id} = {target.id}.detach() + {name} - {name}.detach()"
            # The target may be a name that the term reads, so the term is computed first.
            before, after = self._before(statement, [f"{name} = {text}"]), self._after(statement, [kept])
            if before and after:
                return Rewrite((before, after), words, kind, needs_logits, seen.node)
        own = f"{self._tight(seen.node)}.detach()"
        if before := self._before(statement, [f"{name} = {text}"]):
            replaced = self._instead(seen, f"{own} + {name} - {name}.detach()", words, kind)
            return Rewrite((before, *replaced.edits), words, kind, needs_logits, seen.node)
        return self._instead(
            seen, f"{own} + {_tightened(text)} - {_tightened(text)}.detach()", words, kind, None, needs_logits
        )

    def _before(self, statement: ast.stmt, lines: Sequence[str]) -> Edit | None:
        """Lines before a statement, None if it does not begin its line."""
        start, indent = self.definition.starts[statement.lineno - 1], self._indent(statement)
        return None if indent.strip() else Edit(start, start, self._written(indent, lines))

    def _after(self, statement: ast.stmt, lines: Sequence[str]) -> Edit | None:
        """Lines after a statement, None if it does not end its line."""
        number = statement.end_lineno or statement.lineno
        indent, place = self._indent(statement), self.definition.starts[number]
        rest = self.definition.text[self.definition.span(statement)[1] : place].strip()
        if indent.strip() or (rest and not rest.startswith("#")) or number >= len(self.definition.starts) - 1:
            return None
        return Edit(place, place, self._written(indent, lines))

    def _indent(self, statement: ast.stmt) -> str:
        """Return what stands before a statement on its line."""
        return self.definition.text[self.definition.starts[statement.lineno - 1] : self.definition.span(statement)[0]]

    def _written(self, indent: str, lines: Sequence[str]) -> str:
        newline = "\r\n" if "\r\n" in self.definition.text else "\n"
        return "".join(f"{indent}{line}{newline}" for line in lines)

    def _tight(self, node: ast.expr) -> str:
        text = self.definition.source(node)
        return text if isinstance(node, TIGHT) else f"({text})"

    def _shown(self, seen: Seen) -> str:
        return _short(ast.unparse(seen.node))

    def _inside(self, inner: ast.AST, outer: ast.AST) -> bool:
        node: ast.AST | None = inner
        while node is not None and node is not outer:
            node = self._parents.get(node)
        return node is outer

    def _is_argument(self, node: ast.expr) -> bool:
        parent = self._parents[node]
        return isinstance(parent, ast.Call) and node in parent.args

    def _is_called(self, node: ast.expr, method: str) -> bool:
        """Return True for an expression that ends with this method, or on which it is called."""
        above = self._parents.get(node)
        ends = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        return ends or (isinstance(above, ast.Attribute) and above.attr == method)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    """Return what a statement gives a value to."""
    return [statement.target] if isinstance(statement, ast.AugAssign) else getattr(statement, "targets", [])


def _short(text: str) -> str:
    """Return a text for a sentence."""
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:37]}…"


def _tightened(text: str) -> str:
    return text if isinstance(ast.parse(f"({text})", mode="eval").body, TIGHT) else f"({text})"

"""Leaves of a lifted term: the rollout field or the value that stands for a name, and the helpers that go with it."""

import ast
from collections.abc import Mapping
from typing import Any

from kltest.scanning.arithmetic import MODULES, refusal
from kltest.scanning.callees import Function
from kltest.scanning.conditions import COEFFICIENT, COUNTED, UNSET, Conditions, Undecided, is_nothing, number_for
from kltest.scanning.facts import Facts
from kltest.scanning.helpers import bare, hand_over
from kltest.scanning.sides import Side, is_number, is_ratio, side
from kltest.scanning.summed import Summed
from kltest.scanning.syntax import NUMBERS, Named, chain, copied, each_of, identifiers, names_in, shifts
from kltest.scanning.tree import Tree
from kltest.scanning.vocabulary import WORDS
from kltest.symbolic.words import is_mask, says, says_kl, words

_TOKENS = frozenset({"ids", "tokens", "actions", "responses", "labels", "targets"})
_KEEPS, _SUPPORT = WORDS["keeps"], WORDS["support"]
SHARE = " is a part of a distribution, not all of it: renormalised or not, its gradient is that of no KL of all tokens"


class Leaves(Conditions, Summed):
    """Replacements for the names of one variant; `fields` are the rollout fields used, `missing` what has no value,
    `masks` the names of the one mask that all masks are here."""

    def __init__(self, tree: Tree, facts: Facts, choice: Mapping[str, Any], rollouts: str = "") -> None:
        super().__init__(rollouts)
        self.tree, self.facts, self.choice = tree, facts, choice
        self.term = facts.term
        self.fields: dict[str, None] = {}
        self.notes: list[str] = []
        self.looped: set[str] = set()
        self.masks = {"mask"}
        self.helping: dict[str, Function] = {}
        self.missing = ""

    # Leaves.

    def is_leaf(self, target: str, value: ast.expr) -> bool:
        """Return True if a rollout's field stands for a name, whatever the function computes it from."""
        stated = side(target)
        if stated is None:
            scheduled = is_number(target) and refusal(ast.Expression(copied(value)), frozenset(names_in(value)))[0]
            return bool(scheduled) or (is_mask(target) and not self._is_plain(value))
        called = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
        names = [getattr(node.func, "attr", getattr(node.func, "id", "")) for node in called]
        functions = [node.func for node in called]  # whose own names say what they give, not what they are given
        said = [node for node in ast.walk(value) if node not in functions]
        given = {stated.quantity for node in said if (stated := side(chain(node)))}
        if given & {"logits", "logp"} and "log" in names:
            return True  # what is called so has another meaning here
        if all(name in _KEEPS for name in names) and given:
            return False
        whose = {stated.who for node in said if (stated := side(chain(node)))}
        if len(whose) > 1 and not isinstance(value, ast.IfExp):
            return False  # a mixture of two sides
        if _SUPPORT.intersection(identifiers(value)):
            self.missing = f"{target}{SHARE}"
        # What a helper of the tree adds up stays log-probs; what it makes of logits and tokens is a leaf.
        return not (given == {"logp"} and all(name in _KEEPS or name in self.tree.by_name for name in names))

    def _is_plain(self, value: ast.expr) -> bool:
        """Return True for arithmetic on log-probs, masks and tokens alone, which a mask may be computed by."""
        names = names_in(value)
        known = {name for name in names if is_mask(name) or _TOKENS.intersection(words(name)) or name in MODULES}
        rest = names - known - self.facts.of_sides - {"self"}
        return not rest and not refusal(ast.Expression(copied(value)), frozenset(names))[0]

    def replace(self, node: ast.expr) -> ast.expr:
        """Return an expression with rollout fields and values in place of what the function reads from elsewhere."""
        return _Replace(self).visit(node)

    def fill(self, node: ast.expr, bound: set[str]) -> ast.expr:
        """Return an expression in which names that no statement before it binds are filled."""
        leaves = self

        class Fill(ast.NodeTransformer):
            def visit_Name(self, inner: ast.Name) -> ast.expr:
                if inner.id in bound or inner.id in leaves.fields or inner.id in MODULES:
                    return leaves.of_rollouts(inner.id) or inner
                return leaves.stands_for(inner.id, inner.id) or inner

            def visit_BinOp(self, inner: ast.BinOp) -> ast.expr:
                self.generic_visit(inner)
                operands = (inner.left, inner.right)
                same = all(isinstance(each, ast.Name) and each.id in leaves.masks for each in operands)
                return inner.left if same and isinstance(inner.op, ast.Mult | ast.BitAnd) else inner

            def visit_Call(self, inner: ast.Call) -> ast.expr:
                if not isinstance(inner.func, ast.Name):
                    inner.func = self.visit(inner.func)
                if function := leaves.helping.get(getattr(inner.func, "id", "")):
                    hand_over(inner, function, leaves.stands_for, {*bound, *leaves.fields}, leaves.notes)
                inner.args = [self.visit(each) for each in inner.args]
                inner.keywords = [ast.keyword(each.arg, self.visit(each.value)) for each in inner.keywords]
                return inner

        return Fill().visit(node)

    def field(self, stated: Side, node: ast.expr | None = None) -> ast.expr:
        """Return the expression of a rollout's field for one side; `node` is what the function has for it."""
        whole = stated.quantity != "logp" or (self.term.whole and not self.facts.sampled)
        name = f"{stated.who}{'logits' if whole else 'logp'}"
        self.fields[name] = None
        reduced = None if whole or node is None else self.reduced(name, node)
        if stated.quantity == "prob":
            return ast.parse(f"{name}.exp()", mode="eval").body
        return reduced or ast.Name(name, ast.Load())

    def use(self, name: str) -> ast.expr:
        """Return the name of a rollout's field, and note that it is used."""
        self.fields[name] = None
        return ast.Name(name, ast.Load())

    def stands_for(self, name: str, text: str) -> ast.expr | None:
        """Return what stands for a name or a chain of attributes; None if nothing is known of it."""
        if text in self.choice and self.choice[text] not in (None, ...):
            return ast.Constant(self.choice[text])
        if _SUPPORT.intersection(words(name)) and (side(name) or is_mask(name)):
            self.missing = f"{text}{SHARE}"
        if stated := side(name):
            whose = self.tree.followed(self.term.function).whose.get(name, ())
            stated = Side(stated.quantity, min(whose)) if len(whose) == 1 and not stated.sure else stated
            return self.field(stated, None if text in self.facts.stored else ast.parse(text, mode="eval").body)
        if is_mask(name) and {"inf", "nan"}.intersection(words(name)):
            return ast.parse("torch.tensor(False)", mode="eval").body  # nothing is infinite here
        if is_mask(name):
            self.fields["mask"] = None
            if self.facts.is_of_rows(text):  # all rollouts of a batch are in it
                return ast.parse("(mask.sum(-1) > 0).float()", mode="eval").body
            return ast.parse("mask == 0" if self.facts.is_of_padding(name, text) else "mask", mode="eval").body
        if is_ratio(name) and text in self.term.function.parameters:
            self.notes.append(f"{text} is taken to be the ratio to the sampler")
            self.fields.update(logp=None, old_logp=None)
            return ast.parse("torch.exp(logp - old_logp)", mode="eval").body
        found = words(name)
        if says(name, "label", "target") and not says(name, "coef"):
            self.fields.update(mask=None, tokens=None)
            return ast.parse("torch.where(mask > 0, tokens, -100)", mode="eval").body
        if _TOKENS.intersection(found):
            return self.use("tokens")
        if "weights" in found and not says_kl(name):
            self.notes.append(f"{text} is taken to be the mask")
            return self.use("mask")
        default = self.facts.defaults.get(name, self.facts.defaults.get(text, UNSET))
        if default is UNSET and (name.isupper() or says(name, "config", "cfg", "args", "options")):
            default = self.term.function.settings.get(name.rsplit(".", 1)[-1], UNSET)
        if default is UNSET and self.facts.rests & {f"1 - {text}", f"1.0 - {text}"}:
            self.notes.append(f"{text} is taken to be 0.5")
            return ast.Constant(0.5)
        if says(name, *COEFFICIENT) and (says_kl(name) or default is UNSET or text in self.facts.factors):
            self.notes.append(f"{text} is filled as the coefficient")
            return self.use("beta")
        if default is not UNSET and (default is None or isinstance(default, int | float | str)):
            self.notes.append(f"{text} keeps its default, {default!r}")
            return ast.Constant(default)
        if "advantages" in found or "advantage" in found:
            return self.use("advantage")
        if {"rewards", "reward", "scores", "score"} & set(found):
            return self.use("reward")
        if text.endswith("ignore_index"):
            return ast.Constant(-100)
        if self.looped and says(name, "chunk", "micro", "minibatch", "size"):
            self.notes.append(f"{text} is taken to be 2")
            return ast.Constant(2)
        if taken := number_for(found):
            self.fields.update(dict.fromkeys(["mask"] if taken == COUNTED else []))
            self.notes.append(f"{text} is taken to be {taken}")
            return ast.parse(taken, mode="eval").body
        return None

    def helper(self, called: ast.expr, context: Function) -> str:
        """Return the name under which a function of the tree goes with the lifted one; the empty string if it is none.

        Raises Undecided if a table says which, by a key that is not known.
        """
        root = chain(called).split(".")[0]
        if root in MODULES or (isinstance(called, ast.Attribute) and (called.attr in _KEEPS or not root)):
            return ""
        if root in context.parameters and isinstance(called, ast.Name):
            return ""  # a function that is handed in
        found = self.tree.callees(called, context)
        if looked_up := self.tree.looked_up(called, context):
            key, table = looked_up
            wanted = key.value if isinstance(key, ast.Constant) else self.choice.get(ast.unparse(key), UNSET)
            if wanted is UNSET:
                raise Undecided(ast.unparse(key), list(table))
            found = self.tree.by_name.get(table.get(wanted, ""), [])[:1]
        elif isinstance(called, ast.Attribute) and root not in ("self", "cls", *self.tree.bases):
            found = [each for each in found if not each.is_method]
        found = [each for each in found if isinstance(each.node, ast.FunctionDef)]
        if not found:
            return ""
        function = found[0]
        if function.source is not context.source and len({each.dump for each in found}) > 1:
            self.missing = f"several functions of the tree are called {function.name}"
        name = f"{function.owner}_{function.name}" if function.is_method else function.name
        while self.helping.setdefault(name, function) is not function:
            name += "_"
        return name

    def helpers(self) -> list[ast.FunctionDef]:
        """Return the functions of the tree that the lifted one calls, and those that they call."""
        made: dict[str, ast.FunctionDef] = {}
        while waiting := [name for name in self.helping if name not in made]:
            for name in waiting:
                made[name] = bare(name, self.helping[name], self.helper, self.notes)
        return list(reversed(made.values()))


class _Replace(ast.NodeTransformer):
    """Put fields, values and the names of helpers in place of what is read."""

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        text = ast.unparse(node)
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value  # type: ignore[assignment]
        if isinstance(root, ast.Name) and root.id in MODULES:
            return node
        name = chain(node)
        stands = bool(name) and node.attr not in ("shape", "dtype", "device", "T", "ndim") and not self._local(root)
        if stands and (found := self.leaves.stands_for(name, text)) is not None:
            return found
        self.generic_visit(node)
        return node

    def _local(self, root: ast.AST) -> bool:
        return isinstance(root, ast.Name) and bool(side(root.id) or is_mask(root.id))

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        """A list with an entry for each rollout is one tensor here: [f(x) for x in xs] is f(xs)."""
        pairs = [pair for part in node.generators for pair in each_of(part.target, part.iter).items()]
        return self.visit(Named(dict(pairs)).visit(node.elt)) if pairs else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        keyed = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        if keyed and (found := self.leaves.stands_for(chain(node), ast.unparse(node))) is not None:
            return found
        if names_in(node.slice) & self.leaves.looped:
            self.generic_visit(node)
            return node
        if side(chain(node.value)) and names_in(node.slice) & self.leaves.facts.positions:
            self.leaves.missing = f"{ast.unparse(node)} is a part of a rollout, not all of it"
        if isinstance(node.slice, ast.Name) and node.slice.id in self.leaves.facts.counters:
            return self.visit(node.value)
        held = chain(node.value)
        indices = isinstance(node.slice, ast.Name) and says(node.slice.id, "ind", "idx", "perm")
        if shifts(node.slice) or (indices and (side(held) or is_mask(held))):  # a mini-batch is all rollouts here
            return self.visit(node.value)
        self.generic_visit(node)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        return ast.Name(node.target.id, ast.Load())  # it has been assigned before

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        decided = self.leaves.decide(node.test)
        if decided is None and is_nothing(node.body) != is_nothing(node.orelse):
            decided = is_nothing(node.orelse)
        if decided is None:
            raise self.leaves.undecided(node.test)
        return self.visit(node.body if decided else node.orelse)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called = node.func
        if isinstance(called, ast.Attribute):
            if called.attr == "get" and node.args and isinstance(node.args[0], ast.Constant):
                name = f"{chain(called.value)}.{node.args[0].value!s}"
                if (found := self.leaves.stands_for(name, ast.unparse(node))) is not None:
                    return found
            if called.attr in ("to", "cpu", "cuda", "numpy", "type", "type_as") and chain(called.value) not in MODULES:
                return self.visit(called.value)
            if called.attr in NUMBERS and self.leaves.term.place == "logged":
                return self.visit(called.value)
            if called.attr in ("gather", "gather_for_metrics", "reduce") and says(chain(called.value), "accelerator"):
                return self.visit(node.args[0])
        context = self.leaves.term.function
        if given := self.leaves.tree.followed(context).fields.get(
            (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        ):
            return self.leaves.field(given, node)
        made = self.leaves.tree.constructed(called, context)
        held = chain(called.value) if isinstance(called, ast.Attribute) else ""
        if made is not None and chain(made.func).endswith("KLDivLoss"):
            node.func = copied(made)
        elif not (side(held) or is_mask(held)) and (name := self.leaves.helper(called, context)):
            node.func = ast.Name(name, ast.Load())
        elif isinstance(called, ast.Attribute):
            called.value = self.visit(called.value)  # and its method, which is no field, stays
        else:
            node.func = self.visit(called)
        node.args = [self.visit(each) for each in node.args]
        node.keywords = [ast.keyword(each.arg, self.visit(each.value)) for each in node.keywords]
        return node

"""Graphs in words: a short program that anybody can run, and one line of mathematics.

Both are written from the arguments up, so that neither meets the limit of the interpreter's stack. What is needed only
on one branch, or inside a loop, is written there.
"""

import builtins
import math
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import count
from keyword import kwlist
from operator import and_, or_
from typing import Any, NamedTuple

import torch

from kltest.names import FIELDS, SUPPORT_SIZE, SUPPORT_SIZES
from kltest.symbolic.computed import FUNCTIONAL, LOOPS, NUMBERS, UnknownError
from kltest.symbolic.operations import ATTRIBUTES, FUNCTIONS, is_constant, words_of
from kltest.symbolic.values import ABSENT, CHOICE, INPUT, External, Node, carried_along, implied, nodes_in, reached

# How tightly operators bind, as in Python; conditional expressions bind least.
BINDING = {"or": 1, "and": 2, "not": 3, "|": 5, "&": 7, "+": 9, "-": 9, "negated": 11, "inverted": 11, "**": 12} | {
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "is", "is not", "in", "not in"), 4),
    **dict.fromkeys(("*", "/", "//", "%", "@"), 10),
}
COMPARED, NEGATED, ATOM = BINDING["=="], BINDING["negated"], 13
OPPOSITE = {"==": "!=", "is": "is not", "in": "not in"}
TRUTHS = frozenset({"is", "is not", "in", "not in", "not"})
BOOLEAN = frozenset(BINDING[name] for name in ("or", "and", "not", "=="))
BUILTINS = {"added up": "sum", "largest": "max", "smallest": "min"}
# What is a function of Python, or is written in its own way, and the kind of its value.
TEMPLATES = {
    **{name: (f"{function}({{all}})", "tensor") for name, function in BUILTINS.items()},
    "len": ("len({all})", "number"),
    "int": ("int({all})", "number"),
    "range": ("range({all})", "numbers"),
    "list": ("list({all})", "list"),
    "tuple": ("tuple({all})", "list"),
    "starred": ("*{all}", "list"),
    "zip": ("list(zip({all}))", "list"),
    "enumerate": ("list(enumerate({all}))", "list"),
    "reversed": ("list({all})[::-1]", "list"),
    "appended": ("[*{0}, {1}]", "list"),
}
MODULES = {"torch": torch, "F": torch.nn.functional}
LISTS = words_of("chunk split tensor_split unbind")
# Functions that read better as methods.
METHODS = words_of(
    """
    all amax amin any argmax argmin bool clone detach flatten gather mean permute prod reshape squeeze std sum
    transpose unsqueeze var
    """
)
# Columns beyond which an expression is given a name.
LONG = 88
# Columns beyond which a formula writes what it uses twice but once.
REPEATED = 60
# Formulas write these functions as operators, and leave these functions and these arguments out.
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "neg": "negated"}
SILENT = words_of("same clone tensor squeeze unsqueeze")
STORED = words_of("keepdim dtype device")
# What formulas call the fields of a rollout.
SYMBOLS = {"logp": "log π", "ref_logp": "log ref", "old_logp": "log μ", "beta": "β"} | {
    **{"logits": "log π(·)", "ref_logits": "log ref(·)", "old_logits": "log μ(·)"},
    **{"topk_logp": "log π(S)", "ref_topk_logp": "log ref(S)", "topk_ids": "S", "student_topk_ids": "S"},
}
WITHOUT_GRADIENT = FIELDS.keys() - {"logp", "logits", "topk_logp", "rollout"}


class Text(NamedTuple):
    """An expression, how tightly its outermost operator binds, and what it is: a tensor, number, list or numbers."""

    words: str
    binding: int = ATOM
    kind: str = "tensor"

    def within(self, least: int) -> str:
        """Return the expression as the operand of an operator, in parentheses where it binds less."""
        return self.words if self.binding >= least else f"({self.words})"


def _joined(texts: Iterable[Text]) -> str:
    """Return the kind of what is computed from values, or is one of them."""
    return max((text.kind for text in texts), key=("number", "numbers", "list", "tensor").index, default="tensor")


def _entry_of(items: Text) -> str:
    """Return the kind of an entry."""
    return "number" if items.kind == "numbers" else "tensor"


def program(result: Any, leaves: Mapping[Node, str], name: str = "kl_term") -> str:
    """Return a graph as the source of a function of its leaves, which imports torch alone.

    Args:
        result: what the function returns: a node, a constant, or a container of them.
        leaves: names of parameters; several nodes may have one.
        name: name of the function.

    Raises:
        UnknownError: a node that some branch needs is no operation of the table and no leaf.
    """
    return _Program(result, leaves).source(result, name)


def formula(result: Any, leaves: Mapping[Node, str], symbols: Mapping[str, str] = SYMBOLS) -> str:
    """Return a graph as one line of mathematics: sg(x) stops a gradient that x would carry.

    Args:
        result: a node, a constant, or a container of them.
        leaves: names of nodes; what has none is called as the source calls it.
        symbols: what these names are called.
    """
    return _Formula(result, leaves, symbols).line(result)


class _Writer:
    """What programs and formulas have in common: operators, constants and containers."""

    symbols: Mapping[str, str] = {"negated": "-", "inverted": "~", "not": "not "}

    def __init__(self, result: Any, leaves: Mapping[Node, Text]) -> None:
        self.leaves, self.known = leaves, ChainMap(dict(leaves))
        self.nodes = self.below(result)
        # Nodes that a gradient reaches: a detach below another one does nothing.
        self.flowing = set(nodes_in(result))
        for node in reversed(self.nodes):
            if node in self.flowing and node.operation != "detach" and BINDING.get(node.operation) != COMPARED:
                self.flowing |= set(nodes_in(node.arguments[1:])) if node.operation == CHOICE else set(node.parts)

    def below(self, value: Any) -> list[Node]:
        """Return the nodes of a value that are not written yet, arguments before their users."""
        return sorted(reached(value, self.known), key=lambda node: node.number)

    def text(self, value: Any) -> Text:
        """Return a value as an expression."""
        match value:
            case Text():
                return value
            case Node():
                if value not in self.known:
                    self.known[value] = self.of_node(value)
                return self.known[value]
            case External(path=path) if path.startswith("torch."):
                return Text(path)
            case slice():
                ends = ["" if one is None else self.text(one).words for one in (value.start, value.stop, value.step)]
                return Text(":".join(ends[: 2 + bool(ends[2])]))
            case list():
                return Text(f"[{self.entries(value)}]", kind="list")
            case tuple():
                return Text(f"({self.entries(value)}{',' * (len(value) == 1)})", kind="list")
            case dict():
                pairs = (f"{self.text(name).words}: {self.text(one).words}" for name, one in value.items())
                return Text(f"{{{', '.join(pairs)}}}", kind="list")
            case int() | float() if value is not True and value is not False:
                return Text(self.number(value), NEGATED if value < 0 else ATOM, "number")
        if is_constant(value):
            return Text("..." if value is Ellipsis else repr(value), kind="number")
        raise UnknownError(value)

    def number(self, value: float) -> str:
        return repr(value) if math.isfinite(value) else f"{'-' * (value < 0)}torch.{abs(value)!r}"

    def of_node(self, node: Node) -> Text:
        raise NotImplementedError

    def listed(self, values: Iterable[Any], named: Iterable[tuple[str, Any]] = ()) -> str:
        words = [self.text(one).words for one in values]
        return ", ".join([*words, *(f"{name}={self.text(one).words}" for name, one in named)])

    def entries(self, values: Iterable[Any]) -> str:
        return self.listed(values)

    def operator(self, name: str, arguments: Sequence[Any]) -> Text:
        inner = arguments[0]
        while isinstance(inner, Node) and inner.operation == "detach" and inner not in self.leaves:
            inner = inner.arguments[0]
        if name == "not" and isinstance(inner, Node) and inner.operation in OPPOSITE and inner not in self.leaves:
            name, arguments = OPPOSITE[inner.operation], inner.arguments
        symbol, binding, texts = (
            self.symbols.get(name, f" {name} "),
            BINDING[name],
            [self.text(one) for one in arguments],
        )
        if len(texts) == 1:
            return Text(f"{symbol}{texts[0].within(binding)}", binding, texts[0].kind)
        # Powers associate to the right, comparisons not at all.
        left = texts[0].within(binding + (name == "**" or binding == COMPARED))
        right = texts[1].within(NEGATED if name == "**" else binding + 1)
        return Text(f"{left}{symbol}{right}", binding, "number" if name in TRUTHS else _joined(texts))

    def item(self, owner: Any, key: Any) -> Text:
        keys = self.listed(key) if isinstance(key, tuple) and key else self.text(key).words
        text = self.text(owner)
        return Text(f"{text.within(ATOM)}[{keys}]", ATOM, _entry_of(text))

    def conditional(self, condition: Text, then: Text, otherwise: Text) -> Text:
        """Return a choice between expressions, as `and` or `or` where it is one."""
        if condition.binding in BOOLEAN and (then.words, otherwise.words) == ("True", "False"):
            return condition
        for name, short, other in (("and", otherwise, then), ("or", then, otherwise)):
            if short == condition or (condition.binding in BOOLEAN and short.words == str(name == "or")):
                words = f"{condition.within(BINDING[name])} {name} {other.within(BINDING[name])}"
                return Text(words, BINDING[name], _joined((condition, other)))
        return Text(f"{then.within(1)} if {condition.within(1)} else {otherwise.words}", 0, _joined((then, otherwise)))


class _Program(_Writer):
    """Statements and expressions of Python; each block of them has a scope of names that it may use."""

    def __init__(self, result: Any, leaves: Mapping[Node, str]) -> None:
        numbers = {name for name, field in FIELDS.items() if field.shape == "float"}.union(SUPPORT_SIZES)
        kinds = {name: "number" if name in numbers else "tensor" for name in leaves.values()}
        super().__init__(result, {node: Text(name, ATOM, kinds[name]) for node, name in leaves.items()})
        self.lines: list[str] = []
        self.path: list[tuple[Node, bool]] = []
        self.used = {*kwlist, *dir(builtins), *leaves.values(), "torch", "F"}
        # Names of the choices that another one is made of, and is assigned to, if they need statements.
        self.targets: dict[Node, str] = {}
        self.place = {node: at for at, node in enumerate(self.nodes)}
        # What a node needs whichever branches are taken, as bits by their places.
        self.needs: dict[Node, int] = {}
        # Nodes without a value, as code raises there or never set the variable; choices that may be entries of no list.
        self.barren: set[Node] = set()
        self.optional: set[Node] = set()
        for node in self.nodes:
            self._learn(node)

    def _learn(self, node: Node) -> None:
        condition, *arms = node.arguments if node.operation == CHOICE else (None,)
        parts = LOOPS[node.operation].needs(node) if node.operation in LOOPS else node.parts
        parts = () if node.operation == INPUT else [condition] if arms else list(parts)
        fruitful = [self._needed(arm) for arm in arms if not self.is_barren(arm)]
        self.needs[node] = 1 << self.place[node] | self._needed(parts) | (reduce(and_, fruitful) if fruitful else 0)
        if node.operation == "raises" or _is_absent(node) or self.is_barren(parts) or (arms and not fruitful):
            self.barren.add(node)
        if any(_is_absent(arm) or self.is_optional(arm) for arm in arms):
            self.optional.add(node)

    def _needed(self, value: Any) -> int:
        return reduce(or_, (self.needs.get(node, 0) for node in nodes_in(value)), 0)

    def is_optional(self, value: Any) -> bool:
        return isinstance(value, Node) and value in self.optional

    def is_barren(self, value: Any) -> bool:
        return any(node in self.barren for node in nodes_in(value))

    def source(self, result: Any, name: str) -> str:
        lines, (value,) = self.inside([result])
        body = "\n".join(f"    {line}" for line in [*lines, f"return {value.words}"])
        met = {*nodes_in(result), *(part for node in self.nodes for part in node.parts)}
        names = dict.fromkeys(self.leaves[node].words for node in self.leaves if node in met)
        sizes = {name: f"{name}={SUPPORT_SIZE}" for name in names if name in SUPPORT_SIZES}
        parameters = ", ".join([*(name for name in names if name not in sizes), *sizes.values()])
        modules = {"torch.": "import torch", "F.": "import torch.nn.functional as F"}
        imports = [line for used, line in modules.items() if used in body]
        return "\n".join([*imports, *[""] * 2 * bool(imports), f"def {name}({parameters}):", body, ""])

    # Blocks

    def inside(
        self,
        values: Sequence[Any],
        given: Mapping[Node, Text] | None = None,
        assumed: tuple[Any, bool] | None = None,
    ) -> tuple[list[str], list[Text]]:
        """Return the statements of a block, and the expressions of values at its end."""
        outer, path = (self.known, self.lines), list(self.path)
        self.known, self.lines = self.known.new_child(dict(given or {})), []
        if assumed is not None and isinstance(assumed[0], Node):
            self.path.append(assumed)
        self._share(values)
        found = [self.text(value) for value in values]
        lines = self.lines
        (self.known, self.lines), self.path = outer, path
        return lines, found

    def _share(self, values: Sequence[Any]) -> None:
        """Write what values need on every path, and give names to what is used more than once, or too long."""
        below, needed = self.below(values), self._needed(values)
        uses = Counter(part for node in below for part in (node.parts if node.operation != INPUT else ()))
        uses.update(nodes_in(values))
        for node in below:
            if not needed >> self.place[node] & 1 or node in self.optional | self.barren or node in self.known:
                continue
            while len(self.text(node).words) > LONG and (parts := [one for one in node.parts if self._unnamed(one)]):
                longest = max(parts, key=lambda one: len(self.known[one].words))
                self.known[longest] = self.named(self.known[longest])
                del self.known[node]
            if uses[node] > 1 and self._unnamed(node):
                self.known[node] = self.named(self.known[node])

    def _unnamed(self, node: Node) -> bool:
        """Return True for an expression of the present block that is more than a name."""
        text = self.known.maps[0].get(node)
        return text is not None and not text.words.replace(".", "").isidentifier()

    def fresh(self, wanted: str = "x") -> str:
        """Return a name that nothing has yet."""
        names = (f"{wanted}{at or ''}" for at in count(wanted == "x"))
        name = next(name for name in names if name not in self.used)
        self.used.add(name)
        return name

    def named(self, text: Text) -> Text:
        """Give an expression a name."""
        name = self.fresh()
        self.lines.append(f"{name} = {text.words}")
        return Text(name, ATOM, text.kind)

    # Nodes

    def of_node(self, node: Node) -> Text:
        operation, arguments = node.operation, node.arguments
        match operation:
            case "choice":
                condition, then, otherwise = arguments
                return self.choice(condition, then, otherwise, self.targets.get(node, ""))
            case "loop":
                return self.loop(node)
            case "mapped":
                return self.mapped(*arguments)
            case "same":
                return self.text(arguments[0])
            case "tensor":
                return self.tensor(self.text(arguments[0]))
            case "item":
                return self.item(*arguments)
            case "attribute":
                owner, name = self.text(arguments[0]).within(ATOM), arguments[1]
                kind = "numbers" if name == "shape" else "tensor"
                return Text(f"{owner}.{name}" if name in ATTRIBUTES else "None", ATOM, kind)
            case "written":
                return self.changed(*arguments)
        if operation in TEMPLATES:
            template, kind = TEMPLATES[operation]
            words = [self.text(one).words for one in (arguments if "{1}" in template else ())]
            return Text(template.format(*words, all=self.listed(arguments, node.named)), ATOM, kind)
        if operation == "not" and arguments[0].operation not in OPPOSITE and self.text(arguments[0]).kind == "tensor":
            return Text(f"torch.logical_not({self.text(arguments[0]).words})")
        if operation in BINDING:
            return self.operator(operation, arguments)
        if operation in FUNCTIONS:
            return self.called(node)
        raise UnknownError(node)

    def entries(self, values: Iterable[Any]) -> str:
        """Return the entries of a container; one that may be absent is a list of none or one."""
        return self.listed([self._entry(one) if self.is_optional(one) else one for one in values])

    def _entry(self, node: Node) -> Text:
        then, otherwise = ([] if _is_absent(arm) else [arm] for arm in node.arguments[1:])
        return Text(f"*{self.choice(node.arguments[0], then, otherwise).within(5)}")

    def called(self, node: Node) -> Text:
        name, arguments = node.operation, list(node.arguments)
        kinds = {self.text(one).kind for one in arguments}
        # A number, a truth and what no gradient reaches need not be detached, and numbers cannot be.
        still = node not in self.flowing or (arguments and self.text(arguments[0]).binding in BOOLEAN)
        if (name in ("detach", "clone") and kinds == {"number"}) or (name == "detach" and still):
            return self.text(arguments[0])
        if name in ("max", "min", "abs", "bool") and kinds == {"number"}:
            return Text(f"{name}({self.listed(arguments)})", ATOM, "number")
        # Torch takes numbers in few places, and as float32.
        if name == "stack" and isinstance(arguments[0], list):
            arguments[0] = [one if self.is_optional(one) else self.tensor(self.text(one)) for one in arguments[0]]
        elif name in NUMBERS and kinds == {"number"}:
            arguments = [self.tensor(self.text(one)) for one in arguments]
        elif name == "clamp":
            arguments[0] = self.tensor(self.text(arguments[0]))
        elif name == "where" and len(arguments) == 3 and _joined(map(self.text, arguments[1:])) == "number":
            arguments[1:] = [self.tensor(self.text(one)) for one in arguments[1:]]
        modules = ("F", "torch") if name in FUNCTIONAL else ("torch", "F")
        module = next((module for module in modules if hasattr(MODULES[module], name)), "")
        kind = "list" if name in LISTS else "number" if name == "numel" else "tensor"
        if arguments and (not module or (name in METHODS and self.text(arguments[0]).kind == "tensor")):
            module, *arguments = self.text(arguments[0]).within(ATOM), *arguments[1:]
        return Text(f"{module}.{name}({self.listed(arguments, node.named)})", ATOM, kind)

    def tensor(self, text: Text) -> Text:
        """Return an expression as the argument of a function that takes no numbers."""
        return text if text.kind == "tensor" else Text(f"torch.tensor({text.words}, dtype=torch.float64)")

    def changed(self, owner: Any, key: Any, value: Any) -> Text:
        """Return the variable of a copy, one entry of which is changed."""
        text = self.text(owner)
        copied = f"list({text.words})" if text.kind == "list" else f"{text.within(ATOM)}.clone()"
        changed = self.named(Text(copied, ATOM, text.kind))
        self.lines.append(f"{self.item(changed, key).words} = {self.text(value).words}")
        return changed

    def choice(self, condition: Any, then: Any, otherwise: Any, target: str = "") -> Text:
        """Return a choice as an expression; as a variable of an `if` statement where an arm needs statements."""
        if (holds := self.decided(condition)) is not None:
            return self.text(then if holds else otherwise)
        test, name = self.text(condition), target or self.fresh()
        arms = []
        for arm, holds in ((then, True), (otherwise, False)):
            self.path.append((condition, holds))
            value = self.taken(arm)
            self.path.pop()
            if isinstance(value, Node):
                self.targets[value] = name
            barren = self.is_barren(value)
            arms.append((["raise ValueError"], []) if barren else self.inside([value], {}, (condition, holds)))
            if isinstance(value, Node):
                del self.targets[value]
        if not any(lines for lines, _ in arms):
            self.used -= {name} - {target}
            return self.conditional(test, *(value for _, (value,) in arms))
        blocks = [[*lines, *(f"{name} = {one.words}" for one in value if one.words != name)] for lines, value in arms]
        first, *rest = blocks[1]
        chained = first.startswith("if ") and all(line.startswith((" ", "elif ", "else:")) for line in rest)
        self.lines += [f"if {test.words}:", *_indented(blocks[0])]
        self.lines += [f"el{first}", *rest] if chained else ["else:", *_indented(blocks[1])]
        return Text(name, ATOM, _joined(one for _, value in arms for one in value))

    def taken(self, value: Any) -> Any:
        """Return what a value is on the present path: choices that it decides are made."""
        while isinstance(value, Node) and value.operation == CHOICE and value not in self.known:
            condition, then, otherwise = value.arguments
            if (holds := self.decided(condition)) is None:
                break
            value = then if holds else otherwise
        return value

    def decided(self, condition: Any) -> bool | None:
        """Return what a condition is on the present path, None if that is open."""
        if not isinstance(condition, Node):
            return bool(condition)
        found = (implied(condition, one, holds) for one, holds in reversed(self.path))
        return next((held for held in found if held is not None), None)

    def iterated(self, items: Any) -> tuple[str, Text]:
        """Return the head of a loop, and the name of what it goes over."""
        text = self.text(items)
        item = Text(self.fresh("item"), ATOM, _entry_of(text))
        lazy = isinstance(items, Node) and items.operation in ("zip", "enumerate") and text.words.startswith("list(")
        return f"for {item.words} in {text.words[5:-1] if lazy else text.within(1)}", item

    def mapped(self, items: Any, element: Node, value: Any, kept: Sequence[Any]) -> Text:
        """Return a list comprehension; the variable of a loop that appends where an entry needs statements."""
        head, item = self.iterated(items)
        lines, (entry, *tests) = self.inside([value, *kept], {element: item})
        condition = f"if {' and '.join(test.within(BINDING['not']) for test in tests)}" if tests else ""
        if not lines:
            self.used.remove(item.words)
            return Text(f"[{' '.join(filter(None, (entry.words, head, condition)))}]", kind="list")
        found = self.named(Text("[]", kind="list"))
        appended = f"{found.words}.append({entry.words})"
        self.lines += [f"{head}:", *_indented([*lines, f"{condition}: {appended}" if tests else appended])]
        return found

    def loop(self, node: Node) -> Text:
        """Return the variable of a loop, after the loop; what others of its variables need is carried along."""
        items, element, before, carried, after, place = node.arguments
        same = [one for one in self.nodes if one.operation == "loop" and one.arguments[:-1] == node.arguments[:-1]]
        places = carried_along(carried, after, {one.arguments[-1] for one in same})
        state: dict[int, Text] = {}
        for at in places:
            begun = self.text(before[at])
            # What is a number before the loop may be a tensor after its first pass.
            kind = "tensor" if begun.kind == "number" else begun.kind
            state[at] = Text(self.fresh(carried[at].arguments[1]), ATOM, kind)
            self.lines.append(f"{state[at].words} = {begun.words}")
        head, item = self.iterated(items)
        given = {element: item, **{carried[at]: text for at, text in state.items()}}
        lines, values = self.inside([after[at] for at in state], given)
        changed = f"{', '.join(one.words for one in state.values())} = {', '.join(one.words for one in values)}"
        self.lines += [f"{head}:", *_indented([*lines, changed])]
        self.known.update({one: state[one.arguments[-1]] for one in same})
        return state[place]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _is_absent(value: Any) -> bool:
    return isinstance(value, Node) and value.operation == INPUT and value.arguments == (ABSENT,)


class _Formula(_Writer):
    """Mathematics for people: where a tensor lies, how it is shaped and how it is stored is left out."""

    symbols: Mapping[str, str] = {"*": "·", "-": " − ", "negated": "−", "inverted": "¬", "not": "not ", "**": "^"} | {
        **{"==": " = ", "!=": " ≠ ", "<=": " ≤ ", ">=": " ≥ "},
    }

    def __init__(self, result: Any, leaves: Mapping[Node, str], symbols: Mapping[str, str]) -> None:
        named = {node: symbols.get(name, name) for node, name in leaves.items()}
        # A symbol of two words, as log π, is an operand of products but not of powers.
        super().__init__(result, {node: Text(one, NEGATED if " " in one else ATOM) for node, one in named.items()})
        # Nodes that carry a gradient.
        self.carrying = {node for node, name in leaves.items() if name not in WITHOUT_GRADIENT}
        for node in self.nodes:
            stops = node.operation == "detach" and node in self.flowing
            if not stops and any(part in self.carrying for part in node.parts):
                self.carrying.add(node)

    def line(self, result: Any) -> str:
        """Return the formula; what is long and used more than once is written out behind it."""
        uses = Counter(part for node in self.nodes for part in node.parts)
        parts: list[str] = []
        for node in self.nodes:
            text = self.text(node)
            if uses[node] > 1 and len(text.words) > REPEATED:
                self.known[node] = Text(f"x{len(parts) + 1}")
                parts.append(f"{self.known[node].words} = {text.words}")
        return f"{self.text(result).words}{', where ' * bool(parts)}{', '.join(parts)}"

    def number(self, value: float) -> str:
        words = {math.inf: "∞", -math.inf: "−∞"}.get(value, repr(value))
        return words.removesuffix(".0").replace("-", "−")

    def of_node(self, node: Node) -> Text:
        operation, arguments = node.operation, node.arguments
        if not node.named:
            operation = SIGNS.get(operation, operation)
        match operation, arguments:
            case "input", ("carried", name, *_):
                return Text(str(name))
            case "input", (name, *_):
                return Text(str(name))
            case "choice", _:
                return self.conditional(*map(self.text, arguments))
            case "detach", (inner,):
                stops = node in self.flowing and isinstance(inner, Node) and inner in self.carrying
                return Text(f"sg({self.text(inner).words})") if stops else self.text(inner)
            case "item", (owner, key):
                return self.item(owner, key)
            case "attribute", (owner, name):
                return Text(f"{self.text(owner).within(ATOM)}.{name}")
            case "abs", (inner,):
                return Text(f"|{self.text(inner).words}|")
            case "square", (inner,):
                return self.operator("**", (inner, 2))
            case "mapped", (items, element, value, kept):
                tests = "".join(f" if {self.text(one).within(1)}" for one in kept)
                return Text(
                    f"[{self.text(value).words} for {self.text(element).words} in {self.text(items).words}{tests}]"
                )
            case "loop", (items, element, before, carried, after, place):
                return self.loop(items, element, before[place], carried[place], after[place])
            case "call", (str(name), *rest):
                return Text(f"{name}({self.listed(rest, node.named)})")
            case "method", (owner, str(name), *rest):
                return Text(f"{self.text(owner).within(ATOM)}.{name}({self.listed(rest, node.named)})")
        if operation in SILENT:
            return self.text(arguments[0])
        if operation in BINDING:
            return self.operator(operation, arguments)
        named = [one for one in node.named if one[0] not in STORED]
        return Text(f"{BUILTINS.get(operation, operation)}({self.listed(arguments, named)})")

    def loop(self, items: Any, element: Any, before: Any, carried: Any, after: Any) -> Text:
        """Return what a loop adds up, or how it changes a variable."""
        over = f"{self.text(element).words} in {self.text(items).words}"
        added = after.arguments if isinstance(after, Node) and after.operation == "+" else ()
        if carried in added and (rest := [one for one in added if one is not carried]):
            total = Text(f"sum({self.text(rest[0]).words} for {over})")
            return self.operator("+", (before, total))
        name = self.text(carried).words
        return Text(f"({name} → {self.text(after).words} for {over}, from {self.text(before).words})")

    def operator(self, name: str, arguments: Sequence[Any]) -> Text:
        """Return an operation without summands of zero and factors of one; squares and cubes as such."""
        left, right = arguments if len(arguments) == 2 else (arguments[0], None)
        if (name in ("*", "/", "**") and _is(right, 1)) or (name in ("+", "-") and _is(right, 0)):
            return self.text(left)
        if (name == "*" and _is(left, 1)) or (name == "+" and _is(left, 0)):
            return self.text(right)
        if name == "-" and _is(left, 0):
            return self.operator("negated", (right,))
        if name == "negated" and isinstance(left, Node) and left.operation in ("negated", "neg"):
            return self.text(left.arguments[0])
        if name == "**" and (_is(right, 2) or _is(right, 3)):
            return Text(f"{self.text(left).within(ATOM)}{'²' if right == 2 else '³'}", BINDING[name])
        return super().operator(name, arguments)


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int | float) and value == number

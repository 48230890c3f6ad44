"""Facts of nodes: whose probabilities they are made of, in which quantity, and which of them are fields of a rollout.

A name says whose something is and in which quantity only where nothing is computed: a parameter, a field, what an
unknown function returns. Everything else follows from the operations: what is gathered by tokens from a log-softmax is
a log-prob of the token, a softmax is a distribution over the vocabulary, their difference is one of two sides.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from kltest.symbolic.operations import ATTRIBUTES, CONDITIONS, is_constant, words_of
from kltest.symbolic.values import ABSENT, CHOICE, INPUT, Graph, Node, nodes_in, reached, under, walked
from kltest.symbolic.words import (
    ADVANTAGE,
    COUNTS,
    POLICY,
    REFERENCE,
    SAMPLER,
    TOKENS,
    Side,
    is_mask,
    is_of_reference,
    is_ratio,
    says,
    side,
    whose,
    words,
)

# Quantities of one side.
LOGITS, LOGITS_AT, NORMALISER = "logits", "logit of the token", "log-normaliser"
LOG_PROBS, PROBS = "log-probs", "probabilities"
# Of a softmax that is written out: exp(logits), their sum, the largest logit.
POWERS, TOTAL, PEAK = "exponentials of logits", "sum of exponentials", "largest logit"
LOG_PROB, PROB, LOSS = "log-prob of the token", "probability of the token", "negative log-prob of the token"
# Of the likeliest tokens alone, whose numbers are known: the last.
TOP_LOG_PROBS, TOP_PROBS, TOP = "log-probs of the likeliest", "probabilities of the likeliest", "the likeliest tokens"
# Others.
MASK, PADDING, TOKEN, REWARD, RATIO = "mask", "padding", "token", "reward", "ratio"
INFINITE = "marks of infinite logits"
VOCABULARY = frozenset({LOGITS, LOG_PROBS, PROBS, TOP_LOG_PROBS, TOP_PROBS})
FIELD = VOCABULARY | {LOG_PROB, PROB, LOSS}
WRITTEN_OUT = frozenset({LOGITS_AT, NORMALISER, POWERS, TOTAL, PEAK})

GUARD = 1e-4
"""The largest number that keeps a probability from zero."""
OPAQUE = frozenset({INPUT, "attribute", "call", "method", "unread", "generator"})
CALLS = frozenset({"call", "method"})
# Operations that choose, order or copy entries: what they return is what they are given.
MOVES = words_of(
    """
    broadcast_to cat chunk clone detach expand expand_as flatten flip fliplr index_select item masked_select
    movedim narrow pad permute repeat repeat_interleave reshape roll same select split squeeze stack
    tensor_split tile transpose tuple list unbind unflatten unsqueeze view view_as starred zip enumerate
    reversed broadcast_tensors tensor
    """
) | {"while loop"}
# Words of names that tell two parameters apart of which nothing else says whose they are; the second is the reference.
TWINS = (("s", "t"), ("a", "b"))
TARGET = "target"
"""What a policy is drawn to, beside probabilities that are not called that."""
SUPPORT = ("topk", "top", "support", "sparse", "candidate")
"""What names of several tokens of the vocabulary say."""
RENORMALISED = "renorm"
"""What names of probabilities say that are made to sum to one over several tokens."""
INDEX = words_of("ids indices index idx inds tokens support")
# Owners of every model alike, and what loads each of them.
HOSTS = ("self", "trainer", "learner", "from_pretrained")
# Methods that lay out rollouts of several lengths, which a tensor holds side by side, in another way.
LAID_OUT = words_of("values to_padded_tensor")
# Of which only the shape of a value is read.
SHAPES = ATTRIBUTES - {"T", "mT"}
LIKE = words_of("len size dim numel zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty")
GATHERS = frozenset({"gather", "take_along_dim"})
# What draws tokens, from whatever order of the vocabulary they are drawn.
DRAWS = GATHERS | {"multinomial", "categorical", "sample", "generate", "argmax"}
# Products with a matrix, as that by which a model makes logits of hidden states.
HEADS = words_of("@ matmul mm bmm linear")
# Operations on each entry of values of one shape, and those that leave a value one side's.
ENTRYWISE = words_of(
    "- sub * mul + add / div kl_div xlogy where exp log clamp detach neg negated masked_fill nan_to_num"
)
# What puts numbers in the place of some entries, or keeps entries from a limit.
MASKING = words_of("where masked_fill nan_to_num clamp")
# Tensors of zeros, and empty ones.
BLANK = words_of("zeros zeros_like new_zeros")
SOFTMAXES = words_of("log_softmax softmax")
STEPS = SOFTMAXES | words_of("log exp / div * mul clamp") | MOVES


@dataclass(frozen=True)
class Fact:
    """What is known of a node.

    Attributes:
        quantity: one of those above; the empty string for what is made of several.
        sides: the prefixes of those whose probabilities are in it.
        rewarded: rewards or advantages are in it.
    """

    quantity: str = ""
    sides: frozenset[str] = frozenset()
    rewarded: bool = False

    @property
    def who(self) -> str:
        """The prefix of the side of a quantity of one side."""
        return next(iter(self.sides))

    @property
    def is_field(self) -> bool:
        """Whether a field of a rollout stands for it."""
        return self.quantity in FIELD and len(self.sides) == 1


NOTHING = Fact()


class Roles:
    """Facts of the nodes of a graph, remembered."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._known: dict[Node, Fact] = {}
        self._flows: dict[Node, frozenset[bool]] = {}
        self._inputs: set[tuple[str, ...]] = set()

    @cached_property
    def _users(self) -> dict[Node, list[Node]]:
        return self.graph.users()

    def of(self, value: Any) -> Fact:
        """Return the facts of a value: those of a node, or what the nodes in a container have together."""
        if not isinstance(value, Node):
            return together([self.of(one) for one in nodes_in(value)])
        stack = [value]
        while stack:
            node = stack[-1]
            if node in self._known:
                stack.pop()
            elif missing := [part for part in parts_of(node) if part not in self._known]:
                stack.extend(missing)
            else:
                self._known[node] = self._fact(node)
        return self._known[value]

    def _fact(self, node: Node) -> Fact:
        if is_opaque(node) or self._is_entry(node) or self._is_head(node):
            return self._stated(node)
        facts = [self._known[part] for part in parts_of(node)]
        whole = together(facts)
        taken = node.operation == "item" and len(facts) == 1
        at = 1 if node.operation == "where" and len(node.arguments) == 3 else 0
        first = facts[0] if taken else self.of(node.arguments[at]) if node.arguments else NOTHING
        quantity = self._quantity(node, first, whole)
        if quantity in (LOG_PROBS, PROBS) and not whole.sides and (forward := _forward(node)) is not None:
            return self._of_side(forward, Side("logits", None), quantity)
        if (quantity in FIELD | WRITTEN_OUT and len(whole.sides) != 1) or (quantity == REWARD and whole.sides):
            quantity = ""
        if quantity in (MASK, PADDING, TOKEN) or node.operation in CONDITIONS:
            return Fact(quantity)
        if len(whole.sides) == 1 and self._is_named_reference(node):
            return Fact(quantity, frozenset({REFERENCE}), whole.rewarded)
        # A position or a condition in it says nothing of whose it is.
        return Fact(quantity, whole.sides, whole.rewarded)

    def _quantity(self, node: Node, first: Fact, whole: Fact) -> str:
        name, before = node.operation, first.quantity
        match name:
            case "log_softmax" | "softmax" if self._is_cut(node.arguments):
                return ""
            case "log_softmax":
                return LOG_PROBS
            case "softmax":
                return PROBS
            case "logsumexp":
                return NORMALISER if before == LOGITS else ""
            case "exp":
                return {LOG_PROBS: PROBS, LOG_PROB: PROB, TOP_LOG_PROBS: TOP_PROBS, LOGITS: POWERS}.get(before, "")
            case "log":
                known = {PROBS: LOG_PROBS, PROB: LOG_PROB, TOP_PROBS: TOP_LOG_PROBS, TOTAL: NORMALISER}
                return known.get(before, "")
            case "max" | "amax":
                return PEAK if before == LOGITS and len(list(parts_of(node))) == 1 else ""
            case "sum" if before == POWERS:
                return TOTAL
            case "neg" | "negated":
                return {LOG_PROB: LOSS, LOSS: LOG_PROB}.get(before, "")
            case "cross_entropy" | "nll_loss":
                targets = self.of(node.arguments[1]) if len(node.arguments) > 1 else NOTHING
                single = dict(node.named).get("reduction") == "none" and not targets.sides
                return LOSS if single else ""
            case "clamp" | "+" if before in (PROBS, PROB, TOP_PROBS) and _is_guard(node):
                return before
            case "*" | "mul" | "where" if before in (LOG_PROBS, LOG_PROB) and self._is_masked(node):
                return before
            case "/" | "div" | "*" | "mul":
                other = self.of(node.arguments[1]) if len(node.arguments) > 1 else NOTHING
                if (before, other.quantity) == (POWERS, TOTAL):
                    return PROBS if name in ("/", "div") else ""
                return LOGITS if before == LOGITS and not (other.sides or other.quantity == MASK) else ""
            case "-" | "sub":
                return self._difference(node, before)
            case "+" | "add" if (before, self.of(node.arguments[-1]).quantity) == (NORMALISER, PEAK):
                return NORMALISER
            case "!=" | "ne" | "==" | "eq":
                same = name in ("==", "eq")
                return {TOKEN: PADDING if same else MASK, MASK: PADDING if same else MASK}.get(before, "")
            case "<" | "<=" | "lt" | "le" | ">" | ">=" | "gt" | "ge":
                return self._of_positions(node, before_end=name in ("<", "<=", "lt", "le"))
            case "not" | "inverted" | "logical_not":
                return {MASK: PADDING, PADDING: MASK}.get(before, "")
            case "&" | "|" | "logical_and" | "logical_or" | "bool":
                return next((one for one in (MASK, PADDING) if one in map(self._quantity_of, node.arguments)), "")
            case "choice" | "loop" | "mapped":
                return self._of_joined(node)
            case "where" | "masked_fill":
                return MASK if {self.of(one).quantity for one in node.parts} == {MASK} else ""
            case "sum":
                return self._selected(node)
            case "appended" if not before:
                return self.of(node.arguments[1]).quantity
            case "scatter":
                return before
            case "written" | "appended":  # a list or a tensor that is filled piece by piece is what it is filled with
                added = self.of(node.arguments[-1])
                return added.quantity if added.is_field and not first.sides else before
        if name in GATHERS:
            if before in VOCABULARY and any(map(self._is_partial, _chosen(index_of(node)))):
                return ""
            return {LOG_PROBS: LOG_PROB, LOGITS: LOGITS_AT, PROBS: PROB}.get(before, before)
        return before if name in MOVES else ""

    def _is_named_reference(self, node: Node) -> bool:
        """Return True for what has no gradient and is named as the reference's: a policy may be its own teacher."""
        stated = [side(name) for name in self.graph.names.get(node, ())] if node.operation == "detach" else []
        return any(one is not None and one.who == REFERENCE for one in stated)

    def _is_entry(self, node: Node) -> bool:
        """Return True for an entry of what nothing is known of, whose own names may say more, and for gathered data."""
        if node.operation == "tensor":
            data = node.arguments[0]
            made = isinstance(data, Node) and data.operation in ("mapped", "loop")
            return made and any(side(name) for name in self.graph.names.get(node, ()))
        if node.operation != "item" or not isinstance(node.arguments[0], Node):
            return False
        owner = node.arguments[0]
        while owner.operation == "detach" and isinstance(owner.arguments[0], Node):
            owner = owner.arguments[0]
        return (is_opaque(owner) or self._is_entry(owner)) and not self._known[owner].quantity

    def _is_head(self, node: Node) -> bool:
        """Return True for logits that a matrix makes of a model's output, which may be called logits itself."""
        inner = under(node.arguments[0], MOVES | {"item"}) if node.operation in HEADS else None
        if not isinstance(inner, Node) or not is_opaque(inner) or self.of(inner).quantity not in ("", LOGITS):
            return False
        return any(stated.quantity == "logits" for name in self.graph.names.get(node, ()) if (stated := side(name)))

    def is_unknown(self, node: Node) -> bool:
        """Return True for what nothing computes."""
        self.of(node)
        return is_opaque(node) or self._is_entry(node) or self._is_head(node)

    def flows(self, node: Node) -> frozenset[bool]:
        """Return whether a gradient flows through a node: both, where that hangs on the branch of a choice."""
        stack = [node]
        while stack:
            one = stack[-1]
            if one in self._flows:
                stack.pop()
            elif one.operation == "detach" or is_carried(one):  # what a loop begins with is a part of its own
                self._flows[one] = frozenset({False})
            elif is_opaque(one):
                self._flows[one] = frozenset({True})
            elif waiting := [part for part in parts_of(one) if part not in self._flows]:
                stack.extend(waiting)
            else:
                found = [self._flows[part] for part in parts_of(one)]
                if one.operation == CHOICE:
                    constants = [frozenset({False})] * (2 - len(found))
                    self._flows[one] = frozenset().union(*found, *constants)
                else:
                    some, none = any(True in each for each in found), all(False in each for each in found)
                    self._flows[one] = frozenset([True] * some + [False] * none)
        return self._flows[node]

    def _quantity_of(self, value: Any) -> str:
        return self.of(value).quantity

    def _difference(self, node: Node, before: str) -> str:
        other = self.of(node.arguments[1]).quantity if len(node.arguments) > 1 else ""
        if other == NORMALISER and before in (LOGITS, LOGITS_AT):
            return LOG_PROBS if before == LOGITS else LOG_PROB
        plain = other == "" and not self.of(node.arguments[-1]).sides
        return LOGITS if before == LOGITS and (plain or other == PEAK) else ""

    def _of_positions(self, node: Node, *, before_end: bool) -> str:
        """Return whether a comparison of positions with lengths marks tokens or padding."""
        one, *others = (isinstance(each, Node) and _is_position(each) for each in node.arguments)
        return "" if one in others or not others else MASK if one == before_end else PADDING

    def _of_joined(self, node: Node) -> str:
        parts = [one for one in parts_of(node) if one.arguments != (ABSENT,)]
        if is_filled(node):
            parts = [one for one in parts if self.of(one).sides]
        if node.operation == CHOICE:  # what is returned for no tokens is empty
            parts = [one for one in parts if under(one, {"detach"}).operation not in BLANK]
        found = {self.of(one).quantity for one in parts}
        return found.pop() if len(found) == 1 else ""

    def _is_masked(self, node: Node) -> bool:
        """Return True for log-probs that are so called after a mask of another name has made some of them zero."""
        *masks, zero = node.arguments[::2] if node.operation == "where" else (node.arguments[1], 0)
        named = any(side(name) for name in self.graph.names.get(node, ()))
        (mask,) = masks
        shaped = isinstance(mask, Node) and mask.operation in MOVES | {"item"} and not self.of(mask).sides
        return named and zero == 0 and shaped and self.of(mask).quantity == "" and not self.of(mask).rewarded

    def _selected(self, node: Node) -> str:
        """Return the log-prob of a token for a sum of products with its one-hot vector."""
        product = node.arguments[0]
        if isinstance(product, Node) and product.operation in ("*", "mul"):
            one, other = product.arguments
            for values, chosen in ((one, other), (other, one)):
                if isinstance(chosen, Node) and any(each.operation == "one_hot" for each in reached(chosen)):
                    return {LOG_PROBS: LOG_PROB, LOGITS: LOGITS_AT, PROBS: PROB}.get(self.of(values).quantity, "")
        return ""

    def _is_cut(self, values: Any) -> bool:
        """Return True for what has some tokens of the vocabulary alone, in some configuration."""
        for one in made_of(values, ENTRYWISE | MOVES | {CHOICE}):
            if one.operation in ("sort", "topk") or self.of(one).quantity in (TOP_LOG_PROBS, TOP_PROBS):
                return True
            if one.operation in GATHERS and any(map(self._is_partial, _chosen(index_of(one)))):
                return True
        return False

    def _is_partial(self, node: Node) -> bool:
        """Return True for an index of the vocabulary in another order, or of its likeliest tokens."""
        return node.operation in ("sort", "topk") or self.of(node).quantity == TOP

    # What nothing computes

    def names(self, node: Node) -> Iterator[str]:
        """Yield the names of a node that nothing computes, its own first."""
        if own := own_name(node):
            yield own
        yield from self.graph.names.get(node, ())

    def _stated(self, node: Node) -> Fact:
        """Return what the names of a node say that nothing computes."""
        if is_counter(node) or isinstance(self.graph.defaults.get(node), bool | str):  # an option, whatever its name
            return NOTHING
        if node in self.graph.facts:
            return self.graph.facts[node]
        if node.operation == "method" and node.arguments[1] in LAID_OUT and self.of(node.arguments[0]).quantity:
            return self.of(node.arguments[0])
        rewarded = False
        if node.operation == "attribute" and _is_generated(node):
            return self._of_side(node, Side("logits", None))
        for name in self.names(node):
            if is_mask(name):
                joined = [user for user in self._users.get(node, ()) if user.operation == "|"]
                if any(one.operation == "isinf" for one in reached(joined)):
                    return Fact(INFINITE)
                return Fact(PADDING if says(name, "pad", "invalid") else MASK)
            if is_ratio(name):
                return Fact(RATIO, frozenset({POLICY, SAMPLER}))
            if stated := side(name):
                return self._of_side(node, stated)
            rewarded = rewarded or says(name, *ADVANTAGE)
        if rewarded:
            # What an unknown function makes of two sides is no reward that is given, whatever it is called.
            given = together([self.of(one) for one in node.arguments]) if node.operation in CALLS else NOTHING
            return Fact("", given.sides, rewarded=True) if len(given.sides) > 1 else Fact(REWARD, rewarded=True)
        named = any(says(name, *SUPPORT) and INDEX.intersection(words(name)) for name in self.names(node))
        if named or self._selects_several(node):
            told = (whose(name) for name in (*self.names(node), *_origin(node)))
            return Fact(TOP, frozenset({next((who for who in told if who is not None), REFERENCE)}))
        if any(map(is_of_reference, self._logarithms(node))):
            return self._of_side(node, Side("prob", REFERENCE))
        if any(TOKENS.intersection(words(name)) and not COUNTS.intersection(words(name)) for name in self.names(node)):
            return Fact(TOKEN)
        if node.operation == "method" and node.arguments[1] == "log_prob":
            return self._of_side(node, Side("logp", None))
        if node.operation == "item":
            return self.of(node.arguments[0])
        if node.operation in CALLS:
            given = together([self.of(one) for one in (*node.arguments, *(value for _, value in node.named))])
            made = self._log_probs_of(node) if len(given.sides) < 2 else None
            return given if made is None else self._of_side(node, *made)
        return NOTHING

    def _of_side(self, node: Node, stated: Side, quantity: str = "") -> Fact:
        who = stated.who
        told = [*self.names(node), *_origin(node), *self._chains(node)]
        if who is None:
            named = map(whose, (*told, *self._becomes(node)))
            who = next((found for found in named if found is not None), None)
        if who is None:
            who = REFERENCE if self._is_second(own_name(node)) else POLICY
        quantity = quantity or {"logp": LOG_PROB, "logits": LOGITS, "prob": PROB}[stated.quantity]
        of_several = any(says(name, *SUPPORT) for name in self.names(node) if side(name))
        if of_several or self._is_to_be_renormalised(node) or self._meets_support(node):
            return Fact(TOP_PROBS if quantity == PROB else TOP_LOG_PROBS, frozenset({who}))
        said = any(says(name, "vocab", "dist", "all") for name in told[:1])
        if quantity in (LOG_PROB, PROB) and (said or self._meets_distribution(node)):
            quantity = {LOG_PROB: LOG_PROBS, PROB: PROBS}[quantity]
        return Fact(quantity, frozenset({who}))

    def _is_second(self, name: str) -> bool:
        """Return True for the second of two parameters whose names differ in what twins are told apart by."""
        if not self._inputs:
            nodes = [node for node in self.graph.nodes if node.operation == INPUT]
            self._inputs = {words(own_name(node)) for node in nodes} | {()}
        found = words(name)
        firsts = {tuple(mine if one == other else one for one in found) for mine, other in TWINS if other in found}
        if any(tuple(word for word in first if word) in self._inputs - {()} for first in firsts):
            return True
        others = [side(" ".join(one)) for one in self._inputs if TARGET not in one]
        return TARGET in found and any(one is not None and one.who in (None, POLICY) for one in others)

    def _becomes(self, node: Node) -> Iterator[str]:
        """Yield the names of what is made of a node alone: teacher_logits for a scaled input.

        What is used with its gradient as well is not what its copies without one are called: a reference that is not
        given may be the policy's own.
        """

        def made(one: Node) -> Iterator[Node]:
            users = self._users.get(one, [])
            steps = STEPS - {"detach"} if any(user.operation != "detach" for user in users) else STEPS
            return (user for user in users if user.operation in steps and one in user.arguments[:1])

        for user in islice(walked([node], made), 1, None):
            yield from self.graph.names.get(user, ())

    def _log_probs_of(self, node: Node) -> tuple[Side, str] | None:
        """Return whose log-probs of tokens, or logits, a call gives, if what is made of it by moves is called that."""
        stack = [(node, LOG_PROB)]
        for one, quantity in stack:
            for user in self._users.get(one, ()):
                denied = user.operation in ("neg", "negated")
                if user.operation == "item" and is_constant(user.arguments[1]):
                    continue  # what one entry is called says nothing of the others
                if user.arguments[0] is one and (denied or user.operation in MOVES | {"item"}):
                    its = {LOG_PROB: LOSS, LOSS: LOG_PROB}[quantity] if denied else quantity
                    stated = [side(name) for name in self.graph.names.get(user, ())]
                    if found := next((each for each in stated if each and each.quantity == "logp"), None):
                        return found, its
                    if not denied and (found := next((each for each in stated if each), None)):
                        return found, LOGITS if found.quantity == "logits" else ""
                    stack.append((user, its))
        return None

    def _meets_distribution(self, node: Node) -> bool:
        """Return True for what is computed with a distribution entry by entry, and what tokens are looked up in."""
        made = list(self._makes(node, ENTRYWISE))
        gathered = ((one, user) for one in made for user in self._users.get(one, ()) if user.operation in GATHERS)
        if any(user.arguments[0] is one and self._is_of_tokens(index_of(user)) for one, user in gathered):
            return True
        return any(_is_distribution(other) for one in made[1:] for other in one.parts if other not in made)

    def _selects_several(self, node: Node) -> bool:
        """Return True for an index that gathers of the vocabulary as it is, and not one token, which is squeezed."""
        for user in self._users.get(node, ()):
            if user.operation in GATHERS and index_of(user) is node:
                ends = [*self._users.get(user, ())]
                single = any(one.operation in ("squeeze", "item") and not _is_mask_of(one) for one in ends)
                stated = [side(name) for name in self.names(user.arguments[0])]
                of_logits = any(one is not None and one.quantity == "logits" for one in stated)
                if not single and (of_logits or _is_distribution(user.arguments[0])):
                    return True
        return False

    def _meets_support(self, node: Node) -> bool:
        """Return True for what is computed entry by entry with what is gathered of several tokens."""
        made = list(self._makes(node, ENTRYWISE | MOVES))
        return any(self._is_of_support(other) for one in made[1:] for other in one.parts if other not in made)

    def _makes(self, node: Node, operations: Collection[str]) -> Iterator[Node]:
        """Yield a node and what some operations make of it."""
        return walked([node], lambda one: (user for user in self._users.get(one, ()) if user.operation in operations))

    def is_renormalised(self, node: Node) -> bool:
        """Return True for probabilities that sum to one over several tokens, by what their logarithm is called."""
        return any(says(name, RENORMALISED) for name in self._logarithms(node))

    def _is_to_be_renormalised(self, node: Node) -> bool:
        """Return True for log-probs of which a softmax is called renormalised: they are of several tokens."""
        operations = MASKING | MOVES | SOFTMAXES
        softmaxes = [one for one in self._makes(node, operations) if one.operation in SOFTMAXES and one is not node]
        made = (each for one in softmaxes for each in self._makes(one, operations))
        return any(says(name, RENORMALISED) for one in made for name in self.graph.names.get(one, ()))

    def _logarithms(self, node: Node) -> Iterator[str]:
        """Yield the names of the logarithm of a node, as it is or where it is kept from infinity."""

        def made(one: Node) -> Iterator[Node]:
            users = (user for user in self._users.get(one, ()) if user.operation in MASKING | MOVES | {"log"})
            return (user for user in users if user.operation != "item" or not isinstance(user.arguments[1], str))

        logarithms = [one for one in walked([node], made) if one.operation == "log"]
        for one in walked(logarithms, made):
            if one is not node:
                yield from self.graph.names.get(one, ())

    def _is_of_support(self, node: Node) -> bool:
        """Return True for what is gathered by an index of several tokens, and what is computed of it entry by entry."""
        made = list(made_of(node, ENTRYWISE | MOVES | SOFTMAXES))
        if any(is_opaque(one) and self._is_to_be_renormalised(one) for one in made):
            return True
        indices = (each for one in made if one.operation in GATHERS for each in nodes_in(index_of(one)))
        return any(is_opaque(each) and self._selects_several(each) for each in indices)

    def _is_of_tokens(self, index: Any) -> bool:
        """Return True for an index that is named as tokens, or as a support of several."""
        ends = [one for one in reached(index) if is_opaque(one)]
        return any(INDEX.intersection(words(name)) for one in ends for name in self.names(one))

    def _chains(self, node: Node) -> Iterator[str]:
        """Yield the names of what a call is given, also for an entry of what it returns: whose model it is."""
        while node.operation in ("item", "attribute") and isinstance(node.arguments[0], Node):
            node = node.arguments[0]
        given = list(nodes_in((*node.arguments, *(value for _, value in node.named))))
        for part in given:
            if self.of(part).quantity in (TOKEN, MASK, PADDING):
                continue  # who drew the tokens says nothing of whose model they are given to
            if part.operation in OPAQUE:
                yield ".".join(_origin(part))
            elif part.operation in ("detach", CHOICE):
                given += [one for one in parts_of(part) if one not in given]
        yield from (value for _, value in node.named if isinstance(value, str))


def own_name(node: Node) -> str:
    """Return the name that a node has of itself: of a parameter, field, key, or what was called."""
    match node.operation, node.arguments:
        case "input", (str(name), *_):
            return "" if is_counter(node) else name
        case "attribute", (_, str(name)):
            return name
        case "item", (_, str(name)):
            return name
        case "call", (callee, *_):
            return own_name(callee) if isinstance(callee, Node) else str(callee).rpartition(".")[2]
        case "method", (_, str(name), *_):
            return name
        case _:
            return ""


def _is_generated(node: Node) -> bool:
    """Return True for the logits of a model that generates, which are called scores."""
    owner, name = under(node.arguments[0], MOVES | {"detach"}), node.arguments[1]
    return name == "scores" and isinstance(owner, Node) and owner.operation in CALLS and own_name(owner) == "generate"


def _forward(node: Node) -> Node | None:
    """Return the unknown call, as that of a model, of which a node is the softmax; None if it is of something else."""
    inner = under(node, MOVES | {"log_softmax", "softmax", "/", "div"})
    return inner if isinstance(inner, Node) and inner.operation in CALLS else None


def _origin(node: Any) -> list[str]:
    """Return the names of a chain of attributes, entries and calls, and of the contexts that it was made within."""
    found: list[str] = []
    while isinstance(node, Node):
        found.append(own_name(node))
        found += [str(one) for one in dict(node.named).get("within", ())]
        node = next(parts_of(node), None) if node.operation == CHOICE else next(iter(node.arguments), None)
    return [name for name in found if name and name not in HOSTS]


def is_counter(node: Node) -> bool:
    """Return True for an input that a loop fills: its index, or what a pass carries to the next."""
    return is_carried(node) or (node.operation == INPUT and node.arguments[0] == "item")


def is_carried(value: Any) -> bool:
    """Return True for what a pass of a loop has from the one before."""
    return isinstance(value, Node) and value.operation == INPUT and value.arguments[0] == "carried"


def is_opaque(node: Node) -> bool:
    """Return True for what nothing computes: a parameter, a field, an entry under a name, an unknown call."""
    if node.operation == "item":
        return isinstance(node.arguments[1], str)
    return node.operation in OPAQUE and not (node.operation == "attribute" and node.arguments[1] in ATTRIBUTES)


def parts_of(node: Node) -> Iterator[Node]:
    """Yield the nodes that say what a node is made of: no conditions, and of a loop what it leaves behind."""
    if node.operation == CHOICE:
        yield from nodes_in(node.arguments[1:])
    elif node.operation == "loop":
        *_, before, _, after, place = node.arguments
        yield from nodes_in((before[place], after[place]))
    elif node.operation == "mapped":
        yield from nodes_in(node.arguments[2])
    elif node.operation == "written":
        yield from nodes_in((node.arguments[0], node.arguments[2]))
    elif node.operation == "where":
        yield from nodes_in(node.arguments[1:])
    elif node.operation == "item" and (entries := _gathered(node)):
        yield from nodes_in(entries)
    elif node.operation in ("item", *GATHERS, "index_select", "expand_as", "view_as"):
        yield from nodes_in(node.arguments[:1])
    elif node.operation == "attribute" and node.arguments[1] in SHAPES:
        return
    elif node.operation not in (INPUT, *LIKE):
        yield from node.parts


def is_filled(node: Node) -> bool:
    """Return True for a tensor that a loop fills: what is written at some places in each pass."""
    after = node.arguments[4][node.arguments[5]] if node.operation == "loop" else None
    return isinstance(after, Node) and after.operation == "written"


def _is_guard(node: Node) -> bool:
    """Return True for a clamp, or a number added, that keeps a probability from zero and does nothing else."""
    limits = dict(zip(("min", "max"), node.arguments[1:], strict=False)) | dict(node.named)
    least, most = limits.get("min"), limits.get("max", 1)
    return isinstance(least, float) and 0 <= least <= GUARD and isinstance(most, int | float) and most >= 1 - GUARD


def _is_position(node: Node) -> bool:
    """Return True for the numbers of the tokens of rollouts: an `arange`, however it is laid out."""
    while node.operation in MOVES | {"detach"} and isinstance(node.arguments[0], Node):
        node = node.arguments[0]
    return node.operation in ("arange", "+", "add") and any(one.operation == "arange" for one in reached(node))


def _is_mask_of(node: Node) -> bool:
    """Return True for entries that a tensor selects, as a mask does."""
    return node.operation == "item" and isinstance(node.arguments[1], Node)


def _is_distribution(node: Node) -> bool:
    """Return True for a softmax, and for what is computed of one entry by entry."""
    return any(one.operation in SOFTMAXES for one in made_of(node, ENTRYWISE))


def made_of(value: Any, operations: Collection[str]) -> Iterator[Node]:
    """Yield the nodes in a value and what some operations make them of."""
    return walked(nodes_in(value), lambda one: one.parts if one.operation in operations else ())


def _gathered(node: Node) -> list[Any]:
    """Return what an item of an entry of a list may be that a loop fills with tuples."""
    owner, key = under(node.arguments[0], {"detach"}), node.arguments[1]
    if not (isinstance(key, int) and isinstance(owner, Node) and owner.operation == "item"):
        return []
    items, entry = owner.arguments[0], None
    match items:
        case Node(operation="mapped"):
            entry = items.arguments[2]
        case Node(operation="loop"):
            *_, after, place = items.arguments
            filled = after[place]
            entry = filled.arguments[1] if isinstance(filled, Node) and filled.operation == "appended" else None
    return [entry[key]] if isinstance(entry, tuple) and key < len(entry) else []


def _chosen(index: Any) -> set[Node]:
    """Return what an index of the vocabulary is made of, without that of which tokens are drawn."""
    drawn = {one for one in reached(index) if (own_name(one) if one.operation in CALLS else one.operation) in DRAWS}
    return reached(index, known=drawn)


def index_of(node: Node) -> Any:
    """Return the index by which a node gathers entries."""
    named = dict(node.named)
    place = 2 if node.operation == "gather" else 1
    return named.get("index", named.get("indices", node.arguments[place] if len(node.arguments) > place else None))


def together(facts: list[Fact]) -> Fact:
    """Return what values have together that are computed with each other."""
    sides = frozenset(one for fact in facts for one in fact.sides)
    return Fact("", sides, any(fact.rewarded for fact in facts))

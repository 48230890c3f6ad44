"""Evaluation of calls: of a function that is known by name, of one of the tree, or of one that is not known."""

import ast

from kltest.scanning.callees import Function
from kltest.scanning.expressions import Expressions
from kltest.scanning.flows import (
    ABSOLUTE,
    DIVERGENCE,
    ENTROPY,
    KL_LIKE,
    LOG_RATIO,
    NOTHING,
    OTHER,
    RATIO,
    SQUARE,
    Flow,
    Value,
    joined,
    mixed,
    multiplied,
)
from kltest.scanning.sides import REWARD, Side, side, who_of
from kltest.scanning.syntax import NUMBERS, chain, identifiers
from kltest.scanning.vocabulary import WORDS
from kltest.symbolic.words import says, says_kl, words

_SAME = WORDS["same"]
"""Calls that leave what they are given what it is."""
_PREFERS = frozenset({"logsigmoid", "sigmoid", "relu", "softplus", "binary_cross_entropy_with_logits", "log_sigmoid"})
_DROPS = frozenset({"zeros_like", "ones_like", "append_metric", "print", "len", "shape", "isnan"})
_TURNS: dict[str, tuple[str, dict[str, str]]] = {
    **dict.fromkeys(("exp", "exp_", "expm1", "exp2"), ("prob", {"log_ratio": RATIO})),
    **dict.fromkeys(("log", "log_"), ("logp", {"ratio": LOG_RATIO})),
    **dict.fromkeys(("log_softmax", "logsoftmax", "LogSoftmax"), ("logp", {})),
    **dict.fromkeys(("softmax", "Softmax"), ("prob", {})),
}
"""The quantity that a call turns log-probs, logits or probabilities into, and what it makes of a log-ratio."""
_DIVERGENCES = frozenset({"kl_div", "kl_divergence", "KLDivLoss"})
_SUPPORT = WORDS["support"]
"""Words of arguments that are no longer all of a distribution: a call with them is a term of its own."""
_DISTANCES = frozenset({"l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "cross_entropy"})


class Calls(Expressions):
    """Evaluates calls."""

    def _of_Call(self, node: ast.Call) -> Value:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        receiver = NOTHING
        if isinstance(node.func, ast.Call):
            name = getattr(node.func.func, "attr", getattr(node.func.func, "id", name))
        elif isinstance(node.func, ast.Attribute):
            receiver = self.value(node.func.value)
        made = self.tree.constructed(node.func, self.function)
        if made is not None and chain(made.func).endswith("KLDivLoss"):
            name = "KLDivLoss"
        given = [self.value(each) for each in node.args] + [self.value(each.value) for each in node.keywords]
        everything = joined([receiver, *given])
        if name == "logaddexp" and (mixture := mixed("logp", *(value.sides for value in given[:2]))):
            return mixture
        if name in NUMBERS:
            self._arrive(everything, "logged", self.key or self._told())
            return NOTHING
        if name in _DROPS:
            return NOTHING
        if name in _PREFERS:
            return everything.flowing().formed(every=OTHER)
        whose = {s.who for value in given for s in value.sides}
        logits = name != "cross_entropy" and {s.quantity for value in given for s in value.sides} == {"logits"}
        if name in _DIVERGENCES or (name in _DISTANCES and len(whose) > 1 and not logits):
            return self._divergence(node, given, everything)
        if name in _TURNS:
            quantity, forms = _TURNS[name]
            return (everything.flowing() if everything.flows else everything.turned(quantity)).formed(**forms)
        if name in ("square", "square_") or (name in ("pow", "pow_") and _second_is_two(node)):
            return everything.flowing().formed(log_ratio=SQUARE)
        if name in ("abs", "abs_", "fabs") or name in _DISTANCES:
            return everything.flowing().formed(log_ratio=ABSOLUTE)
        if name in ("mul", "mul_"):
            return multiplied(receiver, joined(given))
        if name in ("sub", "sub_", "subtract") and isinstance(node.func, ast.Attribute):
            pair = (receiver, given[0]) if receiver.sides else tuple(given[:2])
            if len(pair) == 2 and (met := self._meeting_of(node, *pair)):
                return met
        if name in ("sum", "mean") and not everything.flows:
            # Of a rollout's log-probs; of a sum over the vocabulary nothing is known.
            first = receiver if receiver.sides else given[0] if given else NOTHING
            return Value(first.sides if {each.quantity for each in first.sides} == {"logp"} else frozenset())
        if name in _SAME:
            first = receiver if receiver.sides or receiver.flows else everything
            return Value(first.sides, everything.flows, receiver.items)
        if receiver.flows and not (side(name) and all(flow.seed.parameter for flow in receiver.flows)):
            return everything.flowing()  # a method of a tensor, though a function of the tree may have its name
        return self._called(node, name, given, everything)

    def _meeting_of(self, node: ast.Call, left: Value, right: Value) -> Value | None:
        operands = [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *node.args][-2:]
        as_written = ast.copy_location(ast.BinOp(operands[0], ast.Sub(), operands[1]), node)
        return self._meeting(as_written, left, right)

    def _divergence(self, node: ast.Call, given: list[Value], everything: Value) -> Value:
        whose = frozenset(s.who for value in given for s in value.sides)
        if len(whose) > 1 or (given and any(value.sides for value in given)):
            seed = self._seed(
                node,
                whose if len(whose) > 1 else frozenset({"", "ref_"}),
                ("", ""),
                "" if len(whose) > 1 else f"the other side of {ast.unparse(node.func)}",
            )
            return Value(frozenset(), frozenset({Flow(seed, DIVERGENCE)}) | everything.flows)
        return everything.flowing().formed(every=DIVERGENCE)

    def _called(self, node: ast.Call, name: str, given: list[Value], everything: Value) -> Value:
        """Return what a call of a function of the tree gives, or of one that is not known."""
        callees = [each for each in self.tree.callees(node.func, self.function) if each is not self.function]
        if self.tree.looked_up(node.func, self.function):
            found = [value for callee in callees if (value := self._through(node, callee, given))]
            if found:
                return joined(found)
        for callee in callees[:3]:
            value = self._through(node, callee, given)
            if value and (side(name) is None or any(not flow.seed.parameter for flow in value.flows)):
                return value
        if stated := side(name) or self._gives(callees):
            texts = [word for n in ast.walk(node) if isinstance(n, ast.Constant) for word in words(str(n.value))]
            told = who_of(" ".join(_models(node) or [*words(name), *identifiers(node), *texts]))
            who = stated.who if stated.sure else next((s.who for s in sorted(everything.sides)), told or "")
            given_side = Side(stated.quantity, who)
            if not everything.sides and all(flow.seed.parameter for flow in everything.flows):
                self.found.fields[node.lineno, node.col_offset] = given_side
            return Value(frozenset({given_side}))
        if says(name, *REWARD) and everything.flows:
            self._arrive(everything, "reward", name)
        if everything.flows:
            return everything.flowing()
        if says_kl(name) and len({s.who for s in everything.sides}) > 1:
            return self._divergence(node, [everything], everything)
        return NOTHING

    def _gives(self, callees: list[Function]) -> Side | None:
        """Return the side that a function of the tree returns, whose it is being for its caller to say."""
        for callee in callees[:1]:
            returned = self.tree.followed(callee).returned
            for each in sorted(returned.sides) if len({each.who for each in returned.sides}) == 1 else ():
                return Side(each.quantity, each.who, sure=False)
        return None

    def _through(self, node: ast.Call, callee: Function, given: list[Value]) -> Value | None:
        """Return what a call of a function of the tree gives for these arguments; None if nothing is known."""
        values = dict(zip(callee.parameters, given[: len(node.args)], strict=False))
        values |= {
            keyword.arg: value
            for keyword, value in zip(node.keywords, given[len(node.args) :], strict=True)
            if keyword.arg
        }
        returned = self.tree.followed(callee).returned
        whose = {each.who for value in given for each in value.sides}
        # Names that state no side, as in kl(a, b), are followed with the sides that they are given.
        unnamed = tuple((name, v.sides) for name, v in values.items() if v.sides and not v.flows and side(name) is None)
        inside = len({each.who for _, sides in unnamed for each in sides}) > 1 and all(
            flow.seed.parameter or flow.seed.named for flow in returned.flows
        )
        if inside:
            returned = self.tree.followed(callee, unnamed).returned
        # What gives log-probs, and an entropy beside them, gives log-probs.
        if all(flow.form == ENTROPY and (returned.sides or says_kl(callee.name)) for flow in returned.flows):
            return None

        def carried(result: Value) -> Value:
            flows: set[Flow] = set()
            for flow in sorted(result.flows, key=Flow.order):
                if flow.seed.parameter:
                    for arriving in sorted(values.get(flow.seed.parameter, NOTHING).flows, key=Flow.order):
                        form = flow.form if arriving.form == LOG_RATIO else arriving.form
                        flows.add(Flow(arriving.seed, form))
                        if form in KL_LIKE and arriving.form == LOG_RATIO:
                            self.found.shaped.append((callee, arriving.seed))
                elif not flow.seed.named:
                    seed = self._seed(node, flow.seed.who)
                    seed.weights = min(whose) if flow.form == ENTROPY and len(whose) == 1 else flow.seed.weights
                    flows.add(Flow(seed, flow.form))
                    if _SUPPORT.intersection(identifiers(node)):
                        continue
                    where = self.found.shaped if inside else self.found.calls
                    if (callee, seed) not in where:
                        where.append((callee, seed))
                    if says_kl(callee.name):
                        self.found.kl_named.add(seed)
            return Value(frozenset(), frozenset(flows))

        total = carried(returned)
        return Value(total.sides, total.flows, tuple(map(carried, returned.items)))


def _models(node: ast.Call) -> list[str]:
    """Return the words of the arguments of a call, and of what it is a method of, that are called models."""
    given = [*node.args, *(each.value for each in node.keywords), getattr(node.func, "value", None)]
    named = [words(chain(each)) for each in given if each is not None]
    return [
        word
        for each in named
        if {"model", "models", "policy", "actor", "net", "network"}.intersection(each)
        for word in each
    ]


def _second_is_two(node: ast.Call) -> bool:
    return bool(node.args) and isinstance(node.args[-1], ast.Constant) and node.args[-1].value == 2

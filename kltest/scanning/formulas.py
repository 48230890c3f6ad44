"""Terms in one line of mathematics."""

import ast
import re
from dataclasses import replace

from kltest.scanning.linear import Statement


def formula(kept: list[Statement], result: ast.expr) -> tuple[str, bool]:
    """Return the term in one line, what it ends in with the names before it written out, and whether that is all.

    The statements are written out into one another: they are no code any more.
    """
    known: dict[str, ast.expr] = {}

    class WrittenOut(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return known.get(node.id, node)

    def write_out(statement: Statement) -> None:
        for inner in statement.loop:  # of a sum over rollouts, what is added
            write_out(replace(inner, augmented=None))
        if not statement.loop and len(ast.unparse(statement.value)) < 400:
            known[str(statement.target)] = WrittenOut().visit(statement.whole)

    for statement in kept:
        write_out(statement)
    written = _Plain().visit(WrittenOut().visit(result))
    complete = not any(each.loop or each.quiet or str(each.target) not in known for each in kept)
    text = ast.unparse(written)
    for code, symbol in (
        ("ref_logp", "log ref"),
        ("old_logp", "log μ"),
        ("ref_logits", "log ref(·)"),
        ("old_logits", "log μ(·)"),
        ("logits", "log π(·)"),
        ("logp", "log π"),
        ("beta", "β"),
        (".float()", ""),
        ("torch.", ""),
        ("F.", ""),
        (" * ", "·"),
    ):
        text = re.sub(rf"{re.escape(code)}(?!=[^=])", symbol, text)
    return re.sub(r" \*\* 2(?![\d.])", "²", text), complete


class _Plain(ast.NodeTransformer):
    """Leave out two minus signs in a row, and factors and powers of one."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(ast.USub(), ast.UnaryOp(ast.USub(), inner)):
                return inner
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.BinOp(ast.Constant(1), ast.Mult(), kept) | ast.BinOp(
                kept, ast.Mult() | ast.Div(), ast.Constant(1)
            ):
                return kept
            case ast.BinOp(ast.Constant(1), ast.Pow(), _):
                return node.left
        return node

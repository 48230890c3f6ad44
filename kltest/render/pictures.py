"""Pictures of a counter-example as inline SVG: the environment as a tree, and the two gradients as bars.

They are about as wide as a phone, so that the letters stay readable there. Colours are classes of the style sheet.
"""

import html
from collections.abc import Iterator

from markupsafe import Markup

from kltest.render.words import visible
from kltest.report import CounterExample, Prefix, format_cell

END = 'text-anchor="end"'
WIDTH = 380
"""Width in the units of the pictures, pixels at full size."""
LONGEST = 2.5
"""Multiple of the longest bar at which whiskers are cut, so that the bars stay visible beside them."""
SHOWN = 5e-7
"""Half of the last decimal that is printed."""


def tree(example: CounterExample) -> Markup:
    """Return the tree of all rollouts, from left to right, with the probabilities of each choice on its branch."""
    spacing, margin = 16 * (3 if example.drawn_from_sampler else 2) + 10, 34
    here = margin + spacing * _rollouts(example, 0) / 2
    body = [
        f'<text class="faint" x="14" y="14">start</text><text class="faint" x="{WIDTH}" y="14" {END}>chance</text>',
        *_branches(example, 0, 0, 1.0, 20.0, margin - spacing / 2, spacing),
        f'<circle class="node root" cx="20.0" cy="{here:.1f}" r="6"/>',
    ]
    height = spacing * _rollouts(example, 0) + margin + 6
    return _svg(height, f"The environment as a tree: {example.setting}", body)


def _rollouts(example: CounterExample, depth: int) -> int:
    """Number of rollouts that begin with the same `depth` tokens and go on after them, or 1 for a finished one."""
    if depth == example.length:
        return 1
    return (example.actions - example.ends) * _rollouts(example, depth + 1) + example.ends


def _branches(
    example: CounterExample, context: int, depth: int, chance: float, x: float, top: float, spacing: float
) -> Iterator[str]:
    """Branches of a prefix of probability `chance` and everything to the right; `top` is the upper end of its share."""
    place, end = example.contexts[context], x + (WIDTH - 96) / example.length
    here = top + spacing * (_rollouts(example, depth) + 1) / 2
    # Contexts are numbered by the length of their prefix, then in order.
    going_on = example.actions - example.ends
    first = sum(going_on**shorter for shorter in range(depth))
    after = first + going_on**depth + (context - first) * going_on
    for action, probability in enumerate(place.sampler or place.policy):
        ended = depth + 1 == example.length or (example.ends and action == example.actions - 1)
        share = spacing * (1 if ended else _rollouts(example, depth + 1))
        there = top + (share + spacing) / 2
        yield f'<path class="branch" d="M{x + 10:.1f} {here:.1f} L{x + 26:.1f} {there:.1f} H{end - 10:.1f}"/>'
        yield from _labels(place, action, x + 30, there)
        yield f'<circle class="node" cx="{end:.1f}" cy="{there:.1f}" r="10"/>'
        yield f'<text x="{end:.1f}" y="{there + 4:.1f}" text-anchor="middle">{action}</text>'
        reached = chance * probability
        if not ended:
            yield from _branches(example, after + action, depth + 1, reached, end, top, spacing)
        else:
            yield f'<text x="{WIDTH}" y="{there + 4:.1f}" {END}>{reached:.4g}</text>'
            if depth + 1 < example.length:
                yield f'<text class="faint" x="{end + 14:.1f}" y="{there + 4:.1f}">end</text>'
        top += share


def _labels(place: Prefix, action: int, x: float, y: float) -> Iterator[str]:
    """The probability of the policy above the branch, the others below it."""
    others = [("ref", place.reference), *([("sampler", place.sampler)] if place.sampler else [])]
    yield f'<text x="{x:.1f}" y="{y - 5:.1f}">π {place.policy[action]:g}</text>'
    for line, (name, table) in enumerate(others):
        yield f'<text class="faint" x="{x:.1f}" y="{y + 14 + 14 * line:.1f}">{name} {table[action]:g}</text>'


def bars(example: CounterExample) -> Markup:
    """Return bars for each prefix and action: the true derivative above the expected one, with its spread."""
    left, right = 64, WIDTH - 74
    values = [abs(v) for place in example.contexts for v in (*place.truth, *place.found)]
    longest = max(values, default=0.0) or 1.0
    spread = max(abs(f) + s for place in example.contexts for f, s in zip(place.found, place.std, strict=True))
    limit = min(max(longest, spread), LONGEST * longest)
    middle, scale = (left + right) / 2, (right - left) / 2 / limit
    body: list[str] = []
    y = 6.0
    for place in example.contexts:
        y += 14
        body.append(f'<text class="prefix" x="0" y="{y:.1f}">{_text(place.prefix)}</text>')
        y += 8
        for action, (truth, found, std) in enumerate(zip(place.truth, place.found, place.std, strict=True)):
            body.append(f'<text class="faint" x="0" y="{y + 16:.1f}">action {action}</text>')
            for kind, value, at in (("truth", truth, y), ("found", found, y + 13)):
                start, end = sorted((middle, middle + scale * value))
                width = max(end - start, 1.5 if value else 0.0)
                body.append(f'<rect class="{kind}" x="{start:.1f}" y="{at:.1f}" width="{width:.1f}" height="11"/>')
                number = _short(value)
                body.append(f'<text class="{kind}" x="{WIDTH}" y="{at + 9.5:.1f}" {END}>{number}</text>')
            body.append(_whisker(middle, scale, found, std, y + 18.5, left, right))
            if differ(truth, found):
                body.append(f'<text class="differs" x="{right + 4}" y="{y + 16:.1f}">≠</text>')
            y += 32
    body.append(f'<path class="axis" d="M{middle:.1f} 8 V{y:.1f}"/>')
    described = "; ".join(
        f"{prefix.prefix}, action {action}: true {format_cell(truth)}, expected {format_cell(found)}"
        for prefix in example.contexts
        for action, (truth, found) in enumerate(zip(prefix.truth, prefix.found, strict=True))
    )
    return _svg(y + 4, f"Derivatives with respect to logits. {described}", body)


def _whisker(middle: float, scale: float, found: float, std: float, y: float, left: float, right: float) -> str:
    """One standard deviation to both sides; an end outside the picture is not drawn."""
    if std * scale < 1:
        return ""
    low, high = (middle + scale * (found + side * std) for side in (-1, 1))
    path = f"M{max(low, left):.1f} {y:.1f} H{min(high, right):.1f}"
    path += "".join(f" M{end:.1f} {y - 4:.1f} v8" for end in (low, high) if left <= end <= right)
    return f'<path class="whisker" d="{path}"/>'


def differ(truth: float, found: float) -> bool:
    """True if two derivatives differ in the decimals that are printed."""
    return format_cell(truth) != format_cell(found) and abs(truth - found) > SHOWN


def _short(value: float) -> str:
    text = format_cell(value)
    return f"{value:.4f}".replace("-", "−") if "e" not in text else text


def _svg(height: float, words: str, body: list[str]) -> Markup:
    inner = "".join(body)
    return Markup(f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{_text(words)}">{inner}</svg>')


def _text(text: str) -> str:
    return html.escape(visible(text))

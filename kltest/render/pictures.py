"""Geometry of the pictures of a counter-example: the environment as a tree, and the two gradients as bars.

They are drawn as inline SVG by templates/pictures.html.j2, about as wide as a phone, so that the letters stay readable
there. Colours are classes of the style sheet.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kltest.report import CounterExample, Prefix, format_cell

WIDTH = 380
"""Width in the units of the pictures, pixels at full size."""
LEFT, RIGHT = 64, WIDTH - 74
"""Ends of the space for bars."""
LONGEST = 2.5
"""Multiple of the longest bar at which whiskers are cut, so that the bars stay visible beside them."""
SHOWN = 5e-7
"""Half of the last decimal that is printed."""


class Branch(NamedTuple):
    """A choice of an action after a prefix, drawn from (start, here) to (end, there).

    `chance` is the probability of the rollout that it finishes, None if the rollout goes on; `early`: it might have.
    """

    prefix: Prefix
    action: int
    start: float
    here: float
    end: float
    there: float
    chance: float | None
    early: bool


def spacing(example: CounterExample) -> int:
    """Return the height of one rollout: room for the probabilities of the policy and of one or two others."""
    return 16 * (3 if example.drawn_from_sampler else 2) + 10


def rollouts(example: CounterExample, depth: int = 0) -> int:
    """Number of rollouts that begin with the same `depth` tokens and go on after them, or 1 for a finished one."""
    if depth == example.length:
        return 1
    return (example.actions - example.ends) * rollouts(example, depth + 1) + example.ends


def branches(
    example: CounterExample, top: float, context: int = 0, depth: int = 0, chance: float = 1.0, start: float = 20.0
) -> Iterator[Branch]:
    """Yield the branches of a prefix of probability `chance`, then those to the right of each; `top` is their end."""
    prefix, unit = example.contexts[context], spacing(example)
    end, here = start + (WIDTH - 96) / example.length, top + unit * (rollouts(example, depth) + 1) / 2
    # Contexts are numbered by the length of their prefix, then in order.
    going_on = example.actions - example.ends
    first = sum(going_on**shorter for shorter in range(depth))
    after = first + going_on**depth + (context - first) * going_on
    for action, probability in enumerate(prefix.sampler or prefix.policy):
        ended = depth + 1 == example.length or (example.ends and action == example.actions - 1)
        share, reached = unit * (1 if ended else rollouts(example, depth + 1)), chance * probability
        finished, early = reached if ended else None, ended and depth + 1 < example.length
        yield Branch(prefix, action, start, here, end, top + (share + unit) / 2, finished, early)
        if not ended:
            yield from branches(example, top, after + action, depth + 1, reached, end)
        top += share


def scale(example: CounterExample) -> float:
    """Return the length of a bar for a derivative of one."""
    values = [abs(v) for place in example.contexts for v in (*place.truth, *place.found)]
    longest = max(values, default=0.0) or 1.0
    spread = max(abs(f) + s for place in example.contexts for f, s in zip(place.found, place.std, strict=True))
    return (RIGHT - LEFT) / 2 / min(max(longest, spread), LONGEST * longest)


def differ(truth: float, found: float) -> bool:
    """True if two derivatives differ in the decimals that are printed."""
    return format_cell(truth) != format_cell(found) and abs(truth - found) > SHOWN


def short(value: float) -> str:
    """Return a derivative with four decimals, unless that would show nothing of it."""
    text = format_cell(value)
    return f"{value:.4f}".replace("-", "−") if "e" not in text else text

"""The space of unbiased estimators: the dimension of all functions of what a trainer sees whose mean is always 0.

Two unbiased estimators differ by such a function. What varies from environment to environment is what the
trainer does not know until it is there; a function is one unknown for each thing that can be seen, an environment is
one equation.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

Row = dict[str, Any]
Seen = tuple[Any, ...]
Equation = dict[Seen, float]

# Chances of the policy's tokens; any would do, as long as none is zero.
CHANCES = {2: (0.3, 0.7), 3: (0.5, 0.3, 0.2)}
# The reference's chances are multiples of 1/PARTS, all positive; next-token pairs come from a list of so many.
PARTS, CHOICES = 6, 4


def counts() -> list[Row]:
    """Unknowns, independent equations and what is left, with what theory says should be left."""
    grid = PARTS - 2  # so many values has one of three positive chances
    cases: list[tuple[str, int, int, Callable[[], Iterator[Equation]], int]] = [
        # α_v and λ with Σα + λ = 0.
        ("sampled log-probs", 3, 1, lambda: _sampled(1), 3),
        # The same again for each first token and the ratio that was seen there.
        ("sampled log-probs", 3, 2, lambda: _sampled(2), 3 + 3 * grid * 3),
        # z_v with Σ π_v z_v = 0 for the first token; for the second, for each first one and the pair it led to.
        ("full distributions", 2, 2, lambda: _full(2), 1 + 2 * CHOICES * 1),
        ("full distributions", 3, 2, lambda: _full(3), 2 + 3 * CHOICES * 2),
    ]
    rows = []
    for sees, vocabulary, length, environments, predicted in cases:
        unknowns, rank = _rank(environments())
        rows.append(
            {
                "sees": sees,
                "vocabulary": vocabulary,
                "length": length,
                "unknowns": unknowns,
                "rank": rank,
                "dimension": unknowns - rank,
                "predicted": predicted,
            }
        )
    return rows


def _rank(environments: Iterator[Equation]) -> tuple[int, int]:
    equations = list(environments)
    names = {seen: at for at, seen in enumerate(sorted({seen for equation in equations for seen in equation}))}
    matrix = np.zeros((len(equations), len(names)))
    for row, equation in enumerate(equations):
        for seen, chance in equation.items():
            matrix[row, names[seen]] += chance
    return len(names), int(np.linalg.matrix_rank(matrix.T @ matrix))


def _references() -> list[tuple[int, ...]]:
    """Distributions over three tokens, in parts of 1/PARTS."""
    return [parts for parts in product(range(1, PARTS), repeat=3) if sum(parts) == PARTS]


def _sampled(length: int) -> Iterator[Equation]:
    """The reference is seen at the sampled tokens alone. Its first table and those after each token vary freely."""
    chances, tables = CHANCES[3], _references()
    if length == 1:
        for table in tables:
            yield {(token, table[token]): chances[token] for token in range(3)}
        return
    for first in tables:
        for after in product(tables, repeat=3):
            yield {
                (one, first[one], two, after[one][two]): chances[one] * chances[two]
                for one, two in product(range(3), repeat=2)
            }


def _full(vocabulary: int) -> Iterator[Equation]:
    """Both models' whole tables are seen at the prefixes met: after each token, one of CHOICES pairs of them."""
    chances = CHANCES[vocabulary]
    generator = np.random.default_rng(0)
    policies = generator.dirichlet(np.ones(vocabulary), CHOICES)
    for after in product(range(CHOICES), repeat=vocabulary):
        yield {
            (one, after[one], two): chances[one] * policies[after[one]][two]
            for one, two in product(range(vocabulary), repeat=2)
        }

"""Identification of a gradient as a combination of named gradients.

A gradient is *identified* if one short linear combination of named gradients, with the same coefficients, equals it on
every instance, and on one more that the coefficients were not fitted to. Entries of gradients are analytic functions
of the logits. Two that agree at a few random instances agree everywhere with probability 1, as in the
Schwartz-Zippel test of polynomial identities: so few instances suffice, and agreement is no matter of curve fitting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from kltest.identify.instances import HELD_OUT
from kltest.moments.tolerances import TOLERANCES
from kltest.truth import counts_alone

# A candidate depends on earlier ones if less than this share of it is left after they are projected out: far above
# rounding (1e-15 times a condition number below 1e4 here), far below what independent random instances leave.
DEPENDENT = 1e-9
# Squares of residuals of triples are known to this much, unless two columns are nearly the same.
ROUGH = 1e-4
# The held-out instance may miss the tolerance by this factor: a gradient that is nearly zero there has fewer digits.
# Not in half precision, whose tolerances are wide already.
NEARLY_ZERO = 10


@dataclass(frozen=True)
class Identification:
    """Result of `identify`: `combination` is None if nothing was identified; `residual` is ‖g − fit‖/‖g‖.

    The residual is that of the identified combination on the worse of fitted and held-out instances, else that of the
    best fit. `ends` are those of the interval of each coefficient that samples leave open.
    """

    combination: dict[str, float] | None
    residual: float
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)


def identify(
    gradients: Sequence[np.ndarray],
    candidates: Mapping[str, Sequence[np.ndarray]],
    *,
    magnitudes: Sequence[float] | None = None,
    units: Sequence[float] | None = None,
    dtype: str = "float64",
    freedom: int | None = None,
    basis: Sequence[str] | None = None,
) -> Identification:
    """Return the fewest named gradients, at most three, that equal `gradients` on all instances; ties go to order.

    Args:
        gradients: (C, V) with respect to logits, one an instance, or coordinates in any orthonormal basis.
        candidates: By name, gradients of the same shapes, in the order of preference.
        magnitudes: Root mean square norm of one rollout's gradient, an instance each. A gradient far below it is zero.
            None: the norms of `gradients`.
        units: ‖∇KL(π‖ref)‖, an instance each. A gradient far below it is zero as well.
        dtype: The precision in which the gradients were computed; it sets the tolerances.
        freedom: Free numbers of the fitted gradients. None: V − 1 a context, since logits have a free constant. A fit
            of k terms needs at least 2k of them.
        basis: Names of which none is a combination of earlier ones. None: as `independent` finds on the fitted
            gradients, which must have more free numbers than there are names.

    Returns:
        The combination, `{"zero": 1.0}` for zero, or None with the residual of the best fit.
    """
    norms = [float(np.linalg.norm(gradient)) for gradient in gradients]
    scales = norms if magnitudes is None else magnitudes
    limits = TOLERANCES[dtype]
    floors = [0.0] * len(norms) if units is None else [limits.zero_in_units * unit for unit in units]
    if all(n <= max(limits.zero * scale, floor) for n, scale, floor in zip(norms, scales, floors, strict=True)):
        return Identification({"zero": 1.0}, 0.0)

    columns, target, fitted = _stacked(gradients, candidates)
    if freedom is None:
        freedom = _freedom(gradients)

    if basis is None:
        basis = independent({name: column for name, column in columns.items() if not counts_alone(name)})
    alone = [name for name in columns if counts_alone(name) and np.linalg.norm(columns[name]) > 0]
    order = {name: place for place, name in enumerate(columns)}
    singles = sorted([*basis, *alone], key=order.__getitem__)

    best = 1.0
    fits: list[tuple[float, Identification]] = []
    for terms in range(1, limits.terms + 1):
        names = singles if terms == 1 else basis
        subsets = np.array(list(combinations(range(len(names)), terms)))
        if freedom < 2 * terms or not len(subsets):
            break
        # All subsets at once, roughly; those that may fit are then solved and confirmed one by one.
        residuals = _residuals(target, [columns[name] for name in names], subsets)
        best = min(best, float(residuals.min()))
        for index in np.flatnonzero(residuals < 100 * limits.gradient):
            combination, error, confirmed = fitted(tuple(names[place] for place in subsets[index]))
            worst = max(error, confirmed / (1 if limits.terms == 1 else NEARLY_ZERO))
            fits.append((worst, Identification(combination, max(error, confirmed))))
        if any(worst < limits.identified[0] for worst, _ in fits):
            break
    # A fit to rounding by more terms wins over one by fewer terms that only holds up to a small constant.
    for limit in limits.identified:
        for worst, identification in fits:
            if worst < limit:
                return identification
    return Identification(None, best)


def solve(
    gradients: Sequence[np.ndarray],
    columns: Mapping[str, Sequence[np.ndarray]],
    *,
    dtype: str = "float64",
) -> dict[str, float] | None:
    """Return the coefficients of all `columns` that together equal `gradients` on all instances, also held out.

    Args:
        gradients: (C, V), one an instance.
        columns: By name, gradients of the same shapes.
        dtype: The precision in which the gradients were computed.

    Returns:
        A coefficient for each column. None if there are none, if columns depend on each other, or if the numbers are
        too few or too rough.
    """
    given, _, fitted = _stacked(gradients, columns)
    if TOLERANCES[dtype].terms == 1 or _freedom(gradients) < 2 * len(given) or len(independent(given)) < len(given):
        return None
    combination, error, confirmed = fitted(tuple(given))
    return combination if max(error, confirmed / NEARLY_ZERO) <= TOLERANCES[dtype].gradient else None


def independent(columns: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names whose columns are not linear combinations of earlier ones."""
    kept: list[str] = []
    directions: list[np.ndarray] = []
    for name, column in columns.items():
        norm = np.linalg.norm(column)
        if norm == 0:
            continue
        rest = column / norm
        for _ in range(2):  # twice is enough (Kahan, Parlett): one pass leaves rounding of the first
            for direction in directions:
                rest = rest - direction * (direction @ rest)
        left = np.linalg.norm(rest)
        if left > DEPENDENT:
            kept.append(name)
            directions.append(rest / left)
    return kept


def _stacked(
    gradients: Sequence[np.ndarray], columns: Mapping[str, Sequence[np.ndarray]]
) -> tuple[dict[str, np.ndarray], np.ndarray, Callable[[tuple[str, ...]], tuple[dict[str, float], float, float]]]:
    """Concatenate the entries of gradients and of each column: equal coefficients are one least-squares problem.

    Returns:
        The columns and the gradients on the fitted instances, and a function that fits some of the columns: their
        coefficients, and the relative errors on the fitted instances and on the held-out one.
    """
    parts = []
    for part in (slice(-HELD_OUT), slice(-HELD_OUT, None)):
        stacked = {name: np.concatenate([one.ravel() for one in given[part]]) for name, given in columns.items()}
        parts.append((stacked, np.concatenate([gradient.ravel() for gradient in gradients[part]])))
    seen, target = parts[0]

    def fitted(names: tuple[str, ...]) -> tuple[dict[str, float], float, float]:
        scale = np.array([np.linalg.norm(seen[name]) for name in names])
        matrix = np.stack([seen[name] for name in names], axis=1) / scale
        coefficients = np.linalg.lstsq(matrix, target, rcond=None)[0] / scale
        combination = dict(zip(names, map(float, coefficients), strict=True))
        error, confirmed = (_relative(goal, given, combination) for given, goal in parts)
        return combination, error, confirmed

    return seen, target, fitted


def _freedom(gradients: Sequence[np.ndarray]) -> int:
    """Count the free numbers of the fitted gradients: V − 1 a context."""
    return sum(gradient.shape[0] * (gradient.shape[1] - 1) for gradient in gradients[:-HELD_OUT])


def _residuals(target: np.ndarray, columns: Sequence[np.ndarray], subsets: np.ndarray) -> np.ndarray:
    """Return the relative residual of the least-squares fit by each subset (N, k) of the columns, all at once."""
    matrix = np.stack([column / np.linalg.norm(column) for column in columns], axis=1)
    frame = np.linalg.qr(np.column_stack([matrix, target]))[0]  # nothing outside this span matters: fewer dimensions
    small, goal = frame.T @ matrix, frame.T @ target / np.linalg.norm(target)
    if subsets.shape[1] < 3:
        return _rest(small, goal, subsets)
    squares = _squares_of_triples(small.T, goal)[tuple(subsets.T)]
    found = np.sqrt(np.maximum(squares, 0.0))
    near = squares < max(squares.min(), 0.0) + ROUGH
    found[near] = _rest(small, goal, subsets[near])
    return found


def _rest(small: np.ndarray, goal: np.ndarray, subsets: np.ndarray) -> np.ndarray:
    """Return what each subset (N, k) of the columns (D, n) leaves of a goal (D,)."""
    span = np.linalg.qr(small[:, subsets].transpose(1, 0, 2))[0]
    along = span.transpose(0, 2, 1) @ goal
    return np.linalg.norm(goal - (span @ along[..., None])[..., 0], axis=1)


def _squares_of_triples(rows: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Return (n, n, n) about the square of what three rows i, j, k of (n, D), of length one, leave of a goal (D,).

    From inner products of what i leaves of the others: much faster than to solve for each triple, and less exact.
    """
    first = rows @ rows.T
    second = rows[None] - first[..., None] * rows[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        second /= np.linalg.norm(second, axis=2, keepdims=True)
        rest = goal - (rows @ goal)[:, None] * rows
        along = np.einsum("ijd,id->ij", second, rest)
        inner = second @ second.transpose(0, 2, 1)
        last = (along[:, None, :] - inner * along[:, :, None]) ** 2 / (1 - inner**2)
    return (rest**2).sum(axis=1)[:, None, None] - along[:, :, None] ** 2 - last


def _relative(target: np.ndarray, columns: Mapping[str, np.ndarray], combination: Mapping[str, float]) -> float:
    fit = sum(coefficient * columns[name] for name, coefficient in combination.items())
    norm = float(np.linalg.norm(target))
    error = float(np.linalg.norm(target - fit))
    return error / norm if norm > 0 else (0.0 if error == 0 else np.inf)

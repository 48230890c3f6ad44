"""The atlas: estimators down, environments across; a cell says which gradient is followed, how biased and how noisy."""

import math
from fractions import Fraction

from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath

from .style import (
    BIAS,
    HAIRLINE,
    INK,
    PAGE_WIDTH,
    RIGHT,
    RIGHT_INK,
    SIZE,
    TITLE,
    Axes,
    DataFrame,
    Figure,
    Row,
    ink_on,
    records,
)

Cells = dict[tuple[str, str, str], Row]

ENVIRONMENTS = {"bandit": "bandit", "sequence": "sequence", "ragged": "ragged", "mdp": "MDP"}
SAMPLERS = {"current": "samples of the current policy π", "stale": "stale samples, of μ ≠ π"}
GROUPS = {"loss": "in the loss", "reward": "in the reward", "both": "in both", "groups": "across a batch"}
UNBIASED = 1e-9
BIAS_RANGE = LogNorm(0.02, 3.0, clip=True)
# The bar under a cell: the standard deviation of one rollout's gradient, in multiples of the length of ∇KL.
NOISE_RANGE = (0.5, 50.0)
CELL = ["estimator", "environment", "sampler"]
SILENT = 1e-12  # rounding: every rollout has the same gradient
# Decimals of a rank: estimators that differ by rounding only are equals, in the order of their names. Rounding depends
# on the processor and on Python, whose `sum` of floats is compensated from 3.12 on.
RANKED = 9

# Of the two likeliest tokens of a side: the truncated sum, the renormalised KL, and that with a tail.
SUPPORTS = tuple(
    (way, whose, kind, mark)
    for way in ("forward", "reverse")
    for whose in ("top", "own")
    for kind, mark in (("", ""), ("_renormalised", "ˢ"), ("_tail", "ᵗ"))
)
# Capitals are of whole rollouts; the same letter small, of each token with its prefix held fixed.
SYMBOLS = {
    "reverse_kl": "R",
    "forward_kl": "F",
    "local_reverse_kl": "r",
    "future_reverse_kl": "R₊",
    "last_token_reverse_kl": "L",
    "local_forward_kl": "f",
    "squared_log_ratio": "Q",
    "squared_log_ratio_sum": "ΣQ",
    "local_squared_log_ratio": "q",
    "chi_square": "X",
    "local_chi_square": "x",
    "total_variation": "V",
    "local_total_variation": "v",
    "from_sampler_kl": "W",
    "to_sampler_kl": "M",
    "expected_reward": "reward",
    "entropy": "entropy",
    "inverse_length": "1/L",
    "exact_future_reverse_kl": "E",
    "centred_reverse_kl": "C",
    "other_tokens_forward_kl": "O",
    "local_jensen_shannon": "j",
    "local_jensen_shannon10": "j.1",
    "local_skewed_forward_kl10": "f.1",
    "local_skewed_reverse_kl10": "r.1",
    **{f"local_{way}_kl_{whose}2{kind}": f"{way[0]}₂{mark}" for way, whose, kind, mark in SUPPORTS},
    "zero": "0",
}
MARKS = {"": "", "sampler": "′", "rollouts": "°", "mean_ratio": "*"}
# In columns of the key: a symbol, and what it stands for.
KEY = (
    (
        ("R", "∇KL(π‖ref): what a KL penalty should follow"),
        ("F", "∇KL(ref‖π): the other direction"),
        ("Q, ΣQ", "squared log-ratio: of the rollout, of its tokens"),
        ("X, V", "χ² divergence, total variation"),
        ("M, W", "∇KL(π‖μ), ∇KL(μ‖π)"),
        ("j, f₂, r₂", "Jensen-Shannon; f, r over two tokens"),
        ("j.1, r.1", "weight 0.1 in a mixture; f, r skewed by it"),
        ("0, ?", "no gradient; no short sum of these"),
    ),
    (
        ("r, f, …", "small letters: the same, prefixes held fixed"),
        ("R₊, L", "parts of R: for later tokens; of the last one"),
        ("C, E", "R less its prompt's mean; R₊ by exact KLs"),
        ("O", "what F charges a token for all others"),
        ("′, °", "prefixes from μ; prefixes and tokens from μ"),
        ("*", "times the mean ratio of the rollout"),
        ("ˢ, ᵗ", "renormalised; all other tokens as one"),
    ),
)

# Points, from the top left corner.
WIDTH, EDGE, HEAD, LINE = 72 * PAGE_WIDTH, 4.0, 38.0, 8.4
ROW, GROUP, BAR = LINE + 2.8, 12.5, 1.6
LEFT, GAP = 116.0, 6.0
COLUMN = (WIDTH - LEFT - GAP - EDGE) / 8


def draw(found: DataFrame) -> Figure:
    """The figure; its height follows the number of estimators."""
    found = found[found["environment"].isin(list(ENVIRONMENTS))]
    cells = _worst(found)
    groups = _grouped(records(found), cells)
    tall = {name: max(len(_lines(row)) for key, row in cells.items() if key[0] == name) for name, *_ in cells}
    bottom = HEAD + GROUP * len(groups) + ROW * len(tall) + LINE * (sum(tall.values()) - len(tall))
    height = bottom + 30 + LINE * len(KEY[0])
    figure = Figure(figsize=(PAGE_WIDTH, height / 72))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    _head(axes)
    y = HEAD
    for group, names in groups.items():
        _text(axes, EDGE, y + GROUP / 2, GROUPS[group], weight="bold")
        axes.plot((EDGE, WIDTH - EDGE), (y + GROUP - 1, y + GROUP - 1), color=INK, lw=0.5)
        y += GROUP
        for name in names:
            high = ROW + LINE * (tall[name] - 1)
            _text(axes, LEFT - 4, y + high / 2, name, ha="right")
            for sampler in SAMPLERS:
                for environment in ENVIRONMENTS:
                    if row := cells.get((name, environment, sampler)):
                        _cell(axes, _left(environment, sampler), y, high, row)
            y += high
    _key(axes, y + 12)
    return figure


def _text(axes: Axes, x: float, y: float, words: str, **options: object) -> None:
    axes.text(x, y, words, va="center_baseline", **options)


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: object, **options: object) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="none", **options))


def _left(environment: str, sampler: str) -> float:
    stale = sampler == "stale"
    return LEFT + COLUMN * (list(ENVIRONMENTS).index(environment) + 4 * stale) + GAP * stale


def _cell(axes: Axes, x: float, y: float, height: float, row: Row) -> None:
    bias = row["relative_bias"]
    right = bias is not None and bias < UNBIASED
    face = RIGHT if right else BIAS(BIAS_RANGE(BIAS_RANGE.vmax if bias is None else bias))
    ink = RIGHT_INK if right else ink_on(face)
    width, height = COLUMN - 1, height - 1
    _box(axes, x, y, width, height, face)
    lines = _lines(row)
    for at, line in enumerate(lines):
        middle = y + (height - BAR) / 2 + LINE * (at - (len(lines) - 1) / 2)
        _text(axes, x + width / 2, middle, line, ha="center", color=ink, weight="bold" if right else None)
    if length := _noise(row["relative_variance"]):
        _box(axes, x, y + height - BAR, width * length, BAR, ink, alpha=0.75)


def _lines(row: Row) -> list[str]:
    """A sum too long for its cell on two lines, divided at the sign nearest to the middle."""
    text = symbols(row["identified"])
    breaks = [at for at in range(1, len(text)) if text[at] in "+−"]
    if not breaks or TextPath((0, 0), text, size=SIZE).get_extents().width < COLUMN - 4:
        return [text]
    at = min(breaks, key=lambda at: abs(at - len(text) / 2))
    return [text[:at].rstrip(), text[at:]]


def _noise(relative_variance: float | None) -> float:
    """The length of a bar from 0 to 1: the logarithm of the relative standard deviation within NOISE_RANGE."""
    if relative_variance is None or relative_variance < SILENT:
        return 0.0
    low, high = NOISE_RANGE
    position = (0.5 * math.log(relative_variance) - math.log(low)) / (math.log(high) - math.log(low))
    return min(max(position, 0.02), 1.0)


def symbols(combination: dict[str, float] | None) -> str:
    """A combination of named gradients in the figure's own short symbols, what is added before what is taken off."""
    if combination is None:
        return "?"
    terms = []
    for name, coefficient in sorted(combination.items(), key=lambda term: term[1] < 0):
        base, _, ratio = name.partition("@")
        size = Fraction(coefficient).limit_denominator(12)
        if abs(size - coefficient) > 1e-6:
            size = Fraction(f"{coefficient:.2g}")
        terms.append((size, SYMBOLS.get(base, base) + MARKS[ratio]))
    below = {size.denominator for size, _ in terms}
    common = below.pop() if len(below) == 1 and len(terms) > 1 else 1
    text = "".join(_term(size * common, symbol, first=not at) for at, (size, symbol) in enumerate(terms))
    return f"({text})/{common}" if common > 1 else text


def _term(size: Fraction, symbol: str, *, first: bool) -> str:
    """As `2f/3` or, if it is not the first, ` − r`, with narrow spaces."""
    sign = "−" if size < 0 else "" if first else "+"
    number = "" if abs(size.numerator) == 1 else str(abs(size.numerator))
    below = "" if size.denominator == 1 else f"/{size.denominator}"
    return (sign if first else f"\u2009{sign}\u2009") + number + symbol + below


def _head(axes: Axes) -> None:
    _text(axes, EDGE, 8, "Which gradient does a KL penalty follow?", weight="bold", size=TITLE)
    for sampler, title in SAMPLERS.items():
        _text(axes, _left("bandit", sampler) + 2 * COLUMN, 21, title, ha="center")
        for environment, words in ENVIRONMENTS.items():
            _text(axes, _left(environment, sampler) + COLUMN / 2, 32, words, ha="center")


def _key(axes: Axes, y: float) -> None:
    """Explain the colour, the bar and the symbols."""
    _box(axes, EDGE, y - 5, COLUMN, 10, RIGHT)
    _text(axes, EDGE + COLUMN / 2, y, "R", ha="center", color=RIGHT_INK, weight="bold")
    _text(axes, EDGE + COLUMN + 4, y, "no bias")
    left, width, steps = 102.0, 88.0, 60
    for step in range(steps):
        _box(axes, left + width * step / steps, y - 5, 1.05 * width / steps, 10, BIAS(step / (steps - 1)))
    for value in (0.02, 0.1, 0.5, 3.0):
        shade = float(BIAS_RANGE(value))
        side = {0.0: "left", 1.0: "right"}.get(shade, "center")
        _text(axes, left + width * shade, y, f"{value:g}", ha=side, color=ink_on(BIAS(shade)))
    _text(axes, left + width + 4, y, "bias: ‖E[ĝ] − R‖ / ‖R‖")
    left, (low, high) = 298.0, NOISE_RANGE
    _box(axes, left, y - 5, COLUMN, 10, "#f2f2f2")
    _box(axes, left, y + 5 - BAR, COLUMN * _noise(25.0), BAR, INK, alpha=0.75)
    for value, side in ((low, "left"), (5.0, "center"), (high, "right")):
        _text(axes, left + COLUMN * math.log(value / low) / math.log(high / low), y - 1, f"{value:g}", ha=side)
    _text(axes, left + COLUMN + 4, y, "noise: std of one ĝ / ‖R‖")
    axes.plot((EDGE, WIDTH - EDGE), (y + 8.5, y + 8.5), color=HAIRLINE, lw=0.5)
    for x, indent, lines in ((EDGE, 32, KEY[0]), (238.0, 32, KEY[1])):
        for number, (symbol, words) in enumerate(lines):
            below = y + 15 + LINE * number
            _text(axes, x, below, symbol, weight="bold")
            _text(axes, x + indent, below, words)


def _worst(found: DataFrame) -> Cells:
    """The most biased of the seeds, in their largest batches; if they follow different gradients, none is named."""
    largest = found[found["batch"] == found.groupby(CELL)["batch"].transform("max")]
    cells: Cells = {}
    for cell, same in largest.groupby(CELL, sort=False):
        rows = records(same)
        worst = max(rows, key=lambda one: math.inf if one["relative_bias"] is None else one["relative_bias"])
        named = worst["identified"] if len({symbols(row["identified"]) for row in rows}) == 1 else None
        cells[cell] = {**worst, "identified": named}
    return cells


def _grouped(rows: list[Row], cells: Cells) -> dict[str, list[str]]:
    """Estimators by placement, those that are right in most cells first."""
    home = {row["estimator"]: "groups" if row["couples"] else row["placement"] for row in rows}

    def rank(name: str) -> tuple[float, float, str]:
        biases = [row["relative_bias"] for key, row in cells.items() if key[0] == name]
        known = [bias for bias in biases if bias is not None]
        size = sum(math.log10(max(bias, 1e-3)) for bias in known)
        return -sum(bias < UNBIASED for bias in known), round(size, RANKED), name

    return {group: names for group in GROUPS if (names := sorted((n for n in home if home[n] == group), key=rank))}

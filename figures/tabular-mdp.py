"""The part that a token-level loss misses in decision processes: cells of a grid, and actions that slip."""

from matplotlib.patches import Circle, Rectangle

from .style import (
    BIAS,
    HAIRLINE,
    INK,
    PAGE_WIDTH,
    RIGHT_INK,
    Axes,
    DataFrame,
    Figure,
    Row,
    band,
    look,
    records,
    select,
    tidy,
)


def draw(rows: DataFrame) -> Figure:
    """Above: the grid, then what three gradients do in each cell. Below: slip."""
    figure = Figure(figsize=(PAGE_WIDTH, 5.8))
    cells = records(select(rows, "picture"))
    titles = (
        ("a  The environment", None),
        ("b  Down the true gradient", "whole"),
        ("c  Down the token-level gradient", "local"),
        ("d  What is missed: b − c", "future"),
    )
    for index, (title, push) in enumerate(titles):
        axes = figure.add_axes((0.012 + 0.5 * (index % 2), 0.705 - 0.29 * (index // 2), 0.477, 0.26))
        axes.set_title(title, pad=3)
        _grid(axes, cells, push)
    _slip(figure.add_axes((0.28, 0.075, 0.44, 0.25)), select(rows, "environments"))
    return figure


def _grid(axes: Axes, cells: list[Row], push: str | None) -> None:
    axes.axis("off")
    if not cells:
        return
    columns, rows = 1 + max(cell["x"] for cell in cells), 1 + max(cell["y"] for cell in cells)
    axes.set(xlim=(-0.52, columns - 0.48), ylim=(-0.52, rows - 0.48), aspect="equal")
    most = {"kl": max(cell["kl"] for cell in cells), "size": max(cell["whole_size"] for cell in cells)}
    for cell in cells:
        x, y = cell["x"], cell["y"]
        share = cell["kl"] / most["kl"] if push is None else (cell[f"{push}_size"] / most["size"]) ** 0.5
        face = "white" if share < 1e-6 else BIAS(0.08 + 0.55 * share)
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor=HAIRLINE, lw=0.5))
        if push is None:
            _arrow(axes, x, y + 0.16, cell["reference_right"], cell["reference_up"], RIGHT_INK, 0.6)
            _arrow(axes, x, y - 0.12, cell["policy_right"], cell["policy_up"], INK, 1.4)
        elif cell[f"{push}_size"] > 0:
            right, up = cell[f"{push}_right"], cell[f"{push}_up"]
            size = (right**2 + up**2) ** 0.5
            length = (size / most["size"]) ** 0.5
            _arrow(axes, x, y, right / size * length, up / size * length, INK, 1.1)
        if cell["reward"]:
            axes.add_patch(Circle((x, y), 0.43, facecolor="none", edgecolor="#b8860b", lw=1.6))
        if cell["start"]:
            axes.text(x - 0.46, y + 0.44, "S", weight="bold", va="top")


def _arrow(axes: Axes, x: float, y: float, right: float, up: float, colour: str, width: float) -> None:
    """Centred on (x, y); nothing for none."""
    if right**2 + up**2 < 1e-4:
        return
    half = 0.46
    ends = ((x + half * right, y + half * up), (x - half * right, y - half * up))
    arrow = {
        "arrowstyle": "-|>,head_width=0.16,head_length=0.26",
        "color": colour,
        "lw": width,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", *ends, arrowprops=arrow)


def _slip(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="e  Actions that slip", x="chance that a random action is taken", y="‖missed part‖ / ‖∇KL‖")
    steps = 8 if (rows["horizon"] == 8).any() else rows["horizon"].max()
    looks = {"chain": ("o", "-"), "grid": ("s", "--"), "random": ("^", ":")}
    for environment, (marker, line) in looks.items():
        mine = select(rows, environment=environment, horizon=steps)
        if mine.empty:
            continue
        style = {"color": look("k2-loss").colour, "ls": line, "marker": marker, "ms": 3, "lw": 1.1}
        band(axes, mine, "slip", "missed", alpha=0.13, label=environment, **style)
    axes.set_ylim(-0.02, 0.95)
    axes.legend(loc="upper right", title=f"{steps} steps, all draws")

"""Past releases of libraries: a line for each default, and each setting that changed, in the colour of its class."""

import matplotlib.dates as dates
import pandas as pd
from matplotlib.patches import Patch

from kltest.scoreboard.classes import CLASSES
from kltest.scoreboard.timeline import COLOURS

from .style import FAINT, INK, PAGE_WIDTH, DataFrame, Figure, select, tidy

# Inches of a line, and of what stands above and below all of them.
LINE, REST = 0.2, 0.85
DEAD_ZONE = "////"
# Days by which a line is longer than its latest release.
BEYOND = 14
BOX = {"facecolor": "white", "edgecolor": "none", "boxstyle": "square,pad=0.12"}
BESIDE = {"ha": "right", "va": "center", "bbox": BOX}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    rows = select(rows, "history")
    rows = rows.assign(released=pd.to_datetime(rows["released"]))
    lines = [
        (name, own)
        for name, own in rows.groupby(["library", "setting"], sort=False)
        if own["default"].any() or own["changed"].any()
    ]
    figure = Figure(figsize=(PAGE_WIDTH, LINE * len(lines) + REST), layout="constrained")
    axes = figure.subplots()
    tidy(axes)
    end = rows["released"].max() + pd.Timedelta(days=BEYOND)
    for place, (_, own) in enumerate(lines):
        ends = [*own["released"][1:], end]
        for (_, row), until in zip(own.iterrows(), ends, strict=True):
            hatch = DEAD_ZONE if row["dead_zone"] else None
            axes.barh(
                place,
                until - row["released"],
                0.56,
                row["released"],
                color=COLOURS[row["kind"]],
                hatch=hatch,
                edgecolor="white" if hatch else "none",
                linewidth=0,
            )
            axes.plot([row["released"]] * 2, [place - 0.28, place + 0.28], color="white", linewidth=0.8)
            if row["changed"]:
                at = row["released"], place
                axes.annotate(row["version"], at, (-4, -0.5), textcoords="offset points", **BESIDE)
                axes.plot(*at, marker=">", color=INK, markersize=4)
    names = [f"{library} {setting.replace(',', ',' + chr(10))}" for (library, setting), _ in lines]
    axes.set_yticks(range(len(lines)), names)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(dates.MonthLocator((1, 4, 7, 10)))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%b %Y"))
    there = [kind for kind in CLASSES if kind in set(rows["kind"])]
    keys = [Patch(color=COLOURS[kind], label=CLASSES[kind].words) for kind in there]
    keys.append(Patch(facecolor=FAINT, edgecolor="white", hatch=DEAD_ZONE, linewidth=0, label="with a dead zone"))
    figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    return figure

"""Tables and whole pages of the site that are made from the code when the site is built, and from results beside it.

`<!-- table: NAME -->` in a page becomes a table, `<!-- file: PATH -->` a file of the checkout, `<!-- doc: MODULE -->` a
module's docstring. The pages of the checks and of the libraries have no source but the code. `python docs/hooks.py`
renews the generated parts of README.md.
"""

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {
    "1": "Which gradient",
    "2": "Sequences",
    "3": "Off-policy",
    "4": "Groups",
    "5": "Hygiene",
    "6": "Logged value",
    "7": "Approximations",
    "8": "Variance (warnings)",
    "9": "The policy part (with --part policy or all)",
}
LANGUAGES = {"pyproject.toml": "toml", "Python": "python"}
MARK = re.compile(r"<!-- (table|rows|doc|file): (\S+) -->")


# What mkdocs calls.


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code."""
    from mkdocs.structure.files import File

    for path, content in {**check_pages(), **library_pages(), **result_pages()}.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the marks of a page."""
    return MARK.sub(lambda mark: _filled(mark[1], mark[2]), markdown)


def _filled(kind: str, name: str) -> str:
    if kind == "file":
        return _linked((ROOT / name).read_text(encoding="utf-8"))
    if kind == "doc":
        return str(import_module(name).__doc__).strip()
    text = table(TABLES[name]())
    return text if kind == "table" else "\n".join(text.splitlines()[2:])


def _linked(text: str) -> str:
    """A file of the checkout as a page: links to other files of it become plain text."""
    return re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", text)


# Tables.


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Rows of equal keys as Markdown."""
    rows = list(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |" for line in lines) + "\n"


def fields() -> list[dict[str, str]]:
    """The fields of a rollout and the parameter names that each fills."""
    from kltest.names import FIELDS

    return [
        {
            "field": f"`{name}`",
            "shape": each.shape,
            "meaning": each.meaning,
            "also": ", ".join(f"`{alias}`" for alias in each.aliases),
        }
        for name, each in FIELDS.items()
    ]


def atlas() -> list[dict[str, str]]:
    """Every named gradient."""
    from kltest.truth import ATLAS, FURTHER, OF_POLICY, of_group
    from kltest.truth.atlas import named

    rows = [*ATLAS.values(), *map(named, (*FURTHER, *OF_POLICY, *of_group(4)))]
    return [{"name": f"`{row.name}`", "formula": row.formula, "meaning": row.meaning} for row in rows]


def estimators() -> list[dict[str, str]]:
    """Every registered estimator, from its SPEC."""
    from kltest.cli.listing import follows, placement
    from kltest.estimators import registry

    return [
        {
            "estimator": f"`{name}`",
            "placement": placement(each.spec),
            "formula": each.spec.formula,
            "one step": follows(each.spec, "bandit"),
            "sequences": follows(each.spec, "sequence"),
            "sequences, stale sampler": follows(each.spec, "sequence", "stale"),
        }
        for name, each in registry().items()
    ]


def policies() -> list[dict[str, str]]:
    """Every registered policy loss, from its SPEC."""
    from kltest.cli.listing import follows
    from kltest.estimators import registry

    return [
        {
            "policy loss": f"`{name}`",
            "formula": each.spec.formula,
            "one step": follows(each.spec, "bandit"),
            "sequences": follows(each.spec, "sequence"),
            "lengths vary": follows(each.spec, "ragged"),
            "sequences, stale sampler": follows(each.spec, "sequence", "stale"),
        }
        for name, each in registry("policy").items()
    ]


def experiments() -> list[dict[str, str]]:
    """Every experiment, from its settings."""
    from kltest.reproduce.checkout import Checkout
    from kltest.reproduce.experiment import Experiment

    checkout = Checkout(ROOT)
    found = {name: Experiment(checkout, name).settings for name in checkout.experiments()}
    return [
        {
            "experiment": f"`{name}`",
            "about": settings.title,
            "tags": ", ".join(settings.tags),
            "can be set": ", ".join(f"`{value}`" for value in settings.values) or "–",
        }
        for name, settings in found.items()
    ]


def distillation() -> list[dict[str, str]]:
    """Losses of distillation, from rows of the experiment that are computed here, in a few seconds."""
    from kltest.reproduce.checkout import Checkout
    from kltest.reproduce.experiment import Experiment, Request, compute_all

    checkout = Checkout(ROOT)
    parts: dict[str, list[Any]] = {}
    for one in Experiment(checkout, "distillation").configurations(Request()):
        parts.setdefault(one["part"], []).append(one)
    rows = [row for same in parts.values() for each in compute_all(checkout, "distillation", same) for row in each]
    return checkout.load("experiments", "distillation", "claims").tables(rows)["forms"]


def distilling() -> list[dict[str, str]]:
    """Recorded distillation losses of libraries, where all rollouts have one length."""
    from kltest.adapters import NAMES, find
    from kltest.scoreboard import recorded
    from kltest.scoreboard.rows import combination

    def found(row: Any, sampler: str) -> str:
        there = [each for each in row["gradients"] if (each["environment"], each["sampler"]) == ("sequence", sampler)]
        return combination(row, there[0]["identified"], "sequence", formula=True) if there else "not graded"

    rows = {(row["library"], row["setting"]): row for row in recorded.read()}
    teachers = [(name, one.name) for name in NAMES for one in find(name).settings if "teacher" in one.note]
    return [
        {
            "library": f"{row['library']} {row['version']}",
            "setting": f"`{row['setting']}`" + " (default)" * row["default"],
            "follows": found(row, "current"),
            "with rollouts of another policy": found(row, "stale"),
        }
        for row in map(rows.__getitem__, teachers)
    ]


def options() -> list[dict[str, str]]:
    """Every option of `kltest grade`, as its help says it."""
    import typer

    from kltest.cli import app

    command = typer.main.get_command(app).commands["grade"]  # type: ignore[attr-defined]
    return [
        {"option": ", ".join(f"`{text}`" for text in each.opts), "meaning": escaped(each.help or "")}
        for each in command.params
        if each.opts[0].startswith("-") and not getattr(each, "hidden", False)
    ]


def finetune_settings() -> list[dict[str, str]]:
    """The settings of the language-model runner."""
    import dataclasses

    from kltest.finetune.settings import DESCRIBED, Settings

    return [
        {
            "setting": f"`{name}`",
            "default": f"`{default}`",
            "meaning": described["meaning"].replace("[", r"\[")
            + (
                f" (one of {', '.join(f'`{each}`' for each in described['choices'])})" if "choices" in described else ""
            ),
        }
        for name, default in dataclasses.asdict(Settings()).items()
        for described in [DESCRIBED[name]]
    ]


def finetune_metrics() -> list[dict[str, str]]:
    """The metrics that the language-model runner writes."""
    from kltest.finetune.settings import METRICS

    return [{"metric": f"`{name}`", "what it is": meaning} for name, meaning in METRICS.items()]


def zoo() -> list[dict[str, str]]:
    """Return the number of losses of each family that the checks are held to."""
    sys.path.insert(0, str(ROOT / "tests"))
    from cases.table import cases  # type: ignore[import-not-found]

    known = [case for case in cases() if case.exactly]
    wrong, right = ([case for case in known if case.right == kind] for kind in (False, True))
    due = Counter(code[2] for case in wrong for code in case.codes)
    written = Counter(case.defect[2] for case in wrong)
    rows = [
        {"family": f"KL{digit}xx, {name.lower()}", "wrong losses": str(written[digit]), "failures due": str(due[digit])}
        for digit, name in FAMILIES.items()
    ]
    total = {"wrong losses": str(len(wrong)), "failures due": str(sum(due.values()))}
    return [*rows, {"family": f"**together**, and **{len(right)}** right losses", **total}]


def benchmarks() -> list[dict[str, str]]:
    """The last measurement: all cases of a claim, smallest to largest."""
    import pandas

    measured = pandas.read_csv(ROOT / "benchmarks" / "results.csv")
    for words, which in (("as a stranger’s function", "a function token by token"), ("of whole rollouts", "any other")):
        named = measured["case"].str.endswith(words)
        measured["claim"] = measured["claim"].where(~named, measured["claim"] + f", {which}")
    measured["reached"] = (measured["floor"] / measured["ratio"]).where(
        measured["at_most"], measured["ratio"] / measured["floor"]
    )
    rows = []
    for (claim, bound, at_most), group in measured.groupby(["claim", "bound", "at_most"], dropna=False, sort=False):
        met = ((group["ratio"] <= bound) if at_most else (group["ratio"] >= bound)).sum()
        promised = pandas.notna(bound)
        rows.append(
            {
                "ratio": claim,
                "measured": _range(group["ratio"], lambda x: f"{x:,.0f}" if x >= 100 else f"{x:.2f}"),
                "aim": f"{'≤' if at_most else '≥'} {bound:g}" if promised else "–",
                "met": ("yes" if met == len(group) else f"{met} of {len(group)}") if promised else "–",
                "floor": _range(group["floor"], lambda x: f"{x:,.0f}" if x >= 100 else f"{x:.2f}"),
                "reached": _range(group["reached"], lambda x: f"{x:.0%}"),
            }
        )
    return rows


def _range(numbers: Any, written: Callable[[float], str]) -> str:
    if numbers.isna().any():
        return "–"
    low, high = written(numbers.min()), written(numbers.max())
    return low if low == high else f"{low} – {high}"


def trainers() -> list[dict[str, str]]:
    """Losses of public trainers that were labelled before they were graded by FILE:NAME alone."""
    return _labelled("trainers")


def distillation_losses() -> list[dict[str, str]]:
    """The same of distillation losses."""
    return _labelled("distillation")


def _labelled(name: str) -> list[dict[str, str]]:
    return [
        {
            "repository": row["repository"],
            "loss": f"`{row['name']}`",
            "label": f"{row['follows'].replace(' or ', ', ')} · {row['verdict']}",
            "": row["answer"],
        }
        for row in csv.DictReader((ROOT / "benchmarks" / f"{name}.csv").open(encoding="utf-8"))
    ]


def pins_commits() -> list[dict[str, str]]:
    """What pins of functions of public libraries said of commits that were labelled before."""
    return _pins("commits")


def pins_months() -> list[dict[str, str]]:
    """The same of each commit to two files in twelve months."""
    return _pins("months")


def _pins(page: str) -> list[dict[str, str]]:
    labels, answers = (
        csv.DictReader((ROOT / "benchmarks" / f"pins{name}.csv").open(encoding="utf-8")) for name in ("_labels", "")
    )
    words = {"same": "green", "call": "red: it cannot be called as it was", "new": "not pinned: it raised before"}

    def moved(says: str) -> str:
        parts = (part.partition(": ")[2].replace("1 × ", "") for part in says.split("; "))
        return "; ".join(dict.fromkeys(parts))

    return [
        {
            "library": row["repository"].partition("/")[2],
            "date": row["date"],
            "commit": f"`{row['commit']}`",
            "settings": ", ".join(f"`{value.partition('=')[2]}`" for value in row["arguments"].split()) or "–",
            "what changed": label["change"],
            "label": row["label"],
            "pins": words.get(row["answer"]) or f"red{', far' * (row['answer'] == 'far')}: {moved(row['says'])}",
        }
        for label, row in zip(labels, answers, strict=True)
        if row["page"] == page
    ]


def scan() -> list[dict[str, str]]:
    """What `kltest scan` found and named, by which of the labelled repositories it was written with."""
    import pandas

    counted = pandas.read_csv(ROOT / "benchmarks" / "scan.csv")
    shares = {
        "terms found": ("found", "terms"),
        "finds that are terms": ("finds right", "finds"),
        "variants named right": ("named right", "variants"),
        "not run or unnamed": ("not run or unnamed", "variants"),
        "named wrong": ("named wrong", "variants"),
    }
    rows = []
    names = {
        "used": "six that the scan was written with",
        "first": "nineteen new ones, before any change for them",
        "later": "the same nineteen, after changes for them",
        "held": "six more, after changes for them",
        "opened": "six new ones, before any change for them",
        "unopened": "six that the present scan had not seen",
    }
    for half, name in names.items():
        own = counted[counted["half"] == half]
        if half in ("first", "later", "opened", "unopened") and own.empty:
            continue
        numbers = {what: f"{own[part].sum()} of {own[whole].sum()}" for what, (part, whole) in shares.items()}
        dated = {"repositories": name, "measured": own["date"].max()}
        rows.append(
            {**dated, **numbers} if len(own) else {**dated, "measured": "not yet", **dict.fromkeys(shares, "–")}
        )
    return rows


def scan_variants() -> list[dict[str, str]]:
    """What became of the labelled variants of each half in the scan: at first sight, and as it is now."""
    import pandas

    folder = ROOT / "benchmarks"
    outcomes = ["right", "not answered", "silent", "missed", "wrong"]
    rows = []
    for name in ("scan.csv", "scan_again.csv"):
        counted = pandas.read_csv(folder / name).dropna(subset=["right"])
        for half, own in counted.groupby("half", sort=False):
            first = name == "scan.csv" and half in ("opened", "unopened")
            sums = own[outcomes].sum().astype(int)
            shares = {outcome: str(sums[outcome]) for outcome in outcomes}
            when = {"repositories": str(half), "seen": "at first sight" if first else "after changes for them"}
            rows.append({**when, "labelled variants": str(sums.sum()), **shares})
    return sorted(rows, key=lambda row: row["repositories"])


def libraries() -> list[dict[str, str]]:
    """What each library follows by default, and what to set for ∇KL(π‖ref) instead."""
    from kltest.scoreboard import recorded
    from kltest.scoreboard.table import SUMMARY, summary

    return summary(recorded.read()).drop(columns=SUMMARY["policy"]).to_dict("records")


def policy_parts() -> list[dict[str, str]]:
    """What libraries ascend without their KL term, in groups of four."""
    from kltest.scoreboard import recorded
    from kltest.scoreboard.table import frame

    return [
        {
            "library": f"{line['title']}<br>`{line['setting']}`",
            "one token": line["one_step"],
            "sequences": line["sequences"],
            "as": f"`{line['row']['ascends']}`" if line["row"]["ascends"] else "–",
            "law": line["row"]["laws"].get("expected_reward", "–"),
        }
        for line in frame(recorded.read(parts=["policy"]), programs=False).to_dict("records")
    ]


# Pages.


def check_pages() -> dict[str, str]:
    """A page a check, and their index by family."""
    from kltest.checks import CHECKS

    lines = [
        "# The checks",
        "Each is a known way to get a KL term wrong; its code is stable. "
        "`kltest explain CODE` prints a page, `--demo` runs its demonstration.",
    ]
    for digit, family in FAMILIES.items():
        rows = [
            {"code": f"[{code}]({code}.md)", "name": f"`{check.name}`", "finds": check.title}
            for code, check in CHECKS.items()
            if code[2] == digit
        ]
        lines.append(f"## {digit}xx {family}\n\n{table(rows).rstrip()}")
    index = "\n\n".join(lines) + "\n"
    return {"checks/index.md": index, **{f"checks/{code}.md": check_page(check) for code, check in CHECKS.items()}}


def check_page(check: Any) -> str:
    """The words of `kltest explain` on a check, and what its demonstration prints."""
    from kltest.cli.explain import parts

    demonstration = check.demonstrate()
    head, *rows = demonstration.cells()
    sections = []
    for part in parts(check):
        paragraphs = [escaped(part.text)] if part.text else []
        paragraphs += [f"```python\n{part.code}\n```"] if part.code else []
        for place, written in part.ways:
            paragraphs += [f"{escaped(place)}:", f"```{LANGUAGES.get(place, 'bash')}\n{written}\n```"]
        paragraphs += ["\n".join(f"- {escaped(item)}" for item in part.items)] if part.items else []
        sections.append("\n\n".join([f"## {part.title}", *paragraphs]))
    numbers = table([dict(zip(head, row, strict=True)) for row in rows])
    shown = (
        f"## Demonstration\n\n```text\n$ kltest explain {check.code} --demo\n{demonstration.setting}\n```\n\n{numbers}"
    )
    lines = [f"# {check.code} `{check.name}`", escaped(check.title) + ".", *sections[:3], shown.rstrip(), *sections[3:]]
    return "\n\n".join([*lines, "[All checks](index.md)"]) + "\n"


def library_pages() -> dict[str, str]:
    """The scoreboard of real libraries, with the program of each setting, and what past releases followed."""
    from kltest.scoreboard import recorded, timeline
    from kltest.scoreboard.pages import files
    from kltest.scoreboard.rows import PARTS

    made = files(recorded.read(parts=PARTS)) | timeline.files()
    made["libraries.md"] = f"---\nhide: [toc]\n---\n{made['libraries.md']}"  # its tables take the width
    return {f"libraries/{'index.md' if name == 'libraries.md' else name}": content for name, content in made.items()}


def result_pages(results: Path = ROOT / "results") -> dict[str, str | bytes]:
    """A page an experiment: its README, and the figures, tables, claims and settings that `kltest reproduce` left."""
    from kltest.reproduce.checkout import Checkout
    from kltest.reproduce.typesetting import sources

    checkout = Checkout(ROOT)
    about = {row["experiment"].strip("`"): row for row in experiments()}
    lines = [
        "# Results of every experiment",
        "What was asked, how, and what came, with all claims, settings and tables that the paper leaves out. "
        "`kltest reproduce`, run before the site is built, adds its figures and numbers to these pages.",
        table([{"experiment": f"[{name}]({name}.md)", "about": row["about"]} for name, row in about.items()]),
    ]
    pages: dict[str, str | bytes] = {"results/index.md": "\n\n".join(lines)}
    drawn = {figure: sources(checkout, figure) for figure in checkout.figures()}
    for name in about:
        parts = [_linked((ROOT / "experiments" / name / "README.md").read_text(encoding="utf-8"))]
        for figure in (one for one, read in drawn.items() if name in read):
            picture = results / "figures" / f"{figure}.png"
            if picture.is_file():
                pages[f"results/{figure}.png"] = picture.read_bytes()
                parts.append(f"![{figure}]({figure}.png)")
        parts += _made(results / name)
        pages[f"results/{name}.md"] = "\n\n".join(parts) + "\n"
    return pages


def _made(folder: Path) -> list[str]:
    """Tables, claims and settings of an experiment that was run; nothing if it was not."""
    if not (folder / "claims.json").is_file():
        return []
    parts = []
    for path in sorted(folder.glob("*.csv")):
        if path.stem != folder.name:
            with path.open(encoding="utf-8", newline="") as file:
                rows = [{title: escaped(cell) for title, cell in row.items()} for row in csv.DictReader(file)]
            parts += [f"## Table: {path.stem}", table(rows)]
    found, settings = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("claims", "settings"))
    columns = {"claim": "claim", "expected": "what is tested", "found": "found", "tolerance": "reason of the bound"}
    claims = [{title: escaped(str(one[name])) for name, title in columns.items()} for one in found]
    return [
        *parts,
        *(["## Claims", table(claims)] if claims else []),
        "## Settings",
        table([{"setting": f"`{name}`", "value": escaped(str(value))} for name, value in settings.items()]),
    ]


def escaped(text: str) -> str:
    """Prose in which nothing is taken for markup."""
    return re.sub(r"([\\`*_{}\[\]<>|$])", r"\\\1", text)


TABLES: dict[str, Callable[[], list[dict[str, str]]]] = {
    each.__name__: each
    for each in (
        fields,
        atlas,
        estimators,
        policies,
        experiments,
        distillation,
        distilling,
        options,
        finetune_settings,
        finetune_metrics,
        zoo,
        benchmarks,
        scan,
        scan_variants,
        trainers,
        distillation_losses,
        pins_commits,
        pins_months,
        libraries,
        policy_parts,
    )
}


# README.


def readme(text: str) -> str:
    """README.md with its tables made anew: what stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`."""

    def renewed(part: re.Match[str]) -> str:
        name = part[1]
        return f"<!-- begin: {name} -->\n{table(TABLES[name]())}<!-- end: {name} -->" if name in TABLES else part[0]

    return re.sub(r"<!-- begin: ([\w-]+) -->\n.*?<!-- end: \1 -->", renewed, text, flags=re.DOTALL)


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(readme(page.read_text(encoding="utf-8")), encoding="utf-8")

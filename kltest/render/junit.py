"""JUnit XML, for Jenkins, GitLab and most CI services: a suite per target, a case per gradient row and per check.

A case fails or errs exactly if the verdict is not `confirmed`; warnings go to `system-out`.
"""

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from kltest.render import PLAIN, Terminal
from kltest.render.screen import headline
from kltest.render.words import cells_of, note_of, reason, visible
from kltest.report import Report

KINDS, COUNTS = ("failure", "error", "skipped"), ("failures", "errors", "skipped")


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    root = Element("testsuites", name="kltest", time=_seconds(sum(report.seconds for report in reports)))
    for report in reports:
        _suite(root, report)
    _count(root)
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, report: Report) -> None:
    suite = SubElement(root, "testsuite", name=_text(report.target), time=_seconds(report.seconds))
    for row in report.gradients:
        environment, sampler, found, bias, *_ = cells_of(row)
        batches = f"-batches-of-{row.batch}" if row.batch > 1 else ""
        case = _case(suite, report, f"gradient[{environment}-{sampler}{batches}]")
        if row.agrees is None:
            SubElement(case, "skipped", message=_text(note_of(row) or "not judged"))
        elif row.excused:
            SubElement(case, "skipped", message=_text(f"expected failure: {', '.join(row.excused)}; follows {found}"))
        elif not row.agrees:
            SubElement(case, "failure", type="gradient", message=_text(f"follows {found}; relative bias {bias}"))
    for check in report.checks:
        case = _case(suite, report, f"{check.code} {check.name}")
        if check.status == "fail" and check.excused:
            SubElement(case, "skipped", message=_text(f"expected failure: {check.excused}"))
        elif check.status == "fail" and check.warns:
            SubElement(case, "system-out").text = _text(f"warning: {reason(check)}")
        elif check.refutes:
            failure = SubElement(case, "failure", type=check.code, message=_text(check.message))
            failure.text = _text(check.fix)
        elif check.status != "pass":
            SubElement(case, "skipped", message=_text(check.message))
    if report.verdict != "confirmed" and suite.find(".//failure") is None:
        kind = "failure" if report.verdict == "refuted" else "error"
        summary = report.error or headline(report)
        problem = SubElement(_case(suite, report, "verdict"), kind, type=report.verdict, message=_text(summary))
        problem.text = _text("\n".join([*report.notes, report.traceback]).strip())
    _count(suite)


def _case(suite: Element, report: Report, name: str) -> Element:
    return SubElement(suite, "testcase", classname=_text(f"kltest.{report.target}"), name=_text(name))


def _count(element: Element) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    # The schema of Jenkins has no count of skipped cases on the outermost element.
    for kind, attribute in list(zip(KINDS, COUNTS, strict=True))[: 2 if element.tag == "testsuites" else 3]:
        element.set(attribute, str(sum(case.find(kind) is not None for case in cases)))


def _seconds(time: float) -> str:
    return f"{time:.3f}"


def _text(text: str) -> str:
    return visible(text, keep="\n\t")

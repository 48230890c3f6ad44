"""kltest: the exact testbed for KL-divergence gradients in reinforcement learning of language models.

`import kltest` is cheap: what needs torch is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kltest.version import VERSION as __version__

if TYPE_CHECKING:
    from kltest.auditing.audit import audit
    from kltest.auditing.callback import KLAuditCallback
    from kltest.comparing.same import same
    from kltest.diagnosing.diagnose import diagnose
    from kltest.grading.configuration import configured
    from kltest.grading.grader import grade
    from kltest.loss.jax import jax_loss
    from kltest.parametrize import parametrize_with_checks
    from kltest.preflighting.callback import KLPreflightCallback
    from kltest.preflighting.preflight import preflight
    from kltest.report import Report
    from kltest.scanning.scan import scan

_PLACES = {
    "KLAuditCallback": "auditing.callback",
    "KLPreflightCallback": "preflighting.callback",
    "Report": "report",
    "audit": "auditing.audit",
    "configured": "grading.configuration",
    "diagnose": "diagnosing.diagnose",
    "grade": "grading.grader",
    "jax_loss": "loss.jax",
    "parametrize_with_checks": "parametrize",
    "preflight": "preflighting.preflight",
    "same": "comparing.same",
    "scan": "scanning.scan",
}
__all__ = [
    "KLAuditCallback",
    "KLPreflightCallback",
    "Report",
    "__version__",
    "audit",
    "configured",
    "diagnose",
    "grade",
    "jax_loss",
    "parametrize_with_checks",
    "preflight",
    "same",
    "scan",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("grade", "parametrize_with_checks"):
        import_module(f"{__name__}.grading.readers").READERS[:] = [_from_source]
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _from_source(*given: Any) -> "Report | None":
    """Grade the source of a function that cannot be called; what reads it is imported then."""
    report: Report | None = import_module(f"{__name__}.scanning.reading").graded(*given)
    return report

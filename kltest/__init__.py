"""kltest: the exact testbed for KL-divergence gradients in reinforcement learning of language models.

`import kltest` is cheap: what needs torch is loaded when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kltest.auditing.audit import audit
    from kltest.grading.grader import grade
    from kltest.loss.jax import jax_loss
    from kltest.parametrize import parametrize_with_checks
    from kltest.report import Report
    from kltest.scanning.scan import scan

__version__ = "0.1.0"
__all__ = ["Report", "__version__", "audit", "grade", "jax_loss", "parametrize_with_checks", "scan"]


def __getattr__(name: str) -> Any:
    if name == "grade":
        from kltest.grading.grader import grade

        return grade
    if name == "audit":
        from kltest.auditing.audit import audit

        return audit
    if name == "Report":
        from kltest.report import Report

        return Report
    if name == "parametrize_with_checks":
        from kltest.parametrize import parametrize_with_checks

        return parametrize_with_checks
    if name == "scan":
        from kltest.scanning.scan import scan

        return scan
    if name == "jax_loss":
        from kltest.loss.jax import jax_loss

        return jax_loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

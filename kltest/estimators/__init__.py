"""KL terms as they are written in a loss or a reward, each below the SPEC that says what it follows; a family a file.

Estimators never import the truth: no answer can leak.
"""

from kltest.estimators.spec import Estimator, Spec, find, register, registry

__all__ = ["Estimator", "Spec", "find", "register", "registry"]

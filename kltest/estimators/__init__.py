"""One estimator a file: a KL term as it is written in a loss or a reward, with the SPEC that says what it follows.

Estimators never import the truth: no answer can leak.
"""

from kltest.estimators.spec import Estimator, Spec, find, register, registry

__all__ = ["Estimator", "Spec", "find", "register", "registry"]

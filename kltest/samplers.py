"""Names of samplers as `--sampler` takes them. `kltest.environments.samplers` says what they draw."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kltest.errors import UsageError, did_you_mean

NAMES = ("current", "stale", "engine", "versions", "truncated:p=P,k=K")
ENGINE, TRUNCATED = "engine", "truncated"
_SWITCH = {"yes": True, "no": False}


@dataclass(frozen=True)
class Truncation:
    """Sampling from the `k` likeliest tokens, then from the fewest that hold the share `p` of the probability."""

    p: float = 1.0
    k: int | None = None
    renormalised: bool = True

    @classmethod
    def named(cls, name: str) -> "Truncation":
        """Read `truncated:p=0.9,k=2`. Raises UsageError if something else stands there."""
        given = dict(part.partition("=")[::2] for part in name.partition(":")[2].replace(" ", "").split(",") if part)
        read: dict[str, Callable[[str], Any]] = {"p": float, "k": int, "renormalised": _SWITCH.__getitem__}
        try:
            found = cls(**{key: read[key](value) for key, value in given.items()})
        except (KeyError, ValueError):
            found = cls(p=0.0)
        if not 0 < found.p <= 1 or (found.k is not None and found.k < 1) or not {"p", "k"} & {*given}:
            raise UsageError(
                f"sampler {name!r}: write truncated:p=0.9, truncated:k=2 or truncated:p=0.9,k=2, with p a share of the "
                "probability (0 < p ≤ 1) and k a number of tokens; ,renormalised=no if the engine tells log-probs from "
                "before the cut"
            )
        return found


def check(name: str) -> str:
    """Return the name of a sampler, without spaces. Raises UsageError if there is none of this name."""
    name = name.replace(" ", "")
    if name.partition(":")[0] == TRUNCATED:
        Truncation.named(name)
    elif name not in NAMES:
        known = ("both", *NAMES)  # of current and stale, which the option takes before it comes here
        raise UsageError(f"there is no sampler {name!r}; {did_you_mean(name, known)}they are {', '.join(known)}")
    return name

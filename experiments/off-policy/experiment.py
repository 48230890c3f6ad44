"""Staleness, from none to many updates: gradients, weights and training, each part with what concerns it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kltest.sweeps.run import Batching

from . import age, gradients, stability, trained, weights
from .settings import RECIPES, TRAINED
from .settings import SETTINGS as SETTINGS

BATCHING = Batching(("estimator", "staleness", "seed", "compared", "updates"), size=64)

Row = dict[str, Any]
COMPUTE: Mapping[str, Callable[..., list[Row]]] = {
    "path": gradients.of_path,
    "length": gradients.of_length,
    "weights": weights.of_weights,
    "age": age.of_age,
}


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Nothing whose rest point is unknown is asked for stability; sampled runs end earlier than exact ones."""
    for one in configurations:
        if one["part"] == "stability" and RECIPES[one["recipe"]][2] is None:
            continue
        if one["part"] == "training" and one["batch_size"]:
            one = {**one, "steps": min(one["steps"], int(TRAINED["sampled"]))}
        yield one


def compute_batch(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    together = {"training": trained.of_training, "stability": stability.of_stability}
    if (part := configurations[0]["part"]) in together:
        return together[part](configurations)
    return [[{**one, **row} for row in _compute(**one)] for one in configurations]


def _compute(part: str, **options: Any) -> list[Row]:
    return COMPUTE[part](**options)

"""Environments: finite token processes that enumerate and sample their rollouts. They never see a loss."""

from kltest.environments.builders import bandit, mdp, ngram, of_choices, ragged, sequence, tabular
from kltest.environments.environment import END, Environment
from kltest.environments.instance import Instance, OfSome
from kltest.environments.paths import Paths, Tree

__all__ = [
    "END",
    "Environment",
    "Instance",
    "OfSome",
    "Paths",
    "Tree",
    "bandit",
    "mdp",
    "ngram",
    "of_choices",
    "ragged",
    "sequence",
    "tabular",
]

"""Environments: finite token processes that enumerate and sample their rollouts. They never see a loss."""

from kltest.environments.environment import END, Environment
from kltest.environments.instance import Instance
from kltest.environments.mdp import mdp, tabular
from kltest.environments.paths import Paths, Tree
from kltest.environments.sequence import bandit, ngram, ragged, sequence

__all__ = ["END", "Environment", "Instance", "Paths", "Tree", "bandit", "mdp", "ngram", "ragged", "sequence", "tabular"]

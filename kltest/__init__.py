"""kltest: the exact testbed for KL-divergence gradients in reinforcement learning of language models."""

__version__ = "0.1.0"

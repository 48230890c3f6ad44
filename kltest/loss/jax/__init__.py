"""Losses written for JAX: recognised, called with JAX arrays, differentiated by `jax.vjp`."""

from kltest.loss.jax.bridge import JaxLoss, jax_loss

__all__ = ["JaxLoss", "jax_loss"]

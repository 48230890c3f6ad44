"""Losses that call another loss in a special way."""

from kltest.loss.calling import Loss


class Variant(Loss):
    """A loss that calls another one, `loss`, in a special way, and is like it in all else."""

    def __init__(self, loss: Loss) -> None:
        vars(self).update(vars(loss))
        self.loss = loss

import math, os
import torch as th
from typing import Optional, TYPE_CHECKING
from dataclasses import dataclass, field
if TYPE_CHECKING:
    from no_such_accelerator.types import Model

try:
    from flash_attn.losses import fast_loss
    HAS_FLASH = True
except ImportError:
    HAS_FLASH = False

HALF = 0.5
DOUBLE = HALF * 4
WEIGHTS = {"kl": 0.0}
WEIGHTS["kl"] = 1.0
WEIGHTS.update(other=2.0)
ESTIMATORS = {}
ESTIMATORS["k2"] = lambda u: squared(u)

def same(function):
    return function

def unrelated():
    raise AssertionError("must not run")

CRASH = unrelated

@same
def squared(u: "Model", scale: no_such_accelerator.Tensor = HALF) -> no_such_accelerator.Tensor:
    return scale * u ** 2

def masked_mean(values, mask, axis=None):
    return (values * mask).sum(axis) / mask.sum(axis)

def uses_everything(
    logp: th.Tensor, ref_logp: Optional[no_such_accelerator.Tensor], mask: "Model" = None
) -> no_such_accelerator.Tensor:
    if HAS_FLASH:
        return fast_loss(logp, ref_logp)
    value: Model = ESTIMATORS["k2"](logp - ref_logp) * WEIGHTS["kl"] * DOUBLE / 2
    return (value * mask).sum(-1) * th.ones(()).item() * math.sqrt(1.0)

@dataclass
class Config(no_such_accelerator.Base):
    beta: float = 1.0
    names: list[no_such_accelerator.Tensor] = field(default_factory=list)

def with_config(logp, ref_logp, config=Config()):
    return squared(logp - ref_logp) * config.beta

@no_such_accelerator.jit(fast=True)
@th.no_grad
def never_differentiated(logp, ref_logp):
    return squared(logp - ref_logp)

@no_such_accelerator.jit
def decorated(logp, ref_logp):
    return squared(logp - ref_logp)

class Trainer(no_such_accelerator.Trainer, metaclass=no_such_accelerator.Meta):
    scale = 2.0
    device = no_such_accelerator.current_device()

    def loss(self, logp, ref_logp):
        return self._kl(logp, ref_logp) * self.beta * self.scale

    @staticmethod
    def _kl(logp, ref_logp):
        return squared(logp - ref_logp)

def is_even(logp, ref_logp, n=4):
    return squared(logp - ref_logp) if n == 0 else is_odd(logp, ref_logp, n - 1)

def is_odd(logp, ref_logp, n):
    return is_even(logp, ref_logp, n - 1)

def needs_it(logp):
    logp = logp * 2
    return no_such_accelerator.reduce(logp)

def needs_it_elsewhere(logp, ref_logp, distributed=False):
    if distributed:
        logp = no_such_accelerator.reduce(logp)
    return squared(logp - ref_logp)

def imports_inside(logp, ref_logp):
    from .neighbours import kl
    return kl(logp, ref_logp)

BAD = math.sqrt(-1)

def needs_a_constant(logp):
    return logp * BAD

if HAS_FLASH:
    def chosen(logp, ref_logp):
        return fast_loss(logp, ref_logp)
else:
    def chosen(logp, ref_logp):
        return squared(logp - ref_logp)

def bad_default(logp, n=no_such_accelerator.size()):
    return logp

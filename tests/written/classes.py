from dataclasses import dataclass, field
import torch

@dataclass(frozen=True)
class KL:
    weight: float = 3.0

@dataclass
class Config:
    kl: KL = field(default_factory=KL)
    scale: float = 2.0

class Settings:
    def __init__(self, weight=5.0):
        self.weight = weight

class Needs:
    def __init__(self, tokenizer):
        self.weight = 1.0

class Broken:
    def __init__(self):
        raise OSError("no GPU")

def k2(logp, ref_logp, weight):
    return weight * (logp - ref_logp) ** 2 / 2

class OfDefaults:
    def __init__(self, weight=2.0):
        self.weight = weight

    def loss(self, logp, ref_logp):
        return k2(logp, ref_logp, self.weight)

class OfAConfig:
    def __init__(self, config: Config):
        self.config = config

    def loss(self, logp, ref_logp):
        return k2(logp, ref_logp, self.config.kl.weight)

class Module(torch.nn.Module):
    def __init__(self, config: Config | None = None):
        super().__init__()
        self.config = config or Config()
        self.noise = torch.nn.Parameter(torch.randn(3))

    def penalty(self, logp, ref_logp):
        return k2(logp, ref_logp, self.config.scale)

class Child(OfDefaults):
    def loss(self, logp, ref_logp):
        assert isinstance(self, OfDefaults)
        return 2 * super().loss(logp, ref_logp)

class Fails(Broken):
    scale = 4.0

    def loss(self, logp, ref_logp):
        return k2(logp, ref_logp, self.scale)

class Unset:
    def __init__(self, config=None):
        self.config = config

    def loss(self, logp, ref_logp):
        return k2(logp, ref_logp, self.config.weight if self.config else self.weight)

def typed(logp, ref_logp, config: Config):
    return k2(logp, ref_logp, config.kl.weight * config.scale)

def quoted(logp, ref_logp, cfg: "Settings | None"):
    return k2(logp, ref_logp, cfg.weight)

def positional(logp, settings: Settings, /, ref_logp):
    return k2(logp, ref_logp, settings.weight)

def optional(logp, ref_logp, config: Config = None):
    return k2(logp, ref_logp, 1.0 if config is None else config.scale)

def needs(logp, ref_logp, config: Needs):
    return k2(logp, ref_logp, config.weight)

@dataclass
class Batch:
    tensors: dict = None
    info: dict = field(default_factory=dict)

def whole(data: Batch, group_advantage, logp):
    return logp

def model(policy: torch.nn.Linear, data: dict, u, ref, prev_logprobs, logp):
    return logp

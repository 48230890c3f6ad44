"""verl: `kl_penalty`, a function of log-probs, by every documented name."""

from __future__ import annotations

from kltest.libraries.door import Door, Setting

CORE = "verl.trainer.ppo.core_algos"

DOOR = Door(
    name="verl",
    distribution="verl",
    version="0.9.1",
    installs=(("verl=={version}",),),
    module=CORE,
    homepage="https://github.com/verl-project/verl",
    settings=tuple(
        Setting(f"kl_penalty/{name}", f"{CORE}:kl_penalty", {"kl_penalty": name}, default=name == "kl")
        for name in ("kl", "abs", "mse", "low_var_kl", "k1+", "low_var_kl+")
    ),
)

import dataclasses
import importlib
import inspect
import itertools
import json
import torch
import warnings

warnings.filterwarnings("ignore")
STALE = False
CORE = 'verl.trainer.ppo.core_algos'


def configured(kind, usual, settings):
    known = {field.name for field in dataclasses.fields(kind)}
    for name in settings:
        if name not in known:
            raise LookupError(
                f"in the installed version {kind.__qualname__} has no {name!r}, which this setting is about"
            )
    return kind(**{**{name: value for name, value in usual.items() if name in known}, **settings})


def part(module, names):
    try:
        found = importlib.import_module(module)
        for each in names.split("."):
            found = getattr(found, each)
    except Exception as error:
        # A package may raise whatever it likes where it finds no accelerator.
        library = module.partition(".")[0]
        raise LookupError(f"the installed {library} has no {module}:{names} that can be used here: {error}") from error
    return found


def actor(settings):
    known = actor.__dict__.setdefault("known", {})
    asked = repr(sorted(settings.items()))
    if asked not in known:
        usual = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
        known[asked] = configured(part("verl.workers.config", "ActorConfig"), usual, settings)
    return known[asked]


def computed(live, *log_probs):
    torch = importlib.import_module("torch")
    return [torch.where(live, values, 0.0) for values in log_probs]


def taken(function, offered, settings):
    signatures = taken.__dict__.setdefault("signatures", {})
    if function not in signatures:
        signatures[function] = inspect.signature(function)
    parameters = signatures[function].parameters
    what = getattr(function, "__qualname__", type(function).__qualname__)
    for name in settings:
        if name not in parameters:
            raise LookupError(f"in the installed version {what} has no {name!r}, which this setting is about")
    values = {**{name: value for name, value in offered.items() if name in parameters}, **settings}
    for name, parameter in parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and name not in values:
            raise LookupError(f"in the installed version {what} wants {name!r}, which is not known here")
    return values


def after_rewards(logp, old_logp, ref_logp, mask, reward, group, beta, adv_estimator, more, settings):
    torch, numpy = importlib.import_module("torch"), importlib.import_module("numpy")
    trainer = "verl.trainer.ppo.ray_trainer"
    settings = dict(settings)
    penalty, loss_mode = settings.pop("kl_penalty", "kl"), settings.pop("loss_mode", "vanilla")
    corrected = settings.pop("rollout_correction", None)
    algorithm_kind = part("verl.trainer.config", "AlgoConfig")
    names = {field.name for field in dataclasses.fields(algorithm_kind)}
    asked = {name: settings.pop(name) for name in list(settings) if name in names}
    algorithm = configured(algorithm_kind, {"adv_estimator": adv_estimator}, asked)
    logp, old_logp, ref_logp = computed(mask.bool(), logp, old_logp, ref_logp)
    last = mask.long().sum(1, keepdim=True) - 1
    scores = torch.zeros_like(ref_logp).scatter_(1, last, reward[:, None].to(ref_logp.dtype))
    # Where rollouts are corrected for, the trainer computes its own log-probs anew before it updates.
    old, rollouts = (old_logp, {}) if corrected is None else (logp.detach(), {"rollout_log_probs": old_logp})
    tensors = {
        "old_log_probs": old,
        "ref_log_prob": ref_logp,
        "response_mask": mask.long(),
        "token_level_scores": scores,
        "values": torch.zeros_like(ref_logp),
        **rollouts,
        **more,
    }
    estimator = part(CORE, "get_adv_estimator_fn")(adv_estimator)
    if "reward_baselines" in inspect.signature(estimator).parameters:
        # The trainer computes them for those that ask, and hands on whatever is there to all.
        tensors["reward_baselines"] = torch.zeros_like(reward)
    uid = numpy.array([str(int(each)) for each in group], dtype=object)
    data = part("verl", "DataProto").from_dict(tensors=tensors, non_tensors={"uid": uid})
    charge = part(trainer, "apply_kl_penalty")
    control = part(CORE, "FixedKLController")(kl_coef=beta)
    data, metrics = charge(**taken(charge, {"data": data, "kl_ctrl": control}, {"kl_penalty": penalty}))
    if corrected is not None:
        helper = "verl.trainer.ppo.rollout_corr_helper"
        correction = part("verl.trainer.config.algorithm", "RolloutCorrectionConfig")(**corrected)
        data, _ = part(helper, "compute_rollout_correction_and_add_to_batch")(data, correction)
    advantage = part(trainer, "compute_advantage")
    offered = {
        "data": data,
        "adv_estimator": adv_estimator,
        "norm_adv_by_std_in_grpo": getattr(algorithm, "norm_adv_by_std_in_grpo", True),
        "config": algorithm,
    }
    data = advantage(**taken(advantage, offered, {}))
    policy_loss = part(CORE, "get_policy_loss_fn")(loss_mode)
    config = actor(settings)
    offered = {
        "old_log_prob": data.batch["old_log_probs"],
        "log_prob": logp,
        "advantages": data.batch["advantages"],
        "response_mask": data.batch["response_mask"].bool(),
        "loss_agg_mode": config.loss_agg_mode,
        "config": config,
        "rollout_is_weights": data.batch.get("rollout_is_weights", None),
    }
    loss = policy_loss(**taken(policy_loss, offered, {}))
    logged = [value for name, value in metrics.items() if name.endswith("reward_kl_penalty")]
    return (loss[0] if isinstance(loss, tuple) else loss), {"kl": logged[0]} if logged else {}


def kl_in_reward(logp, old_logp, ref_logp, mask, reward, group, beta, adv_estimator, **settings):
    return after_rewards(logp, old_logp, ref_logp, mask, reward, group, beta, adv_estimator, {}, settings)


V, T = 2, 3
ups = {"policy": [0.6, 0.3, 0.8, 0.45, 0.7, 0.25, 0.55], "reference": [0.4, 0.5, 0.6, 0.7, 0.35, 0.5, 0.3]}
ups["sampler"] = [0.5, 0.4, 0.7, 0.5, 0.6, 0.35, 0.65] if STALE else ups["policy"]
tables = {name: torch.tensor([[p, 1 - p] for p in rows], dtype=torch.float64) for name, rows in ups.items()}
logits = tables["policy"].log().requires_grad_()
policy, reference, sampler = logits.log_softmax(-1), tables["reference"].log(), tables["sampler"].log()
tokens = torch.tensor(list(itertools.product(range(V), repeat=T)))
at = torch.tensor([[V**t - 1 + sum(y[s] * V ** (t - 1 - s) for s in range(t)) for t in range(T)] for y in tokens])
logp, ref_logp, old_logp = (table[at, tokens] for table in (policy, reference, sampler))
chance = old_logp.sum(-1).exp()
reward = torch.tensor([float(i % 3) for i in range(len(tokens))], dtype=torch.float64)


def call(rows, beta):
    found = kl_in_reward(logp=logp[rows], old_logp=old_logp[rows], ref_logp=ref_logp[rows], mask=torch.ones(len(rows), T, dtype=torch.float64), reward=reward[rows], group=torch.zeros(len(rows), dtype=torch.int64), beta=beta, adv_estimator='remax', loss_agg_mode='seq-mean-token-sum')
    return found[0] if isinstance(found, tuple) else found


def summed(size):
    total = torch.zeros_like(logits)
    for chosen in itertools.product(range(len(tokens)), repeat=size):
        rows = list(chosen)
        part = call(rows, 1.0) - call(rows, 0.0)
        if part.requires_grad:
            total += chance[rows].prod() * torch.autograd.grad(part, logits, retain_graph=True)[0]
    return total

try:
    expected = summed(1)
    alone = expected.abs().max() > 1e-9
except Exception:
    alone = False
# Fewer than two rollouts say nothing where each is compared with the others.
expected = expected if alone else summed(2)
said = {"vocabulary": V, "length": T, "policy": tables["policy"].tolist(), "reference": tables["reference"].tolist()}
said["sampler"] = tables["sampler"].tolist() if STALE else None
print(json.dumps({**said, "expected": expected.tolist()}))

"""Trainers of TRL that distil, whole, with tables as the policy and as its teacher, which is the reference."""

import dataclasses

from kltest.adapters.installed import part
from kltest.adapters.trainers import bare, holding, inputs_of, tabular

CLASSES = {"gkd": "GKD", "gold": "GOLD", "iw_opd": "IWOPD", "sdft": "SDFT", "sdpo": "SDPO"}
CLASSES |= {"distillation": "Distillation", "server_distillation": "ServerDistillation"}
# What the configurations call the weight of the teacher in the mixture, and the size of a support.
MIXTURE, TOPK = ("distillation_alpha", "beta"), ("distillation_topk", "loss_top_k")


def distilled(logits, ref_logits, tokens, mask, trainer, mixture=None, topk=None, **settings):
    """`compute_loss` of the trainer of a package, on rollouts of the policy; `settings` are its configuration's."""
    kind, defaults = found(trainer)
    given = {**named(defaults, MIXTURE, mixture), **named(defaults, TOPK, topk), **settings}
    if unknown := given.keys() - defaults.keys():
        raise LookupError(f"in the installed version {kind.__name__} has no {sorted(unknown)[0]!r} to be set")
    values, teacher = {**defaults, **given}, tabular()
    # What the constructor sets beside its configuration. Generation is what the rollouts stand for.
    others = {"_is_vlm": False, "model_kwarg_keys": (), "_local_teacher_tokenizer_matches_student": True}
    others |= {"_forward_redirection": lambda wrapped, model, method, *given, **named: method(*given, **named)}
    others |= {"_get_teacher_token_logprobs_from_server": lambda *_: scored(ref_logits, tokens, mask, topk or 1)}
    others |= dict.fromkeys(("teacher_tokenizer", "use_liger_gkd_loss", "use_liger_loss", "_buffered_num_items"))
    built = bare(kind, values, **values, **others, teacher_model=teacher)
    # Rollouts are drawn at the temperature of the loss, which is 1 in GKD whatever that of generation is.
    heat = 1.0 if trainer == "gkd" else values["temperature"]
    with holding(built.model, logits * heat), holding(teacher, ref_logits * heat):
        return built.compute_loss(built.model, inputs_of(tokens, mask))


def found(trainer):
    """Return the class of a trainer, wherever it is by now, and the defaults of its configuration by name."""
    name, packages = CLASSES[trainer], ("trl", f"trl.experimental.{trainer}")
    for package in packages:
        try:
            kind, config = part(package, f"{name}Trainer"), part(package, f"{name}Config")
            break
        except LookupError:
            if package == packages[-1]:
                raise
    defaults = {}
    for field in dataclasses.fields(config):
        made = field.default_factory
        defaults[field.name] = field.default if made is dataclasses.MISSING else made()
    return kind, defaults


def named(known, names, value):
    """Return a value under the first of the names that is known; nothing if there is no value."""
    return {} if value is None else {next((name for name in names if name in known), names[-1]): value}


def scored(ref_logits, tokens, mask, topk):
    """What the server of a teacher answers: log-probs of the tokens, and its likeliest ones; none at padding."""
    live, ref_logits = mask != 0, ref_logits.log_softmax(-1)
    actual = ref_logits.gather(-1, tokens[..., None])[..., 0].masked_fill(~live, float("-inf"))
    top = ref_logits.topk(topk, dim=-1)
    return {
        "actual_logprobs": actual,
        "topk_logprobs": top.values.masked_fill(~live[..., None], float("-inf")),
        "topk_token_ids": top.indices,
    }

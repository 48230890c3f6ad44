"""Coverage and power of `kltest.preflight`: loops of a tiny transformer, right ones and with a planted bug.

    python -m benchmarks.preflight [--tries 20]    # writes preflight.csv

A Llama of 40,000 weights answers sixteen prompts of different lengths. Each try draws weights, reference and rollouts
anew; a bug is planted in the models, in the batch or in the loss.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import torch
import typer
from rich.progress import track

from benchmarks.measure import record
from kltest.auditing.callback import joined
from kltest.auditing.models import CHARACTERS, load
from kltest.auditing.units import drawn
from kltest.language_models.language import LanguageModel
from kltest.language_models.models import tiny_tokenizer
from kltest.language_models.scoring import score
from kltest.preflighting.preflight import preflight

PROMPTS = ("1+2=", "12+34=", "7=", "123+4=")
BETA = 0.04


@dataclass
class Loop:
    """A loop before its first step: what `kltest.preflight` is called with."""

    loss: Any
    model: Any
    ref: Any
    batch: dict[str, torch.Tensor]
    options: dict[str, Any]

    def preflight(self) -> Any:
        return preflight(self.loss, self.model, self.ref, self.batch, **self.options)


def k3(logp, ref_logp, old_logp, mask, advantages, beta):
    """A policy loss with a KL term, a mean over each rollout's tokens, as GRPO's."""
    gap = ref_logp - logp
    kl = gap.exp() - gap - 1
    ratio = (logp - old_logp).exp()
    return (((-ratio * advantages[:, None] + beta * kl) * mask).sum(1) / mask.sum(1)).mean()


def policy(seed: int = 0, dropout: float = 0.0, role: str = "model") -> Any:
    """A tiny Llama, far from uniform; `ref` is a small step away."""
    model = load("tiny:40k", role, seed=seed, dtype="float32", device="cpu").model
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    return model


def language(model: Any) -> LanguageModel:
    """The model with its tokenizer."""
    return LanguageModel.of(model, tiny_tokenizer(CHARACTERS))


def loop(seed: int = 0, layout: str = "split", temperature: float = 1.0, rows: int = 8, width: int = 10) -> Loop:
    """A right loop; `layout` is "split" for prompts and completions, "whole" for sequences with a mask."""
    model, ref = policy(seed), policy(seed, role="ref").requires_grad_(False)
    lengths = {"group_size": rows // 2, "max_new_tokens": width}
    units = drawn(language(model), PROMPTS, **lengths, temperature=temperature, seed=seed)
    unit = next(units)
    with torch.no_grad():
        old = score(language(model), unit, temperature=temperature).logp
    parts = [(unit, old)]
    while sum(len(one) for one, _ in parts) < rows:
        unit = next(units)
        with torch.no_grad():
            parts.append((unit, score(language(model), unit, temperature=temperature).logp))
    batch, generator = in_one_batch(parts), torch.Generator().manual_seed(seed)
    # Rollouts are cut off at different lengths, so that there is padding behind them.
    longest = torch.randint(3, width, (len(batch["completion_ids"]), 1), generator=generator)
    batch["completion_mask"] *= torch.arange(batch["completion_ids"].shape[1]) < longest
    batch["advantages"] = torch.randn(len(batch["completion_ids"]), generator=generator)
    if layout == "whole":
        batch = as_sequences(batch)
    options = {"beta": BETA, **({"temperature": temperature} if temperature != 1 else {})}
    return Loop(k3, model, ref, batch, options)


def in_one_batch(parts: list[Any]) -> dict[str, torch.Tensor]:
    """Rollouts with their log-probs as TRL's trainers have them."""
    rows = [
        {
            "prompt_ids": one.prompts,
            "prompt_mask": one.prompt_mask.long(),
            "completion_ids": one.tokens,
            "completion_mask": one.mask.long(),
            "old_per_token_logps": old,
        }
        for one, old in parts
    ]
    return joined(rows)


def as_sequences(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same batch as whole sequences, padded on the left and the right."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    more = batch["prompt_ids"].shape[1]
    response = torch.nn.functional.pad(batch["completion_mask"], (more, 0))
    old = torch.nn.functional.pad(batch["old_per_token_logps"], (more - 1, 0))
    found = {"input_ids": ids, "attention_mask": attention, "response_mask": response, "old_logp": old}
    return found | {"advantages": batch["advantages"]}


def runs_models(
    term: Callable[..., Any], *, target: int = 0, disabled: bool = True, graded: bool = True
) -> Callable[..., Any]:
    """Return a loss that runs the models itself, on batches that are split; without a reference, without adapters.

    `target` shifts the tokens whose log-probs are taken; `disabled` and `graded` are False for planted bugs.
    """

    def loss(model, ref, batch, beta):
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        tokens, width = batch["completion_ids"], batch["completion_ids"].shape[1]

        def scored(one):
            logits = one(input_ids=ids, attention_mask=attention, position_ids=positions).logits
            logits = logits[:, -width - 1 + target : logits.shape[1] - 1 + target]
            return logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]

        with torch.no_grad():
            if ref is not None:
                theirs = scored(ref)
            elif disabled:
                with model.disable_adapter():
                    theirs = scored(model)
            else:
                theirs = scored(model)
        with torch.set_grad_enabled(graded):
            own = scored(model)
        fields = {"mask": batch["completion_mask"], "old_logp": batch["old_per_token_logps"]}
        return term(logp=own, ref_logp=theirs, **fields, advantages=batch["advantages"], beta=beta)

    return loss


def adapted(one: Loop, *, trained: bool = True) -> Loop:
    """The same with adapters as the policy's difference from the reference, which is the model without them."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(one.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    if trained:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight += 0.3 * torch.randn_like(weight)
    found = Loop(one.loss, model.eval(), None, dict(one.batch), one.options)
    return rescored(found)


def per_token(one: Loop, model: Any, temperature: float = 1.0, **options: Any) -> torch.Tensor:
    """(B, T) log-probs of the completions under a model, 0 at padding; `attention=False` leaves the mask out."""
    batch = one.batch
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    given = {"attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        logits = model(input_ids=ids, **(given if options.get("attention", True) else {})).logits
    width = batch["completion_ids"].shape[1]
    log_probs = (logits[:, -width - 1 : -1] / temperature).log_softmax(-1)
    if (top := options.get("top_p")) is not None:
        order = log_probs.sort(-1, descending=True)
        keep = torch.zeros_like(log_probs, dtype=torch.bool)
        keep.scatter_(2, order.indices, order.values.exp().cumsum(-1) - order.values.exp() < top)
        # The tokens of the batch are kept, as a truncated sampler would have drawn them.
        keep.scatter_(2, batch["completion_ids"][..., None], True)
        log_probs = log_probs.where(keep, torch.tensor(-torch.inf)).log_softmax(-1)
    found = log_probs.gather(2, batch["completion_ids"][..., None])[..., 0]
    return found * batch["completion_mask"]


def rescored(one: Loop, **options: Any) -> Loop:
    """The same with the policy's present log-probs as those of the sampler."""
    one.batch["old_per_token_logps"] = per_token(one, one.model, **options)
    return one


@dataclass(frozen=True)
class Case:
    """A loop that is right, or has a bug that one of the `checks` should find; `besides` may find it as well.

    `change` makes the loop from a right one; bugs that are only warned of have `warns`.
    """

    name: str
    checks: tuple[str, ...] = ()
    change: Callable[[Loop], Loop] = lambda one: one
    besides: tuple[str, ...] = ()
    layout: str = "split"
    temperature: float = 1.0
    warns: bool = False

    def loop(self, seed: int = 0) -> Loop:
        """Make the loop."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.change(loop(seed, self.layout, self.temperature))


def with_loss(term: Any, **options: Any) -> Callable[[Loop], Loop]:
    def changed(one: Loop) -> Loop:
        one.loss = term
        one.options |= options
        return one

    return changed


def with_batch(change: Callable[[Loop], dict[str, torch.Tensor]]) -> Callable[[Loop], Loop]:
    def changed(one: Loop) -> Loop:
        one.batch = {**one.batch, **change(one)}
        return one

    return changed


def whole(term: Any = k3, **options: Any) -> Callable[[Loop], Loop]:
    return with_loss(runs_models(term, **options))


def then(*changes: Callable[[Loop], Loop]) -> Callable[[Loop], Loop]:
    def changed(one: Loop) -> Loop:
        for change in changes:
            one = change(one)
        return one

    return changed


def noisy(one: Loop, who: str, p: float = 0.2) -> Loop:
    """Dropout in the training mode of one of the models."""
    model = getattr(one, who)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = p
    model.train()
    return one


def _policy_loss(logp, old_logp, advantages, mask, kl, aggregate=None):
    terms = -(logp - old_logp).exp() * advantages[:, None] + kl
    return ((terms * mask).sum(1) / mask.sum(1)).mean() if aggregate is None else aggregate(terms, mask)


def _k3(gap):
    return (-gap).exp() - 1 + gap


def k2(logp, ref_logp, old_logp, mask, advantages, beta):
    return _policy_loss(logp, old_logp, advantages, mask, beta * (logp - ref_logp) ** 2 / 2)


def k1(logp, ref_logp, old_logp, mask, advantages, beta):
    return _policy_loss(logp, old_logp, advantages, mask, beta * (logp - ref_logp))


def detached(logp, ref_logp, old_logp, mask, advantages, beta):
    return _policy_loss(logp, old_logp, advantages, mask, beta * _k3(logp - ref_logp).detach())


def unused(logp, ref_logp, old_logp, mask, advantages, beta):
    return _policy_loss(logp, old_logp, advantages, mask, 0.04 * _k3(logp - ref_logp))


def squared(logp, ref_logp, old_logp, mask, advantages, beta):
    return _policy_loss(logp, old_logp, advantages, mask, beta**2 * _k3(logp - ref_logp))


def unmasked(logp, ref_logp, old_logp, mask, advantages, beta):
    return _policy_loss(logp, old_logp, advantages, mask, 0.0) + beta * _k3(logp - ref_logp).sum(1).mean()


def mean_of_padding(logp, ref_logp, old_logp, mask, advantages, beta):
    kl = beta * _k3(logp - ref_logp)
    return _policy_loss(logp, old_logp, advantages, mask, kl, lambda terms, mask: (terms * mask).mean())


def with_prompt(logp, ref_logp, old_logp, mask, attention_mask, advantages, beta):
    own = _policy_loss(logp, old_logp, advantages, mask, 0.0)
    return own + beta * ((_k3(logp - ref_logp) * attention_mask).sum(1) / attention_mask.sum(1)).mean()


def writes(logp, ref_logp, old_logp, mask, advantages, beta):
    advantages.div_(2)
    return k3(logp, ref_logp, old_logp, mask, advantages, beta)


def writes_into_batch(model, ref, batch, beta):
    found = runs_models(k3)(model, ref, batch, beta)
    batch["prompt_mask"].zero_()
    return found


def writes_into_weights(model, ref, batch, beta):
    with torch.no_grad():
        next(model.parameters()).mul_(1.0001)
    return runs_models(k3)(model, ref, batch, beta)


def of_old(logp, ref_logp, old_logp, mask, advantages, beta):
    """The KL of the older policy, with the sampler's log-probs for the reference's."""
    return _policy_loss(logp, old_logp, advantages, mask, beta * ((logp - ref_logp.roll(1, 1)) ** 2))


def _other_old(change: Callable[[Loop, torch.Tensor], torch.Tensor], key: str = "old_per_token_logps"):
    return with_batch(lambda one: {key: change(one, one.batch["old_per_token_logps"])})


def _frozen(one: Loop) -> Loop:
    one.model.requires_grad_(False)
    return one


def _replaced(**parts: Any) -> Callable[[Loop], Loop]:
    def changed(one: Loop) -> Loop:
        for name, make in parts.items():
            setattr(one, name, make(one))
        return one

    return changed


def _shares(one: Loop) -> Any:
    ref = copy.deepcopy(one.model).requires_grad_(False)
    ref.set_input_embeddings(one.model.get_input_embeddings())
    return ref


def _with_ref_logp(make: Callable[[Loop], torch.Tensor]) -> Callable[[Loop], Loop]:
    return with_batch(lambda one: {"ref_per_token_logps": make(one)})


def _bare_logp(one: Loop) -> torch.Tensor:
    with one.model.disable_adapter():
        return per_token(one, one.model)


def _permuted(one: Loop) -> Any:
    """A model of another tokenizer with as many tokens: its ids are exchanged."""
    ref, generator = copy.deepcopy(one.ref), torch.Generator().manual_seed(0)
    with torch.no_grad():
        order = torch.randperm(len(ref.lm_head.weight), generator=generator)
        ref.lm_head.weight.copy_(4 * ref.lm_head.weight[order])
        ref.model.embed_tokens.weight.copy_(ref.model.embed_tokens.weight[order])
    return ref


CASES = (
    Case("right"),
    Case("right, whole sequences", layout="whole"),
    Case("right, k2", change=with_loss(k2)),
    Case("right, temperature .7", temperature=0.7),
    Case("right, no rollouts' log-probs", change=with_batch(lambda one: {"old_per_token_logps": None})),
    Case("right, runs the models", change=whole()),
    Case("right, adapters", change=adapted),
    Case("right, adapters, runs the models", change=then(whole(), adapted)),
    Case("right, fresh adapters", change=lambda one: adapted(one, trained=False)),
    Case("right, reference's log-probs in the batch", change=_with_ref_logp(lambda one: per_token(one, one.ref))),
    Case("right, adapters, log-probs in the batch", change=then(adapted, _with_ref_logp(_bare_logp))),
    Case("right, policy in training mode", change=_replaced(model=lambda one: one.model.train())),
    Case("dropout in the reference", ("modes",), lambda one: noisy(one, "ref"), ("reference log-probs",)),
    Case("dropout in the policy", ("modes",), lambda one: noisy(one, "model"), warns=True),
    Case("reference in training mode", ("modes",), _replaced(ref=lambda one: one.ref.train()), warns=True),
    Case("reference is the policy", ("reference",), _replaced(ref=lambda one: one.model)),
    Case("reference shares the embedding", ("reference",), _replaced(ref=_shares)),
    Case("reference is trained", ("reference",), _replaced(ref=lambda one: one.ref.requires_grad_(True)), warns=True),
    Case("adapters not disabled", ("reference",), then(adapted, _replaced(ref=lambda one: one.model))),
    Case("adapters not disabled in the loss", ("reference",), then(whole(disabled=False), adapted), ("coefficient",)),
    Case(
        "adapters not disabled, log-probs in the batch",
        ("reference log-probs",),
        then(adapted, _with_ref_logp(lambda one: per_token(one, one.model))),
    ),
    Case(
        "log-probs of another reference in the batch",
        ("reference log-probs",),
        _with_ref_logp(lambda one: per_token(one, policy(99, role="ref"))),
    ),
    Case(
        "reference's log-probs shifted by a token",
        ("reference log-probs",),
        _with_ref_logp(lambda one: per_token(one, one.ref).roll(1, 1)),
    ),
    Case("reference with another tokenizer", ("tokenizer",), _replaced(ref=_permuted), warns=True),
    Case(
        "reference in half precision",
        ("equal weights",),
        _replaced(ref=lambda one: one.ref.bfloat16()),
        besides=("modes",),
    ),
    Case("coefficient detached", ("coefficient",), with_loss(detached)),
    Case("coefficient not used", ("coefficient",), with_loss(unused)),
    Case("coefficient squared", ("coefficient",), with_loss(squared)),
    Case("policy without a gradient", ("coefficient",), whole(graded=False)),
    Case("no weight requires a gradient", ("coefficient",), _frozen),
    Case("k1 in the loss", ("equal weights",), with_loss(k1), warns=True),
    Case("KL to the reference's next token", ("equal weights",), with_loss(of_old), ("padding",)),
    Case("mask not applied", ("padding",), with_loss(unmasked)),
    Case("mask not applied, runs the models", ("padding",), whole(unmasked)),
    Case("mean over padding", ("padding",), with_loss(mean_of_padding)),
    Case("prompt included", ("prompt",), with_loss(with_prompt), layout="whole"),
    Case(
        "mask with the prompt",
        ("batch",),
        with_batch(lambda one: {"response_mask": one.batch["attention_mask"], "labels": _labels(one)}),
        ("ratios", "kept mass"),
        layout="whole",
    ),
    Case("logits of the next position", ("padding", "prompt"), whole(target=1), ("padding",)),
    Case("log-probs shifted by a token", ("ratios",), _other_old(lambda one, old: old.roll(1, 1)), ("kept mass",)),
    Case(
        "temperature in the sampler alone",
        ("ratios",),
        lambda one: rescored(one, temperature=0.7),
        ("kept mass",),
    ),
    Case(
        "temperature in the trainer alone",
        ("ratios",),
        with_loss(k3, temperature=0.7),
        ("kept mass",),
    ),
    Case(
        "older log-probs of other weights",
        ("ratios",),
        _other_old(lambda one, old: per_token(one, policy(99))),
        ("kept mass",),
    ),
    Case(
        "log-probs without the attention mask",
        ("ratios",),
        lambda one: rescored(one, attention=False),
        ("kept mass",),
    ),
    Case(
        "older log-probs are the reference's",
        ("ratios",),
        _other_old(lambda one, old: per_token(one, one.ref)),
        ("kept mass",),
    ),
    Case("top-p .8, renormalised", ("kept mass", "ratios"), lambda one: rescored(one, top_p=0.8)),
    Case(
        "top-p .8 in the engine",
        ("kept mass",),
        with_batch(lambda one: {"sampling_per_token_logps": per_token(one, one.model, top_p=0.8)}),
        warns=True,
    ),
    Case("writes into a field", ("unchanged",), with_loss(writes)),
    Case("writes into the batch", ("unchanged",), with_loss(writes_into_batch)),
    Case("writes into the weights", ("unchanged",), with_loss(writes_into_weights), ("equal weights", "coefficient")),
)


def _labels(one: Loop) -> torch.Tensor:
    return one.batch["input_ids"].where(one.batch["response_mask"] != 0, torch.tensor(-100))


def found_by(report: Any, case: Case) -> tuple[set[str], set[str]]:
    """Return the checks that found something, and those that accuse: a right loop may be warned of nothing either."""
    failed, warned = ({*report.having(status)} for status in ("failed", "warning"))
    return failed | warned, failed | warned if not case.checks else failed - {*case.checks, *case.besides}


def power(tries: int) -> Iterator[dict[str, Any]]:
    """Yield how often the bug of each case is found, other checks fail, and how long it takes."""
    for case in CASES:
        counts, seconds, passes = Counter(), [], Counter()
        for seed in track(range(tries), case.name):
            made = case.loop(seed)
            began = time.process_time()
            report = made.preflight()
            seconds.append(time.process_time() - began)
            found, accused = found_by(report, case)
            counts["found"] += bool(found & {*case.checks})
            counts["others"] += bool(accused)
            passes = report.passes
        row = {"planted": case.name, "tries": tries, **{name: counts[name] / tries for name in ("found", "others")}}
        forward = sum(passes.values()) - passes.get("backward", 0)
        yield row | {"forward": forward, "backward": passes.get("backward", 0), "seconds": sorted(seconds)[tries // 2]}


def main(tries: int = 20) -> None:
    """Write the table."""
    record(Path(__file__).with_name("preflight.csv"), pandas.DataFrame(power(tries)))


if __name__ == "__main__":
    typer.run(main)

"""The checks of a preflight: one function each, in the order of the report."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kltest.diagnosing import questions
from kltest.diagnosing.answers import FINDING, NOTHING
from kltest.diagnosing.intervals import MOST_INTERVALS, Units
from kltest.diagnosing.logs import read as read_logs
from kltest.preflighting.models import embeddings_tied, has_adapters, sharing
from kltest.preflighting.report import FAILED, NOT_LOOKED_AT, PASSED, WARNING, Finding
from kltest.preflighting.scene import WIDER, Scene
from kltest.preflighting.subjects import Called, Whole

CHECKS: dict[str, Callable[[Scene], Finding]] = {}
"""All checks by name."""
ROUNDING = 0.02
"""Nats by which log-probs of half precision differ in the median; more has another cause."""
SHARE = 0.01
"""Share of tokens that may be off without a finding."""
FARTHER = 3.0
"""Nats a token by which a reference may be farther from the batch than the policy without a warning."""
EXACT = 1e-9
"""What is zero in double precision, as a share of the same number under another reference."""
LINEAR = 1e-4
"""Largest error of a gradient that is linear in β, for losses that compute in float32."""
KEPT = 0.99
"""Kept mass below which it is reported."""
SHOWN = 3


def check(name: str) -> Callable[[Callable[[Scene], tuple[Any, ...]]], Callable[[Scene], Finding]]:
    """Register a check; its function returns a status, a message, numbers and a code, the last two if there are any."""

    def registered(function: Callable[[Scene], tuple[Any, ...]]) -> Callable[[Scene], Finding]:
        def checked(scene: Scene) -> Finding:
            return Finding(name, *function(scene))

        CHECKS[name] = checked
        return checked

    return registered


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@check("batch")
def batch(scene: Scene) -> tuple[Any, ...]:
    """Masks that disagree, and columns that hold no log-probs."""
    found = scene.batch
    if found.wrong:
        return FAILED, "; ".join(found.wrong).capitalize() + ". Mend the batch: every other check reads it"
    if found.width == found.ids.shape[1] - 1 and not bool(found.others.any()):
        return WARNING, "Every token counts, the prompt's as well. Is the mask the right one?"
    counts = (int(one.sum()) for one in (found.live, found.others, found.padding))
    return PASSED, "{:,} tokens count, {:,} of prompt or tools and {:,} of padding do not".format(*counts)


@check("reference")
def reference(scene: Scene) -> tuple[Any, ...]:
    """Is the reference another model than the one that is trained, without its adapters, and constant?"""
    pair, subject = scene.pair, scene.subject
    policy, ref = pair.policy, pair.reference
    scored = subject.scored if isinstance(subject, Whole) else {}
    if ref is None:
        return NOT_LOOKED_AT, "only log-probs of it are known: give the model as ref"
    if ref.model is policy.model and not ref.bare:
        mend = "pass ref=None: adapters are disabled then" if has_adapters(policy.model) else "pass a frozen copy"
        return FAILED, f"The reference is the policy itself, and moves with it; {mend}", {}, "KL101"
    if shared := sharing(pair):
        return (
            FAILED,
            f"The reference shares {len(shared)} trained parameters with the policy: {_some([*shared])}; copy it",
        )
    if ref.bare and scored and "ref_logp" not in scene.batch.keys and not scored.get("reference"):
        text = "The loss never runs the model with its adapters disabled, which is the reference; use disable_adapter()"
        return FAILED, text, {}, "KL101"
    if isinstance(subject, Whole) and not scored.get("reference") and "ref_logp" not in scene.batch.keys:
        return FAILED, "The loss never runs the reference that was given, and the batch has no ref_logp"
    if not ref.bare:
        trained = [name for name, one in ref.model.named_parameters() if one.requires_grad]
        if trained:
            text = f"{len(trained)} parameters of the reference require a gradient ({_some(trained)}): an optimizer "
            return WARNING, text + "would move them; call ref.requires_grad_(False)", {}, "KL506"
        if has_adapters(ref.model):
            return WARNING, "The reference has adapters of its own, which act: is it the base model that was meant?"
    kind = "the policy without its adapters" if ref.bare else "a model of its own"
    return PASSED, f"It is {kind}, and nothing of it is trained"


@check("modes")
def modes(scene: Scene) -> tuple[Any, ...]:
    """Do two passes agree, in the modes that the models came in?"""
    if not scene.reference_passes:
        return NOT_LOOKED_AT, "only log-probs of the reference are known: give the model as ref"
    apart = {
        role: float(scene.gap(*passes).abs().max())
        for role, passes in (("reference", scene.reference_passes), ("policy", scene.policy_passes))
    }
    numbers = {f"{role}_apart": one for role, one in apart.items()}
    if apart["reference"] > scene.tolerance:
        text = (
            f"Two passes of the reference differ by up to {apart['reference']:.2g} nats: dropout or other noise acts. "
        )
        shared = scene.pair.reference is not None and scene.pair.reference.bare
        return FAILED, text + ("Score it in evaluation mode" if shared else "Call ref.eval()"), numbers, "KL507"
    if apart["policy"] > scene.tolerance:
        text = f"Two passes of the policy differ by up to {apart['policy']:.2g} nats: dropout acts, so that ratios of "
        return WARNING, text + "log-probs that are computed twice are not 1; set it to 0", numbers, "KL507"
    if scene.is_training and scene.pair.reference is not None and not scene.pair.reference.bare:
        return WARNING, "The reference is in training mode, though nothing random acts; call ref.eval()", numbers
    return PASSED, "Two passes of each model agree", numbers


@check("tokenizer")
def tokenizer(scene: Scene) -> tuple[Any, ...]:
    """Do both models know the same tokens?"""
    pair = scene.pair
    if scene.ref_logp is None or pair.reference is None:
        return NOT_LOOKED_AT, "only log-probs of the reference are known: give the model as ref"
    words: list[dict[str, int]] = [getattr(one.tokenizer, "get_vocab", dict)() for one in (pair.policy, pair.reference)]
    if all(words) and words[0] != words[1]:
        other = sorted(word for word in {*words[0], *words[1]} if words[0].get(word) != words[1].get(word))
        text = f"The tokenizers give {len(other):,} tokens other ids, as {other[0]!r}: the reference reads other texts"
        return FAILED, text
    own, theirs = (one.shape[-1] for one in (scene.tables.policy, scene.tables.reference))  # type: ignore[union-attr]
    if int(scene.batch.ids.max()) >= theirs:
        return FAILED, f"The batch has the id {int(scene.batch.ids.max())}; the reference knows {theirs} only"
    far = [-float(one[scene.batch.live].double().mean()) for one in (scene.logp, scene.ref_logp)]
    numbers = {"policy_nats": far[0], "reference_nats": far[1]}
    if own != theirs:
        return WARNING, f"The policy has {own} tokens and the reference {theirs}: are the first the same?", numbers
    if far[1] > far[0] + FARTHER:
        text = f"The reference needs {far[1]:.2f} nats a token for this batch, the policy {far[0]:.2f}: another "
        return WARNING, text + "tokenizer, another model, or a policy that has moved far", numbers
    return PASSED, f"Nats a token of this batch: policy {far[0]:.2f}, reference {far[1]:.2f}", numbers


@check("reference log-probs")
def reference_log_probs(scene: Scene) -> tuple[Any, ...]:
    """Are the reference's log-probs of the batch those of the reference?"""
    given = scene.batch.fields.get("ref_logp")
    if given is None or scene.ref_logp is None:
        return NOT_LOOKED_AT, "needs ref_logp in the batch, and the model as ref"
    key, numbers, off = scene.batch.keys["ref_logp"], *_distance(scene, given, scene.ref_logp)
    if not off:
        if float(scene.gap(scene.logp, scene.ref_logp).abs().max()) <= scene.tolerance:
            text = f"{key} is that of the reference, which is also the policy's: look again after some updates"
            return NOT_LOOKED_AT, text, numbers
        return PASSED, f"{key} is that of the reference (median distance {numbers['median']:.2g})", numbers
    text = f"{key} is not that of the reference: median distance {numbers['median']:.2g} nats. "
    if numbers["median"] <= ROUNDING and abs(numbers["mean"]) <= ROUNDING:
        return WARNING, text + "Half precision causes as much", numbers
    if float(scene.gap(given, scene.logp).abs().median()) <= scene.tolerance:
        text += "It is the policy's own: adapters were not disabled, or it was scored by the wrong model"
        return FAILED, text, numbers, "KL101"
    shifted = _shift(scene, given, scene.ref_logp)
    return FAILED, text + (shifted or "Another model, its training mode or a temperature computed it"), numbers


def _distance(scene: Scene, given: Tensor, own: Tensor) -> tuple[dict[str, float], bool]:
    """Return how far two tables of log-probs are apart, and whether that is more than rounding."""
    gap = scene.gap(given, own)
    off = float((gap.abs() > scene.tolerance).double().mean())
    median = float(gap.abs().median())
    numbers = {"median": median, "mean": float(gap.mean()), "largest": float(gap.abs().max()), "off": off}
    return numbers, median > scene.tolerance or off > SHARE


def _shift(scene: Scene, given: Tensor, own: Tensor) -> str:
    sides = (side for side, median in scene.shifted(given, own) if median <= scene.tolerance)
    return next((f"It stands one token too far to the {side}" for side in sides), "")


@check("equal weights")
def equal_weights(scene: Scene) -> tuple[Any, ...]:
    """Is the KL term 0, and its gradient, where policy and reference have the same weights?"""
    subject, numbers = scene.subject, dict[str, float]()
    if scene.equal_logp is not None:
        numbers["apart"] = float(scene.gap(*scene.equal_logp).abs().max())
        if numbers["apart"] > scene.tolerance:
            text = (
                f"With the same weights log-probs of policy and reference differ by up to {numbers['apart']:.2g} nats: "
            )
            return FAILED, text + "other precision, configuration or code; no KL is 0 then", numbers
    if not scene.at_equal:
        return NOT_LOOKED_AT, f"the models cannot have the same weights: {scene.not_equal}", numbers
    if not subject.takes_beta and subject.reads_rewards:
        return NOT_LOOKED_AT, "it takes no coefficient and reads rewards: its KL term cannot be told apart", numbers
    if subject.whole and not subject.takes_beta:
        return NOT_LOOKED_AT, "it takes no coefficient: its KL term cannot be told apart", numbers
    part, other = scene.part(scene.at_equal), scene.part(scene.at_other)
    if other.norm == 0 and float(other.value) == 0:
        return NOT_LOOKED_AT, "it has no KL term that moves anything: see coefficient", numbers
    numbers |= {"value": float(part.value), "gradient": part.norm / other.norm if other.norm else 0.0}
    small = scene.tolerance if subject.whole else EXACT
    if abs(numbers["value"]) > small * max(abs(float(other.value)), small):
        text = f"The KL term is {numbers['value']:.3g} where policy and reference have the same weights; it should be 0"
        return FAILED, f"{text}. Compare which log-probs it takes, at which tokens", numbers
    if numbers["gradient"] > max(small, 1e-7):
        if _is_score(scene, part):
            text = (
                "The value is 0 there and the gradient is not: each token's score, as k1 in a loss has it, whose mean "
            )
            return WARNING, f"{text}is 0. kltest grade says what it follows", numbers, "KL101"
        text = (
            f"The value is 0 there, but {100 * numbers['gradient']:.2g} % of the gradient at another reference is left"
        )
        return FAILED, text + ": it leads away from equal weights", numbers
    return PASSED, "With the same weights the KL term and its gradient are 0", numbers


def _is_score(scene: Scene, part: Called) -> bool:
    """Return True for a gradient that is the same multiple of the score at each token of a rollout."""
    live = scene.subject.live
    if "raw" in part.gradients:
        gradient, tables = part.gradients["raw"].double(), scene.tables.policy.double().softmax(-1)
        targets = scene.batch.ids.roll(-1, 1)[..., None]
        score = (-tables).scatter_add(2, targets, torch.ones_like(targets, dtype=tables.dtype)) / scene.pair.temperature
        weights = (gradient * score).sum(-1) / score.square().sum(-1)
        if float((gradient - weights[..., None] * score).square().sum()) > 1e-4 * float(gradient.square().sum()):
            return False
    elif [*part.gradients] == ["logp"] or float(part.gradients["logits"].abs().max()) == 0:
        weights = part.gradients["logp"].double()
    else:
        return False
    rows = (weights[row][live[row].to(weights.device)] for row in range(len(weights)))
    return all(float(row.max() - row.min()) <= 1e-3 * float(row.abs().max()) for row in rows if len(row))


@check("ratios")
def ratios(scene: Scene) -> tuple[Any, ...]:
    """Are the sampler's log-probs of the batch those of the policy?"""
    name = next((one for one in ("old_logp", "rollout_logp") if one in scene.batch.fields), None)
    if name is None:
        return NOT_LOOKED_AT, "needs old_logp in the batch"
    given, key = scene.batch.fields[name], scene.batch.keys[name]
    numbers, off = _distance(scene, given, scene.logp)
    if not off:
        return PASSED, f"Ratios to {key} are 1 (median |log ratio| {numbers['median']:.2g})", numbers
    text = (
        f"Ratios to {key} are not 1: median |log ratio| {numbers['median']:.2g}, {100 * numbers['off']:.3g} % of the "
    )
    text += f"tokens off by more than {scene.tolerance:g}. "
    if not scene.on_policy:
        return WARNING, text + "Rollouts are older than the weights, as on_policy=False says", numbers
    near = {why: one for why, one in scene.explanations(given) if one <= max(scene.tolerance, numbers["median"] / 10)}
    if near:
        return (
            FAILED,
            f"{text}Reason: {min(near, key=near.__getitem__)}",
            numbers,
            "KL702" if "temp" in str(near) else "",
        )
    if _kept(scene, given)[1]:
        return FAILED, f"{text}Reason: they are renormalised over the tokens that were kept", numbers, "KL703"
    if numbers["median"] <= ROUNDING and abs(numbers["mean"]) <= ROUNDING:
        return WARNING, f"{text}Half precision, or weights that are a small step apart, cause as much", numbers
    noise = float(scene.gap(*scene.policy_passes).abs().max())
    if noise > scene.tolerance:
        return FAILED, f"{text}Dropout of the policy acts, and may be the reason", numbers
    return FAILED, f"{text}Other weights drew the rollouts; if they are older on purpose, pass on_policy=False", numbers


def _kept(scene: Scene, given: Tensor) -> tuple[float, bool]:
    """Return the mean weight policy/sampler, and whether it shows in every token that mass was cut off."""
    gap = -scene.gap(given, scene.logp).double()
    return float(gap.exp().mean()), bool((gap <= scene.tolerance).double().mean() >= 1 - SHARE)


@check("kept mass")
def kept_mass(scene: Scene) -> tuple[Any, ...]:
    """Which mass of the policy did the sampler keep? By the method of `kltest diagnose`."""
    name = next((one for one in ("rollout_logp", "old_logp") if one in scene.batch.fields), None)
    if name is None:
        return NOT_LOOKED_AT, "needs the log-probs of the engine, rollout_logp, or old_logp, in the batch"
    given, key = scene.batch.fields[name], scene.batch.keys[name]
    mean, sure = _kept(scene, given)
    numbers = {"kept_mass": mean}
    if abs(mean - 1) <= 1 - KEPT and not _distance(scene, given, scene.logp)[1]:
        return PASSED, f"Mean weight policy/{key} of a token: {mean:.4f}; nothing is cut off", numbers
    if sure and mean < KEPT:
        text = f"The sampler kept {mean:.4f} of the policy's mass and renormalised (top-k, top-p or min-p): each ratio "
        return WARNING, f"{text}to {key} holds the kept mass", numbers, "KL703"
    records = {"logp": scene.logp.cpu(), "rollout_logp": given.cpu(), "mask": scene.batch.live.cpu()}
    if "group" in scene.batch.fields:
        records["group"] = scene.batch.fields["group"].cpu()
    logs = read_logs(records)
    answer = questions.truncation(logs, Units(logs.group, 0.01 / MOST_INTERVALS), "rollout_logp", "logp")
    status = {FINDING: WARNING, NOTHING: PASSED}.get(answer.status, NOT_LOOKED_AT)
    return status, answer.message, numbers, answer.related


@check("coefficient")
def coefficient(scene: Scene) -> tuple[Any, ...]:
    """Does the coefficient reach the weights, and is the gradient linear in it?"""
    subject, part = scene.subject, scene.part(scene.at_other)
    numbers: dict[str, float] = {"gradient": part.norm}
    if part.norm <= 1e-12 * scene.given.norm or not part.gradients:
        if not scene.given.gradients:
            text = "The loss has no gradient at what the model returns"
            return FAILED, f"{text}: it was run without one, or its output is not used", numbers, "KL509"
        moves = subject.takes_beta and float(part.value) != 0
        text = (
            "The value moves with β and the gradient does not: the KL term is detached"
            if moves
            else ("The gradient is the same with β and without it: the coefficient is not used")
        )
        if not subject.takes_beta:
            text = "It has no gradient"
        return FAILED, text, numbers, "KL509" if moves else "KL510"
    reached = [name for name, norm in scene.norms.items() if norm > 0]
    numbers |= {"parameters": float(len(scene.norms)), "reached": float(len(reached))}
    if not reached:
        text = "no parameter requires one" if not scene.norms else "something on the way stops it"
        return FAILED, f"The KL term's gradient arrives at no parameter: {text}", numbers, "KL509"
    kinds = "adapters alone" if has_adapters(scene.pair.policy.model) and all("lora_" in one for one in reached) else ""
    text = f"The KL term moves {len(reached)} of {len(scene.norms)} trained tensors{kinds and f', {kinds}'}"
    if embeddings_tied(scene.pair.policy.model):
        text += "; input and output embedding are one matrix, which it moves on both ways"
    if not subject.takes_beta:
        return NOT_LOOKED_AT, f"{text}; it takes no coefficient, so that linearity was not looked at", numbers
    half = scene.part(scene.at_other, half=True)
    numbers["nonlinear"] = part.less(half).norm / part.norm
    if numbers["nonlinear"] > (scene.tolerance if subject.whole else LINEAR):
        share = f"{100 * numbers['nonlinear']:.2g} %"
        text = (
            f"The KL part of the gradient is not linear in β: over β it differs by {share} at β/2. Is it a coefficient?"
        )
        return FAILED, text, numbers, "KL106"
    # An adapter's first matrix has no gradient as long as its second one is zero.
    fresh = not any(norm > 0 for name, norm in scene.norms.items() if "lora_A" in name)
    missed = [name for name, norm in scene.norms.items() if not norm > 0 and not (fresh and "lora_A" in name)]
    if missed:
        return WARNING, f"{text}. Not moved, though they require a gradient: {_some(missed)}", numbers
    return PASSED, f"{text}, linearly in β", numbers


def _gets_nothing(scene: Scene, name: str, what: str, masked: Tensor) -> tuple[Any, ...]:
    subject, given = scene.subject, scene.given
    if not bool(masked.any()):
        return NOT_LOOKED_AT, f"the batch has no {what} among the positions that the loss gets"
    if not subject.takes_mask and subject.per_token:
        return NOT_LOOKED_AT, "it takes no mask and returns a number for each token: its caller masks them"
    if not given.gradients:
        return NOT_LOOKED_AT, "the loss has no gradient: see coefficient"
    norms = given.at_positions()
    wrong = norms[masked.to(norms.device)]
    share = float((wrong.square().sum() / norms.square().sum().clamp(min=1e-300)).sqrt())
    numbers = {"gradient": share, "positions": float(masked.sum())}
    if bool((wrong > 0).any()) or not bool(wrong.isfinite().all()):
        text = (
            f"{100 * share:.2g} % of the gradient is at {what}, at {int((wrong != 0).sum())} positions: mask the loss"
        )
        return FAILED, text, numbers, "KL501"
    if not torch.equal(given.value, scene.again.value):
        return (
            NOT_LOOKED_AT,
            "two calls of the loss with the same input give other values: it is not deterministic",
            numbers,
        )
    moved = float((scene.altered[name].value - given.value).abs())
    if moved or not bool(scene.altered[name].value.isfinite()):
        numbers["moved"] = moved
        return FAILED, f"The loss moves by {moved:.2g} if log-probs at {what} are altered: mask them", numbers, "KL501"
    return PASSED, f"No gradient at {what}, and not a bit of the loss depends on their log-probs", numbers


@check("padding")
def padding(scene: Scene) -> tuple[Any, ...]:
    """Does padding get nothing?"""
    subject, wider, given = scene.subject, scene.wider, scene.given
    found = _gets_nothing(scene, "padding", "padding", subject.padding)
    if found[0] == PASSED and not bool((scene.batch.padding & (scene.batch.live.cumsum(1) > 0)).any()):
        found = NOT_LOOKED_AT, "no padding stands behind a completion: give a batch with rollouts of different lengths"
    if wider is None or found[0] == FAILED or scene.again.value != given.value:
        return found
    if not subject.takes_mask and subject.per_token:
        return found
    added = wider.at_positions()[:, -WIDER:] if wider.gradients else torch.zeros(1)
    moved = float((wider.value - given.value).abs() / given.value.abs().clamp(min=1e-300))
    text = f"{WIDER} more columns of padding change the loss by {100 * moved:.2g} %"
    if bool((added != 0).any()):
        return FAILED, f"{text}, and have a gradient: mask the loss", {"wider": moved}, "KL501"
    if moved > 1e-6:
        return FAILED, f"{text}: a mean counts padding", {"wider": moved}, "KL207"
    if found[0] == NOT_LOOKED_AT and wider.gradients:
        return PASSED, "The batch has none behind completions; columns of padding that were added change nothing"
    return found


@check("prompt")
def prompt(scene: Scene) -> tuple[Any, ...]:
    """Do the prompt, and other tokens that do not count, get nothing?"""
    return _gets_nothing(scene, "prompt", "tokens of the prompt or of tools", scene.subject.others)


def unchanged(scene: Scene, changed: list[str]) -> Finding:
    """Is everything as it was, bit for bit, and has the loss written into nothing?"""
    if writes := [*scene.subject.writes.values()]:
        return Finding("unchanged", FAILED, "; ".join(writes).capitalize() + ". Work on a copy", {}, "KL505")
    if changed:
        return Finding("unchanged", FAILED, f"Not as before: {_some(changed)}: the loss writes into it")
    text = "Weights, gradients, buffers, modes and the batch are as they were, bit for bit"
    return Finding("unchanged", PASSED, text)

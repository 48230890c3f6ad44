"""Preflights: each planted bug is found by its check, its right sister passes, and nothing is left changed."""

import copy
import html
import json
import os
from importlib.resources import files
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from weekly import first, spread

import kltest
from benchmarks.preflight import BETA, CASES, adapted, found_by, k3, loop, per_token, policy, runs_models, unmasked
from kltest import KLPreflightCallback
from kltest.errors import KltestWarning, TargetError, UsageError
from kltest.preflighting.batches import read
from kltest.preflighting.models import Pair
from kltest.preflighting.preflight import preflight
from kltest.preflighting.report import PreflightError

SCHEMA = json.loads((files("kltest.preflighting") / "preflight-1.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", spread(8, CASES), ids=lambda case: case.name)
def test_planted_bugs_are_found_and_right_loops_are_not_accused(case):
    report = case.loop().preflight()
    found, accused = found_by(report, case)
    assert not accused, report.to_text()
    assert not case.checks or found & {*case.checks}, report.to_text()
    assert report.verdict == ("failed" if case.checks and not case.warns else "passed")
    assert report.exit_code == (report.verdict == "failed")
    assert report.passes.get("backward", 0) <= 1
    jsonschema.validate(json.loads(report.to_json()), SCHEMA)


def test_a_notebook_shows_the_text():
    one = CASES[0].loop().preflight()
    assert one._repr_html_() == f"<pre>{html.escape(one.to_text())}</pre>"


def test_the_names_of_checks_are_those_of_the_schema():
    known = SCHEMA["$defs"]["finding"]["properties"]["check"]["enum"]
    assert [one.check for one in loop().preflight().findings] == known
    assert {check for case in CASES for check in case.checks} == {*known}, "each check finds a planted bug"


def state(model):
    """An independent copy of all that a preflight must leave alone."""
    tensors = {name: one.detach().clone() for name, one in model.state_dict().items()}
    grads = {name: (one.grad, one.grad.clone()) for name, one in model.named_parameters() if one.grad is not None}
    return tensors, grads, {name: one.training for name, one in model.named_modules()}, torch.get_rng_state()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_models_gradients_modes_and_random_numbers_are_left_as_they_were(whole, lora):
    one = adapted(loop()) if lora else loop()
    one.loss = runs_models(k3) if whole else one.loss
    one.model.train()
    one.model.register_buffer("count", torch.zeros(1))
    one.model.register_forward_pre_hook(lambda module, given: module.count.add_(1) and None)
    for weight in one.model.parameters():
        weight.grad = torch.randn_like(weight) if weight.requires_grad else None
    batch = {name: value.clone() for name, value in one.batch.items()}
    models = [one.model] if lora else [one.model, one.ref]
    before = [state(model) for model in models]
    report = one.preflight()
    assert report["unchanged"].status == "passed"
    for model, (tensors, grads, modes, random) in zip(models, before, strict=True):
        now = state(model)
        assert all(torch.equal(value, now[0][name]) for name, value in tensors.items())
        assert {*grads} == {*now[1]}
        assert all(now[1][name][0] is held and torch.equal(held, value) for name, (held, value) in grads.items())
        assert (modes, True) == (now[2], torch.equal(random, now[3]))
    assert all(torch.equal(value, one.batch[name]) for name, value in batch.items())


def test_equal_weights_are_written_and_taken_back_though_a_pass_fails():
    one = loop()
    pair, kept = Pair(*(SimpleNamespace(model=each) for each in (one.model, one.ref))), copy.deepcopy(one.ref)

    def fails():
        with pair.equal():
            inside.extend(torch.equal(*both) for both in zip(one.model.parameters(), one.ref.parameters(), strict=True))
            raise ZeroDivisionError

    inside = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert inside == [True] * len(list(one.ref.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), one.ref.parameters(), strict=True))


def test_the_norms_of_the_gradient_are_those_of_the_kl_term_differentiated_by_hand():
    """An independent route: the KL term written with the model's own passes, and backward()."""
    one = loop()
    report = one.preflight()
    batch, width = one.batch, one.batch["completion_ids"].shape[1]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = one.model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
    logp = logits[:, -width - 1 : -1].log_softmax(-1).gather(2, batch["completion_ids"][..., None])[..., 0]
    logp.retain_grad()
    # The reference of this check is 1.25·log ref − .1.
    gap = 1.25 * per_token(one, one.ref) - 0.1 - logp
    mask = batch["completion_mask"]
    ((((gap.exp() - gap - 1) * mask).sum(1)) / mask.sum(1)).mean().backward()
    # Rounding of float32 in other orders.
    assert report["coefficient"].numbers["gradient"] == pytest.approx(float(logp.grad.norm()), rel=1e-4)
    assert report["coefficient"].numbers["reached"] == len(list(one.model.parameters()))


@pytest.mark.scheduled
def test_reasons_of_ratios_are_named():
    words = {
        "log-probs shifted by a token": "one token too far to the right",
        "temperature in the sampler alone": "temperature of 0.7",
        "log-probs without the attention mask": "without the attention mask",
        "older log-probs are the reference's": "they are the reference's",
        "top-p .8, renormalised": "renormalised",
        "older log-probs of other weights": "on_policy=False",
    }
    for name, text in words.items():
        case = next(one for one in CASES if one.name == name)
        assert text in case.loop().preflight()["ratios"].message, name
    older = next(one for one in CASES if one.name == "older log-probs of other weights").loop()
    older.options["on_policy"] = False
    assert older.preflight()["ratios"].status == "warning"


def test_a_kept_mass_is_the_mean_of_what_was_cut_off():
    one = loop()
    kept = per_token(one, one.model, top_p=0.8)
    one.batch["sampling_per_token_logps"] = kept
    live = one.batch["completion_mask"] != 0
    mass = (one.batch["old_per_token_logps"] - kept)[live].exp().mean()
    assert one.preflight()["kept mass"].numbers["kept_mass"] == pytest.approx(float(mass), rel=1e-4)


@pytest.mark.parametrize("loss", ["k3-loss", "k2-loss", "full-loss"])
def test_registered_losses_are_named_as_elsewhere(loss):
    one = loop()
    one.loss = loss
    report = one.preflight()
    assert report.verdict == "passed", report.to_text()
    assert report["equal weights"].status == "passed"
    # They take no coefficient: not looked at is never passed.
    assert report["coefficient"].status == "not looked at"


def test_a_term_in_the_reward_is_placed():
    one = loop()
    one.loss, one.options = "k1-reward", {}
    assert one.preflight()["equal weights"].status == "passed"


def test_a_batch_without_padding_is_given_some():
    one = loop()
    for name in ("completion_mask", "prompt_mask"):
        one.batch[name] = torch.ones_like(one.batch[name])
    one.batch["old_per_token_logps"] = per_token(one, one.model)
    assert one.preflight()["padding"].status == "passed"
    one.loss = unmasked
    assert one.preflight()["padding"].status == "failed"
    one.loss = runs_models(k3)
    assert one.preflight()["padding"].status == "not looked at"


LAYOUTS = {
    "split": {"prompt_ids": [[0, 5], [4, 5]], "completion_ids": [[3, 1, 0], [4, 4, 1]]},
    "mask": {"input_ids": [[0, 5, 3, 1, 0], [4, 5, 4, 4, 1]], "response_mask": [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]},
    "short mask": {"input_ids": [[0, 5, 3, 1, 0], [4, 5, 4, 4, 1]], "loss_mask": [[1, 1, 0], [1, 1, 1]]},
    "labels": {
        "input_ids": [[0, 5, 3, 1, 0], [4, 5, 4, 4, 1]],
        "labels": [[-100, -100, 3, 1, -100], [-100, -100, 4, 4, 1]],
    },
    "lengths": {"input_ids": [[0, 5, 3, 1, 0], [4, 5, 4, 4, 1]], "prompt_lengths": [1, 2]},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_say_the_same(name):
    given = {key: torch.tensor(value) for key, value in LAYOUTS[name].items()}
    if name == "split":
        given["completion_mask"] = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = read(given, 0, 6)
    assert found.at_logits("live").int().tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]]
    assert found.at_logits("padding").int().tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert found.at_logits("others").int().tolist() == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert not found.wrong


REFUSED = {
    "no ids": (lambda one: {"completion_mask": one["completion_mask"]}, "the batch has no ids"),
    "no mask": (lambda one: {"input_ids": one["completion_ids"]}, "nothing says which tokens count"),
    "empty": (lambda one: {**one, "completion_mask": 0 * one["completion_mask"]}, "no token counts"),
    "vocabulary": (lambda one: {**one, "completion_ids": one["completion_ids"] + 90}, "not in the model's vocabulary"),
    "shape": (lambda one: {**one, "old_logp": torch.zeros(3, 2), "old_per_token_logps": None}, "old_logp has shape"),
    "not finite": (lambda one: {**one, "old_per_token_logps": one["old_per_token_logps"] / 0}, "is not finite"),
    "list": (lambda one: [1, 2], "a batch is a mapping"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    change, text = REFUSED[name]
    one = loop()
    with pytest.raises(UsageError, match=text):
        preflight(k3, one.model, one.ref, change(one.batch), beta=BETA)


def test_refusals_of_models_and_losses_say_why(tmp_path):
    one = loop()
    for given, text in (
        ((k3, one.model, None), "has no adapters that could be disabled"),
        ((k3, "model", one.ref), "a model is a module of torch"),
        ((k3, one.model, str(tmp_path / "none")), "there is no such folder"),
        ((lambda model, batch, other: 0, one.model, one.ref), "nothing fills other"),
        ((lambda logp, other: logp, one.model, one.ref), "'other'"),
    ):
        with pytest.raises(UsageError, match=text):
            preflight(*given, one.batch)
    with pytest.raises(UsageError, match="β is 0"):
        preflight(k3, one.model, one.ref, one.batch, beta=0.0)
    with pytest.raises(TargetError, match="division by zero"):
        preflight(lambda model, batch: 1 / 0, one.model, one.ref, one.batch)


def test_a_folder_is_a_reference(tmp_path):
    from benchmarks.preflight import language

    one = loop()
    one.ref.save_pretrained(tmp_path)
    language(one.ref).tokenizer.save_pretrained(tmp_path)
    one.ref = tmp_path
    report = one.preflight()
    assert report.verdict == "passed", report.to_text()


def test_tokenizers_are_compared():
    from kltest.language_models.models import tiny_tokenizer

    one = loop()
    one.options |= {"tokenizer": tiny_tokenizer("0123456789+="), "ref_tokenizer": tiny_tokenizer("abcdefghij+=")}
    found = one.preflight()["tokenizer"]
    assert found.status == "failed"
    assert "other ids" in found.message


def test_half_precision_warns_and_does_not_accuse():
    """Log-probs that an engine computed in bfloat16."""
    one = loop()
    noise = 0.005 * torch.randn(one.batch["old_per_token_logps"].shape, generator=torch.Generator().manual_seed(0))
    one.batch["old_per_token_logps"] = one.batch["old_per_token_logps"] + noise
    assert one.preflight()["ratios"].status == "warning"


def test_another_architecture_has_no_equal_weights():
    one = loop()
    one.ref = kltest_model("tiny:100k")
    report = one.preflight()
    assert report["equal weights"].status == "passed", "the policy's log-probs are its own reference's"
    one.loss = runs_models(k3)
    assert one.preflight()["equal weights"].status == "not looked at"


def kltest_model(size):
    from kltest.auditing.models import load

    return load(size, "ref", seed=0, dtype="float32", device="cpu").model.requires_grad_(False)


class KLTrainer(Trainer):
    """A trainer with a KL term, as it is in many repositories."""

    def __init__(self, ref, beta, term, **given):
        super().__init__(**given)
        self.ref_model, self.beta, self.term = ref, beta, term

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return runs_models(self.term)(model, self.ref_model, inputs, self.beta)


def trained(tmp_path, term=k3, beta=BETA, **options):
    one = loop()
    # A trainer shuffles; all rows are in its first batch.
    rows = [{name: value[row] for name, value in one.batch.items()} for row in range(len(one.batch["advantages"]))]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=len(rows), logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = KLTrainer(one.ref, beta, term, model=one.model, args=arguments, train_dataset=rows)
    callback = None
    if options.pop("callback", True):
        callback = KLPreflightCallback(trainer, **options)
        trainer.add_callback(callback)
    trainer.train()
    return callback, trainer


def test_a_callback_looks_once_and_leaves_training_as_it_is(tmp_path):
    callback, trainer = trained(tmp_path)
    assert callback.report.verdict == "passed", callback.report.to_text()
    assert callback.report.beta == trainer.beta == BETA
    assert "compute_loss" not in vars(trainer)
    logged = [row for row in trainer.state.log_history if "kl_preflight/failed" in row]
    assert len(logged) == 1
    assert logged[0]["kl_preflight/failed"] == 0
    _, plain = trained(tmp_path, callback=False)
    pairs = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.scheduled
def test_a_callback_stops_warns_or_logs(tmp_path):
    with pytest.raises(PreflightError, match="FAILED: padding"):
        trained(tmp_path, unmasked)
    with pytest.warns(KltestWarning, match="FAILED: padding"):
        trained(tmp_path, unmasked, failure="warn")
    callback, _ = trained(tmp_path, unmasked, failure="log")
    assert callback.report.having("failed") == ["padding"]
    with pytest.raises(UsageError, match="no KL term to look at"):
        trained(tmp_path, beta=0.0)
    with pytest.raises(UsageError, match="give raise, warn or log"):
        trained(tmp_path, failure="never")
    # A term that is filled by name, in the place of the trainer's loss.
    callback, _ = trained(tmp_path, loss=k3)
    assert callback.report.target == "k3"


@pytest.fixture
def one_process(tmp_path, monkeypatch):
    """A process group of one."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    address = (tmp_path / "store").as_uri() if os.name != "nt" else f"file:///{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def fsdp(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use", "ignore:.*no_shard", "ignore::FutureWarning")
@pytest.mark.parametrize("wrap", first(1, [fsdp, fsdp2, nn.parallel.DistributedDataParallel]))
@pytest.mark.parametrize("whole", [False, True])
def test_weights_that_devices_share(one_process, wrap, whole):
    one = loop()
    one.loss = runs_models(k3) if whole else one.loss
    one.model = wrap(one.model)
    one.ref = wrap(one.ref) if wrap is not nn.parallel.DistributedDataParallel else one.ref
    report = one.preflight()
    assert report.verdict == "passed", report.to_text()
    assert report["equal weights"].numbers["apart"] == 0
    assert report["coefficient"].numbers["reached"] == report["coefficient"].numbers["parameters"] == 21
    one.loss = runs_models(unmasked) if whole else unmasked
    assert one.preflight().having("failed") == ["padding"]


def test_texts_and_numbers_for_logs():
    report = loop().preflight()
    assert report.first_line() == "PASSED; 2 of 12 checks not looked at"
    assert report.scalars()["passed"] == 10
    assert report.scalars()["equal_weights/value"] == 0
    assert kltest.preflight is preflight
    report.raise_for_failure()


def test_a_loss_that_draws_random_numbers_is_not_called_exact():
    def noisy(logp, ref_logp, old_logp, mask, advantages, beta):
        return k3(logp, ref_logp, old_logp, mask, advantages, beta) + 0 * torch.rand(()) + torch.rand(())

    one = loop()
    one.loss = noisy
    assert one.preflight()["padding"].status == "not looked at"


def test_a_packed_batch_is_refused():
    def packed(model, ref, batch, beta):
        return model(input_ids=batch["completion_ids"].reshape(1, -1)).logits.sum() * beta

    one = loop()
    one.loss = packed
    with pytest.raises(UsageError, match="packed"):
        one.preflight()


def test_policies_are_drawn_anew():
    assert not torch.equal(*(next(policy(seed).parameters()) for seed in (0, 1)))


def test_a_loss_gets_the_engines_log_probs_beside_the_trainers():
    seen = []

    def recorded(logp, ref_logp, old_logp, rollout_logp, mask, beta):
        seen.append(float(((rollout_logp - old_logp) * mask).abs().max()))
        return beta * ((logp - ref_logp).square() * mask).sum(-1)

    one = loop()
    trainers = per_token(one, one.model).detach()
    one.batch |= {"old_logp": trainers, "rollout_logp": trainers - 0.25}
    one.loss = recorded
    one.preflight()
    assert max(seen) == pytest.approx(0.25, abs=1e-5)

"""Real trainers of TRL with a tiny Llama, audited as they train; prints what was found, in an environment with TRL."""

import json
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from kltest import KLAuditCallback

WORDS = [f"t{number}" for number in range(8)]
PROMPTS = [{"prompt": f"{one} {other}"} for one in WORDS[1:7] for other in WORDS[1:7]] * 15


class WithK1(GRPOTrainer):
    """A planted bug: the log-ratio itself as the KL term, whose gradient is zero in expectation."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.latest = scored[0]
        return scored

    def _compute_loss(self, model, inputs):
        beta, self.beta = self.beta, 0.0
        loss = super()._compute_loss(model, inputs)
        self.beta = beta
        k1 = (self.latest - inputs["ref_per_token_logps"]) * inputs["completion_mask"]
        return loss + beta * k1.sum(1).mean()


def tokenizer():
    built = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="t1"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=built, pad_token="t0", eos_token="t7", padding_side="left")


def moved(llama, step):
    """Add noise to each matrix, in units of one over the root of its columns."""
    with torch.no_grad():
        for one in llama.parameters():
            if one.dim() == 2:
                one += step * one.shape[1] ** -0.5 * torch.randn_like(one)


def model(folder, dropout):
    """A Llama of one layer, far from uniform; in a folder, from which trainers load their reference."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": len(WORDS), "eos_token_id": 7, "pad_token_id": 0}
    llama = LlamaForCausalLM(LlamaConfig(**shape, **ids, attention_dropout=dropout))
    moved(llama, 1.0)
    llama.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def reward(completions, **others):
    return [float(text.count("t3")) for text in completions]


def trained(trainer, audited=True, *, prompts=64, units=64, every=1, steps=2, batches=1, dropout=0.0, **settings):
    """Return a trainer after a few steps on so many prompts each, and its callback if it is audited."""
    kind = GRPOConfig if issubclass(trainer, GRPOTrainer) else RLOOConfig
    quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4 * prompts // batches, "max_completion_length": 3}
    with tempfile.TemporaryDirectory() as folder:
        arguments = kind(
            output_dir=folder,
            logging_steps=1,
            max_steps=steps,
            learning_rate=1e-2,
            gradient_accumulation_steps=batches,
            beta=0.5,
            seed=1,
            **quiet,
            **sizes,
            **settings,
        )
        built = trainer(
            model(folder, dropout), reward, arguments, Dataset.from_list(PROMPTS), processing_class=tokenizer()
        )
        torch.manual_seed(2)
        moved(built.ref_model, 0.5)
        audits = KLAuditCallback(built, every=every, units=units) if audited else None
        if audits:
            built.add_callback(audits)
        built.train()
    return built, audits


LUSPO = {"loss_type": "luspo"}
CASES = {
    "grpo/loss_type=luspo": (GRPOTrainer, LUSPO),
    "grpo/loss_type=luspo,use_bias_correction_kl=false": (GRPOTrainer, {**LUSPO, "use_bias_correction_kl": False}),
    "grpo/loss_type=luspo,use_bias_correction_kl=true,num_iterations=2": (
        GRPOTrainer,
        {**LUSPO, "num_iterations": 2, "batches": 2, "prompts": 256, "units": 128, "steps": 4},
    ),
    "grpo/defaults": (GRPOTrainer, {}),
    "rloo/defaults": (RLOOTrainer, {"batches": 2, "prompts": 256, "units": 256}),
    "planted k1": (WithK1, LUSPO),
}


def untouched(trainer, **settings):
    """True if weights and logs of training with and without audits are the same to the last bit."""
    runs = [
        trained(trainer, audited, prompts=8, units=12, steps=5, batches=2, dropout=0.3, **settings)
        for audited in (False, True)
    ]
    weights = [run.model.state_dict() for run, _ in runs]
    logs = [
        [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k} for row in run.state.log_history]
        for run, _ in runs
    ]
    plain = [{k: v for k, v in row.items() if not k.startswith("kl_audit/")} for row in logs[1]]
    assert any(row != other for row, other in zip(plain, logs[1], strict=True))
    return all(torch.equal(one, weights[1][name]) for name, one in weights[0].items()) and logs[0] == plain


if __name__ == "__main__":
    found = {}
    for name, (trainer, settings) in CASES.items():
        built, callback = trained(trainer, **settings)
        logged = [row for row in built.state.log_history if "kl_audit/units" in row]
        found[name] = {"audits": [one.to_dict() for one in callback.audits.values()], "logged": logged}
    found["untouched"] = [untouched(GRPOTrainer), untouched(RLOOTrainer), untouched(RLOOTrainer, num_iterations=2)]
    print(json.dumps(found))

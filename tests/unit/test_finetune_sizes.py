"""The language-model runner at real sizes: memory is bounded, and what does not fit is refused before training."""

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from storage import Storage

from kltest.errors import KltestError, UsageError
from kltest.finetune.settings import Settings

transformers = pytest.importorskip("transformers")

from kltest.files import write  # noqa: E402
from kltest.finetune import evaluation  # noqa: E402
from kltest.finetune.checkpoints import RunFolder  # noqa: E402
from kltest.finetune.models import Models  # noqa: E402
from kltest.finetune.run import run  # noqa: E402
from kltest.language_models import scoring  # noqa: E402
from kltest.language_models.generation import generate  # noqa: E402
from kltest.language_models.language import LanguageModel  # noqa: E402
from kltest.language_models.models import save, tiny_model, tiny_tokenizer  # noqa: E402

VOCABULARY, ROWS, TOKENS = 5000, 16, 32
# Bytes of logits for all of them in float32.
LOGITS = 4 * VOCABULARY * ROWS * TOKENS


def language(seed=0, **changes):
    torch.manual_seed(seed)
    model = tiny_model(10_000, VOCABULARY, VOCABULARY - 1, 0).eval()
    return LanguageModel(model, None, (VOCABULARY - 1,), 0, **changes)


@pytest.fixture(scope="module")
def policy():
    return language()


@pytest.fixture(scope="module")
def rollouts(policy):
    uniforms = torch.from_numpy(np.random.default_rng(0).random((ROWS, TOKENS)))
    return generate(policy, [[3, 4, 5]] * 4, uniforms)


def scored(policy, rollouts):
    """Log-probs, the gradient of their sum and the most bytes on the way, in logits."""
    policy.model.zero_grad()
    with Storage() as storage:
        logp = scoring.score(policy, rollouts).logp
        logp.sum().backward()
    return logp.detach(), policy.model.model.embed_tokens.weight.grad.clone(), storage.most / LOGITS


def test_scoring_keeps_the_models_logits_and_little_more(policy, rollouts, monkeypatch):
    whole = scored(policy, rollouts)
    monkeypatch.setattr(scoring, "LOGITS", VOCABULARY * ROWS)
    parts = scored(policy, rollouts)
    assert torch.equal(parts[0], whole[0])
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-5, atol=1e-7)  # another order of sums in float32
    # At once: logits, log-probs and their gradients. In pieces: the logits and their gradient, once in pieces.
    assert whole[2] > 3
    assert parts[2] < 2.6


def test_an_evaluation_has_no_more_rows_in_memory_than_fit(policy, rollouts, monkeypatch):
    models = Models(policy, language(1))

    def measured():
        with Storage() as storage:
            found = evaluation.kl_and_entropy(models, rollouts, Settings())
        return torch.stack(found), storage.most / LOGITS

    whole = measured()
    monkeypatch.setattr(evaluation, "LOGITS", VOCABULARY * TOKENS * 2)
    parts = measured()
    # Rows are scored two at a time, with another order of sums in float32.
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-4, atol=1e-6)
    assert parts[1] < whole[1] / 6


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model in bfloat16 with 40 positions, and a file of sums; as a function of the model's configuration."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = tiny_tokenizer("0123456789+= ")

    def saved(**config):
        torch.manual_seed(0)
        model = tiny_model(10_000, len(tokenizer), 1, 0).bfloat16()
        for name, value in {"max_position_embeddings": 40, **config}.items():
            setattr(model.config, name, value)
        model.generation_config.eos_token_id = model.config.eos_token_id
        save(model, tokenizer, tmp_path / "model")
        return str(tmp_path / "model")

    return saved


def lines(path, *problems):
    path.write_text("".join(json.dumps(one) + "\n" for one in problems))
    return f"jsonl:{path}"


TRAIN = [{"prompt": f"{n}+1=", "answer": str(n + 1), "split": "train"} for n in range(9)]
HELD_OUT = {"prompt": "9+1=", "answer": "10", "split": "held-out"}
SHORT = Settings(steps=1, prompts=4, group_size=2, max_tokens=4, eval_prompts=4, device="cpu")


def test_a_model_is_saved_in_the_dtype_in_which_it_came(folder, tmp_path):
    settings = replace(SHORT, model=folder(), task=lines(tmp_path / "data", *TRAIN, HELD_OUT))
    run(settings, tmp_path / "run", quiet=True)
    kept = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert kept[name].dtype == torch.float32  # trained in float32
        assert torch.equal(value, kept[name].bfloat16())


def test_what_cannot_be_trained_on_is_refused_before_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kltest.finetune.run.Training.next", lambda *_: pytest.fail("it was trained on"))
    data = lines(tmp_path / "data", *TRAIN, HELD_OUT)
    with pytest.raises(UsageError, match="no problem whose split is held-out: give some"):
        run(replace(SHORT, model=folder(), task=lines(tmp_path / "train", *TRAIN)), quiet=True)
    with pytest.raises(UsageError, match=r"end tokens \[1, 99\] are not all among the model's 16 ids"):
        run(replace(SHORT, model=folder(eos_token_id=[1, 99]), task=data), quiet=True)
    long = lines(tmp_path / "long", *TRAIN, {**HELD_OUT, "prompt": "1+" * 19})
    with pytest.raises(UsageError, match=r"a prompt of 38 tokens and a completion of 4 are too long .* 40 positions"):
        run(replace(SHORT, model=folder(), task=long), quiet=True)


@pytest.mark.parametrize("kind", ["openai-gpt", "mamba"])
def test_a_model_without_a_key_value_cache_reads_everything_again(kind):
    """Prompts of one token included, where the model would otherwise never see the prompt."""
    sizes = {
        "openai-gpt": {"n_embd": 16, "n_layer": 2, "n_head": 2},
        "mamba": {"hidden_size": 16, "num_hidden_layers": 2},
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=12, initializer_range=0.5, **sizes[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    here = LanguageModel(model, None, (1,), 0)
    assert not here.caches
    uniforms = torch.from_numpy(np.random.default_rng(0).random((4, 7)))
    for prompts in ([[3], [5]], [[3, 4, 5], [6, 7, 8]]):
        found = generate(here, prompts, uniforms)
        assert int(found.lengths.max()) > 1
        with torch.no_grad():
            answers = model(torch.cat([found.prompts, found.tokens], dim=1)).logits.log_softmax(-1)
        width = found.prompts.shape[1]
        expected = answers[:, width - 1 : -1].gather(2, found.tokens[:, :, None])[:, :, 0]
        # Float64 in one pass and in one a token.
        for logp in (found.sampled_logp, scoring.score(here, found).logp.detach()):
            torch.testing.assert_close(logp[found.mask], expected[found.mask], rtol=0, atol=1e-10)


def test_a_frozen_copy_in_bfloat16_has_the_same_log_probs_and_half_the_bytes(rollouts, monkeypatch):
    here = language(compute_dtype=torch.bfloat16)
    frozen = here.frozen()
    assert torch.equal(scoring.score(frozen, rollouts).logp, scoring.score(here, rollouts).logp)
    sizes = [sum(one.nbytes for one in each.model.parameters() if one.dim() == 2) for each in (here, frozen)]
    embedding = 4 * here.model.model.embed_tokens.weight.numel()
    assert sizes[1] - embedding == (sizes[0] - embedding) / 2
    tied = language(compute_dtype=torch.bfloat16)
    tied.model.lm_head.weight = tied.model.model.embed_tokens.weight
    assert torch.equal(scoring.score(tied.frozen(), rollouts).logp, scoring.score(tied, rollouts).logp)


def test_a_checkpoint_is_not_in_memory_a_second_time(tmp_path):
    state = {"model": torch.zeros(2**20)}
    files = RunFolder(tmp_path, SHORT)
    files.restore()
    tracemalloc.start()
    files.save(state)
    assert tracemalloc.get_traced_memory()[1] < state["model"].nbytes / 4
    tracemalloc.stop()
    assert torch.equal(files.restore()["model"], state["model"])
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(KltestError, match=r"cannot write .*: No space left on device"),
    ):
        write(tmp_path / "checkpoint.pt", lambda file: torch.save(state, full))
    assert torch.equal(files.restore()["model"], state["model"])

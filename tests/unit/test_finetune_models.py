"""Generation, scoring and tasks of the language-model runner: each against another way to the same numbers."""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from weekly import spread

from kltest.errors import TargetError, UsageError
from kltest.finetune.settings import GONE, Settings, changed, read, settings_of
from kltest.finetune.tasks import SPLITS, Addition, is_held_out, task_named

transformers = pytest.importorskip("transformers")

from kltest.finetune.rollouts import _scores  # noqa: E402
from kltest.language_models.generation import Rollouts, generate  # noqa: E402
from kltest.language_models.language import LanguageModel  # noqa: E402
from kltest.language_models.models import in_double, parameters_asked, tiny_model, tiny_shape, tiny_tokenizer  # noqa: E402
from kltest.language_models.scoring import score  # noqa: E402

PROMPTS = [[3, 4, 5, 6], [7, 8], [3]]


def language(kind="llama", *, tied=False, pad=0):
    if kind == "gpt2":
        torch.manual_seed(3)
        ends = {"n_positions": 64, "bos_token_id": None, "eos_token_id": 1}
        config = transformers.GPT2Config(vocab_size=12, n_embd=16, n_layer=2, n_head=2, **ends)
        model = transformers.GPT2LMHeadModel(config)  # tied by default
    else:
        torch.manual_seed(3)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        ends = {"initializer_range": 0.3, "tie_word_embeddings": tied, "eos_token_id": 1}
        model = in_double(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=12, **sizes, **ends)))
    return LanguageModel(model.double().eval(), None, (1,), pad)


def alone(model, prompt, tokens, temperature):
    """(L,) log-probs of one rollout by a plain forward pass without padding, mask or cache."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0] / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("pad", spread(4, [0, 1]), ids=["own padding", "padded with the end token"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generation_and_scoring_agree_with_a_plain_forward_pass(kind, tied, temperature, pad):
    here = language(kind, tied=tied, pad=pad)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((6, 9)))
    found = generate(here, PROMPTS, uniforms, temperature=temperature)
    scores = score(here, found, temperature=temperature, logits=True)
    assert 1 < int(found.lengths.min()) < int(found.lengths.max())  # both ended early and padded
    for row, length in enumerate(found.lengths.tolist()):
        tokens = found.tokens[row, :length].tolist()
        expected = alone(here.model, PROMPTS[row // 2], tokens, temperature)
        # Float64 throughout for Llama; GPT-2's attention mask adds a large finite number, which rounds alike.
        np.testing.assert_allclose(found.sampled_logp[row, :length], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(scores.logp[row, :length].detach(), expected, rtol=0, atol=1e-12)
        assert 1 not in tokens[:-1]
        assert tokens[-1] == 1 or length == 9
    assert scores.logits.detach().exp().sum(-1).numpy() == pytest.approx(1.0, abs=1e-12)


def test_padding_on_the_left_says_nothing():
    """Prompts of three lengths together, and each with more padding than it needs."""
    here = language()
    uniforms = torch.from_numpy(np.random.default_rng(1).random((3, 6)))
    together = generate(here, PROMPTS, uniforms)
    wide = Rollouts(
        **{
            **vars(together),
            "prompts": torch.nn.functional.pad(together.prompts, (5, 0), value=9),
            "prompt_mask": torch.nn.functional.pad(together.prompt_mask, (5, 0)),
        }
    )
    one, other = (score(here, rollouts).logp.where(together.mask, 0.0) for rollouts in (together, wide))
    np.testing.assert_allclose(one.detach(), other.detach(), rtol=0, atol=1e-12)
    for row, prompt in enumerate(PROMPTS):
        single = generate(here, [prompt], uniforms[row : row + 1])
        length = int(together.lengths[row])
        assert single.tokens[0].tolist() == together.tokens[row, :length].tolist()


def test_tokens_come_as_often_as_their_probabilities_say():
    """A stratified sample: one uniform in each of n equal parts hits a token n·p times, but for its two borders."""
    here, n = language(), 3000
    uniforms = ((torch.arange(n) + 0.5) / n)[:, None].double()
    found = generate(here, [PROMPTS[0]], uniforms)
    with torch.no_grad():
        expected = here.model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1) * n
    counts = torch.bincount(found.tokens[:, 0], minlength=12)
    assert float((counts - expected).abs().max()) <= 1.0 + 1e-6


def test_a_tokenizer_of_characters_gives_texts_back():
    tokenizer = tiny_tokenizer("0123456789+=,; \n")
    text = "12+3 =\n5;"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text


def test_of_fixed_length_no_special_token_is_drawn_and_none_ends_a_rollout():
    """Other tokens share what the special ones had; scoring says the same as generation."""
    tokenizer = tiny_tokenizer("abcd")
    torch.manual_seed(0)
    usual = LanguageModel.of(tiny_model(20_000, len(tokenizer), 1, 0), tokenizer)
    fixed, prompts = usual.of_fixed_length(), [usual.encode("ab"), usual.encode("abc")]
    uniforms = torch.rand(200, 7)
    assert usual.end == (1,)
    assert generate(usual, prompts, uniforms).lengths.min() < 7
    found = generate(fixed, prompts, uniforms)
    assert found.lengths.tolist() == [7] * 200
    assert {len(text) for text in fixed.texts(found.tokens, found.mask)} == {7}
    assert not found.ended(fixed.end).any()
    ours, theirs = (score(one, found, logits=True).logits.exp() for one in (fixed, usual))
    assert ours[..., :3].max() == 0
    torch.testing.assert_close(ours[..., 3:], theirs[..., 3:] / theirs[..., 3:].sum(-1, keepdim=True))
    torch.testing.assert_close(score(fixed.frozen(), found).logp, found.sampled_logp, atol=1e-5, rtol=1e-5)


def test_a_model_that_names_no_end_or_no_padding():
    model = tiny_model(10_000, 12, 1, 0)
    tokenizer = tiny_tokenizer("0123456789")
    tokenizer.pad_token = None
    assert LanguageModel.of(model, tokenizer).pad == tokenizer.eos_token_id
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="no end token"):
        LanguageModel.of(model, tokenizer)


@pytest.mark.parametrize("asked", [200_000, 500_000, 1_000_000, 5_000_000, 20_000_000, 100_000_000])
def test_tiny_models_have_about_the_size_asked_for(asked):
    width, layers = tiny_shape(asked)
    assert width % 32 == 0
    with torch.device("meta"):
        size = sum(one.numel() for one in tiny_model(asked, 20, 1, 0).parameters())
    # Widths are multiples of a head's, 32, so that small models come in steps.
    assert 0.7 < size / asked < 1.4
    assert size == pytest.approx(12 * width**2 * layers, rel=0.05)


@pytest.mark.parametrize(
    ("name", "size"), [("tiny", 200_000), ("tiny:1M", 1_000_000), ("tiny:0.5m", 500_000), ("tiny:50k", 50_000)]
)
def test_sizes(name, size):
    assert parameters_asked(name) == size


@pytest.mark.parametrize("name", ["tiny:", "tiny:big", "tiny:1G", "tiny:1", "tiny:-1M"])
def test_what_is_no_size(name):
    with pytest.raises(UsageError, match="tiny:SIZE"):
        parameters_asked(name)


@pytest.mark.parametrize("name", ["addition:1", "addition"])
def test_the_written_answers_are_right_and_splits_are_apart(name):
    task = task_named(name)
    drawn = {split: task.draw(split, 200, np.random.default_rng(0)) for split in SPLITS}
    for split, problems in drawn.items():
        for problem in problems:
            assert task.reward(problem, problem.completion) == 1.0
            assert len(problem.completion) + 1 <= task.max_tokens
            assert set(problem.prompt + problem.completion) <= set(task.characters)
            assert split == "out-of-distribution" or is_held_out(problem.prompt) == (split == "held-out")
    prompts = {split: {problem.prompt for problem in problems} for split, problems in drawn.items()}
    assert not prompts["train"] & prompts["held-out"]
    assert not prompts["train"] & prompts["out-of-distribution"]
    assert task.draw("train", 5, np.random.default_rng(7)) == task.draw("train", 5, np.random.default_rng(7))


def test_addition_is_rewarded_for_the_sum_alone():
    task = Addition(2)
    problem = next(one for one in task.draw("train", 100, np.random.default_rng(0)) if len(one.prompt) == 6)
    first, second = map(int, problem.prompt[:-1].split("+"))
    assert problem.answer == str(first + second)
    assert task.reward(problem, f"nonsense;{first + second}") == 1.0
    for wrong in (f"{first + second}", f";{first + second + 1}", "", f";{first + second} ", f";{first + second},"):
        assert task.reward(problem, wrong) == 0.0


GENERATOR = np.random.default_rng(0)


def lines_file(tmp_path, *lines):
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return f"jsonl:{path}"


def test_a_file_of_prompts(tmp_path):
    name = lines_file(
        tmp_path,
        {"prompt": "2+3=", "answer": "5", "split": "train"},
        "",
        {"prompt": "1000+1=", "answer": "1,001", "completion": "#### 1001", "split": "held-out"},
    )
    task = task_named(name)
    (problem,) = task.draw("train", 1, np.random.default_rng(0))
    assert (problem.prompt, problem.completion) == ("2+3=", "5")
    right = ["5", " 5 \n", "it is\n5", "#### 5", "so \\boxed{5}", "Answer: 5.", "answer is: 5"]
    assert [task.reward(problem, text) for text in right] == [1.0] * len(right)
    assert [task.reward(problem, text) for text in ("6", "", "5 or 6", "#### 6\n5")] == [0.0] * 4
    (other,) = task.draw("held-out", 1, np.random.default_rng(0))
    assert task.reward(other, "#### 1001") == 1.0
    with pytest.raises(UsageError, match="out-of-distribution"):
        task.draw("out-of-distribution", 1, np.random.default_rng(0))


@pytest.mark.parametrize("many", [2, 3, 10])
def test_a_few_lines_are_split_as_they_are(tmp_path, many):
    for shift in range(30):  # hashes of some of them put all prompts into one split
        task = task_named(lines_file(tmp_path, *({"prompt": f"{shift + n}=", "answer": "1"} for n in range(many))))
        one, other = ({each.prompt for each in task.draw(split, 200, GENERATOR)} for split in ("train", "held-out"))
        assert one
        assert other
        assert not one & other
        assert task.told.startswith(f"{many} problems: {len(one)} train, {len(other)} held-out; ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2: write an object"),
        ({"prompt": "x"}, 'line 2: "answer" must be a text'),
        ({"prompt": "", "answer": "1"}, 'line 2: "prompt" must be'),
        ({"prompt": "x", "answer": 1}, 'line 2: "answer" must be a text that is not empty; it is 1'),
        ({"prompt": "x", "answer": "1", "spilt": "train"}, "line 2: 'spilt'"),
        ({"a": "x", "b": "1"}, "--set keys=prompt=question,answer=solution"),
        ({"prompt": "x", "answer": "1", "split": "test"}, 'line 2: "split" is one of'),
    ],
)
def test_a_wrong_file_names_its_line(tmp_path, line, words):
    with pytest.raises(UsageError) as caught:
        task_named(lines_file(tmp_path, {"prompt": "a", "answer": "b", "split": "train"}, line))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["adition", "addition:0", "addition:x", "countdown:9", "jsonl:", "jsonl:/no/such"])
def test_tasks_that_there_are_not(name):
    with pytest.raises(UsageError, match="task"):
        task_named(name)


def test_keys_of_a_file_are_renamed(tmp_path):
    """As those of grade-school problems, whose answers end with a mark; other keys are left alone."""
    row = {"question": "1+1=", "solution": "one and one #### 2", "url": None, "split": "train"}
    task = task_named(lines_file(tmp_path, row), "prompt=question,answer=solution")
    (problem,) = task.draw("train", 1, np.random.default_rng(0))
    assert problem.prompt == "1+1="
    assert [task.reward(problem, text) for text in ("#### 2", "2", "one")] == [1, 1, 0]
    with pytest.raises(UsageError, match='line 1: "nothing" must be a text'):
        task_named(lines_file(tmp_path, row), "prompt=nothing,answer=solution")
    with pytest.raises(UsageError, match="write prompt=NAME,answer=NAME"):
        task_named(lines_file(tmp_path, row), "question")


def test_what_is_gone_says_what_to_do_instead():
    for name, words in {
        "hub:some/set": r"save the data set with its to_json\(PATH\)",
        "countdown:4": "FILE.py",
    }.items():
        with pytest.raises(UsageError, match=f"no task any more; .*{words}"):
            task_named(name)
    for name in GONE:
        with pytest.raises(UsageError, match=f"{name} was removed: .{{20}}"):
            settings_of({name: True})


TASK = """
from kltest.finetune.tasks import Addition


class Shorter(Addition):
    def reward(self, problem, completion):
        return -len(completion) if completion != "1;1" else 1 / 0


def two():
    return Shorter(2)


other = 5
"""


def test_a_task_of_ones_own(tmp_path, monkeypatch):
    file = tmp_path / "own.py"
    file.write_text(TASK)
    for name, digits in (("Shorter", 3), ("two", 2)):
        assert task_named(f"{file}:{name}").name == f"addition:{digits}"
    for name in ("other", "nothing"):
        with pytest.raises(UsageError, match=f"own.py:{name} is no task, which has name, characters, max_tokens, draw"):
            task_named(f"{file}:{name}")
    with pytest.raises(UsageError, match="there is no such file"):
        task_named("away.py:Task")
    task, tokenizer = task_named(f"{file}:Shorter"), tiny_tokenizer(Addition.characters)
    here = LanguageModel(None, tokenizer, (1,), 0)
    problem = task.draw("train", 1, np.random.default_rng(0))

    def reward(text):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        monkeypatch.setattr(LanguageModel, "device", "cpu")
        return _scores(here, task, "reward", problem, SimpleNamespace(tokens=ids, mask=ids > 0)).tolist()

    assert reward("1;2") == [-3.0]
    with pytest.raises(TargetError, match=r"the reward of task addition:3 raised ZeroDivisionError(.|\n)*own.py"):
        reward("1;1")
    file.write_text("import nothing_of_that_name")
    with pytest.raises(TargetError, match=r"task .*own.py:Task raised ModuleNotFoundError"):
        task_named(f"{file}:Task")


def test_settings_from_a_file_and_changes(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('kl = "k3-loss"\nbeta = 1\n[kl_options]\nk = 3\n')
    settings = settings_of(changed(read(file), ["beta=0.5", "seed=3", "kl_options.full=true"]))
    assert (settings.kl, settings.beta, settings.seed) == ("k3-loss", 0.5, 3)
    assert settings.kl_options == {"k": 3, "full": True}
    assert settings_of(asdict(settings)) == settings
    assert settings.key == settings_of({**asdict(settings), "threads": 2}).key != Settings().key
    for path, words in (("none.toml", "cannot be read as TOML"), ("run.json", "cannot be read as JSON")):
        (tmp_path / "run.json").write_text("{")
        with pytest.raises(UsageError, match=words):
            read(tmp_path / path)


def test_auto_is_unbiased_unless_grpo_is_asked_for():
    assert Settings().resolved.kl == "leave-one-out"
    assert Settings(inner_epochs=2).resolved.kl == "k1-reward-sequence-ratio"
    assert Settings(algorithm="grpo").resolved.kl == "k3-loss"
    assert Settings(algorithm="grpo", kl="k1-reward").resolved.kl == "k1-reward"


@pytest.mark.parametrize(
    "values",
    [
        {"betta": 1.0},
        {"beta": -1.0},
        {"beta": math.nan},
        {"beta": "big"},
        {"prompts": 1.5},
        {"steps": True},
        {"algorithm": "ppo"},
        {"group_size": 1},
        {"clip": -0.2},
        {"kl_options": 3},
        {"temperature": 0.0},
    ],
)
def test_settings_that_make_no_sense(values):
    with pytest.raises(UsageError, match=next(iter(values))):
        settings_of(values)

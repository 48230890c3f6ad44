"""Diagnoses of logged rollouts: planted bugs are found, right logs are not accused, and intervals hold what is so."""

import json
import math
import subprocess
import sys
from importlib.resources import files

import jsonschema
import numpy as np
import pandas
import pytest
import torch
from doors import call
from tabular_environments import TREES, reference_of
from weekly import first, spread

import kltest
from benchmarks.diagnose import BETA, CASES, GROUP, case_logs, drawn, tables, truth
from kltest.diagnosing.intervals import MOST_INTERVALS, Units
from kltest.diagnosing.logs import NoRolloutsError, read
from kltest.environments import Instance, sequence
from kltest.environments.policies import table
from kltest.errors import UsageError
from kltest.names import LOGGED, logged_field
from kltest.truth import optimum, token_level_fixed_point, token_level_gap

SCHEMA = json.loads((files("kltest.diagnosing") / "diagnose-1.schema.json").read_text(encoding="utf-8"))
RIGHT = CASES[0]


def logs_of(name, prompts=128, seed=0):
    case = next(one for one in CASES if one.name == name)
    return case_logs(case, prompts, np.random.default_rng(seed))


def records(logs):
    """A batch as rollouts: lists without padding, as JSON has them."""
    lengths = logs["mask"].sum(axis=1).astype(int)
    return [
        {name: one[row][:length].tolist() if one.ndim == 2 else one[row].item() for name, one in logs.items()}
        for row, length in enumerate(lengths)
    ]


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize("case", spread(12, CASES), ids=lambda case: case.name)
def test_planted_bugs_are_found_and_right_logs_are_not_accused(case):
    report = kltest.diagnose(case_logs(case, 128, np.random.default_rng(1)))
    found = {one.question for one in report.answers if one.status == "finding"}
    assert found <= {*case.questions, *case.besides}, report.to_text()
    assert found or case.near or not case.questions, report.to_text()
    assert report.exit_code == (1 if found else {"nothing found": 0, "inconclusive": 4}[report.verdict])


@pytest.mark.parametrize(
    "name", first(2, ["right", "right, entropy logged", "top-p .9, renormalised", "right, old rollouts"])
)
def test_intervals_hold_what_is_computed_by_recursion(name):
    """Two thousand rollouts at an error rate of .01: all of a dozen intervals; and they say something."""
    case = next(one for one in CASES if one.name == name)
    report, expected = kltest.diagnose(logs_of(name, 512)), truth(case.tables(tables()))
    seen = 0
    for answer in report.answers:
        for key, one in answer.numbers.items():
            if (value := expected.get(f"{answer.question}.{key}")) is not None:
                assert one.low <= value <= one.high, (answer.question, key, str(one), value)
                seen += one.width < max(0.8 * abs(value), 0.02)
    assert seen >= 8


@pytest.mark.scheduled
def test_the_recursion_is_the_mean_of_many_draws():
    """An independent route to the truths: 80,000 rollouts, a tenth of a percent or five standard errors."""
    one, logs = tables(), drawn(tables(), 20_000, np.random.default_rng(2))
    live = logs["mask"] != 0
    u = np.where(live, logs["rollout_logp"] - logs["ref_logp"], 0.0)
    found = truth(one)
    assert u.sum(axis=1).mean() == pytest.approx(found["reference.kl"], rel=0.02)
    to_go = np.where(live, u[:, ::-1].cumsum(axis=1)[:, ::-1] - u, 0.0).reshape(-1, GROUP, u.shape[1])
    alive = live.reshape(to_go.shape)
    above = below = 0.0
    for at in range(u.shape[1]):
        for values in (to_go[number, alive[number, :, at], at] for number in range(0, len(to_go), 5)):
            if len(values) > 1:
                above, below = above + len(values) * values.var(ddof=1), below + len(values)
    assert above / below == pytest.approx(found["kl to go.variance"], rel=0.05)


def logs_of_policy(environment, policy, reference, groups=800):
    """Rollouts drawn from a table, four a prompt: log-probs, rewards, and which are of one prompt."""
    paths = environment.sample(policy, 4 * groups, np.random.default_rng(0))
    logp, ref_logp = (np.where(paths.mask, one[paths.contexts, paths.tokens], 0.0) for one in (policy, reference))
    rewards = {"rewards": environment.returns(paths), "group": np.arange(4 * groups) // 4}
    return {"logp": logp, "ref_logp": ref_logp, "mask": paths.mask.astype(float), **rewards}


@pytest.mark.parametrize("label", ["sequence", "ragged"])
def test_with_rewards_and_a_coefficient_it_tells_what_the_policy_lacks(label):
    """At the token-level fixed point Σu − R/β varies as K does; at π* it does not vary; planted: another β is off."""
    environment, beta = TREES[label], 0.5
    reference = table(reference_of(environment))
    policy, gap = token_level_fixed_point(environment, reference, beta), token_level_gap(environment, reference, beta)
    logs = logs_of_policy(environment, policy, reference)
    found = kltest.diagnose(logs, beta=beta)["kl to go"].numbers
    plain = kltest.diagnose(logs)["kl to go"].numbers
    for name, value in (("from_optimum", gap.variance), ("lacking", gap.second_order)):
        assert found[name].low <= value <= found[name].high
        assert found[name].low > 0
    instance = Instance.of(environment, policy, reference)
    u, chances = instance.paths.along(policy - reference), instance.rollout_weights("current")
    assert plain["rollout_variance"].low <= chances @ (u - chances @ u) ** 2 <= plain["rollout_variance"].high
    assert kltest.diagnose(logs, beta=0.6)["kl to go"].numbers["from_optimum"].low > found["from_optimum"].high
    best = optimum(environment, reference, beta).policy
    at_optimum = kltest.diagnose(logs_of_policy(environment, best, reference, 20), beta=beta)["kl to go"]
    assert abs(at_optimum.numbers["from_optimum"].high) < 1e-20
    assert "reward/0.5" in at_optimum.message
    assert "from_optimum" not in plain
    with pytest.raises(UsageError, match="positive"):
        kltest.diagnose(logs, beta=0.0)


def test_the_variance_of_a_rollouts_log_ratio_does_not_bound_that_of_its_next_token_kls():
    """The published pair: 3.31591 of sampled log-ratios, 5.06974 of summed next-token KLs."""
    policy = np.log([[0.5, 0.5], [0.5, 0.5], [0.01, 0.99]])
    reference = np.log([[0.25, 0.75], [0.5, 0.5], [0.99, 0.01]])
    instance = Instance.of(sequence(2, 2), policy, reference)
    chances, kl = instance.rollout_weights("current"), (np.exp(policy) * (policy - reference)).sum(axis=1)
    summed = instance.paths.along(np.broadcast_to(kl[:, None], policy.shape))
    variances = [chances @ (one - chances @ one) ** 2 for one in (instance.paths.along(policy - reference), summed)]
    assert variances == pytest.approx([3.31591, 5.06974], abs=1e-5)


@pytest.mark.parametrize(("noise", "units"), first(1, [("normal", 16), ("exponential", 48), ("lognormal", 64)]))
def test_intervals_miss_at_their_rate(noise, units):
    """Of 2,000 intervals at .05 not more than 7 % miss (five standard errors are 2.4 %), with skewed noise as well.

    Planted: Student's interval without the two corrections misses 12 % if the noise is lognormal.
    """
    generator, mean = np.random.default_rng(0), {"normal": 0.0, "exponential": 1.0, "lognormal": math.exp(0.72)}[noise]
    draw = {"normal": generator.normal, "exponential": generator.exponential, "lognormal": generator.lognormal}[noise]
    scale = {"lognormal": (0.0, 1.2)}.get(noise, ())
    group = np.arange(units)
    found = [Units(group, 0.05).mean(draw(*scale, size=units)) for _ in range(2000)]
    assert np.mean([not one.low <= mean <= one.high for one in found]) <= 0.07


def test_noise_of_two_values_has_an_interval():
    """Its kurtosis is 1, the least there is: no division by zero."""
    one = Units(np.arange(64), 0.01).mean(np.arange(64) % 2.0)
    assert one.low < one.value == 0.5 < one.high


def test_a_report_has_no_more_intervals_than_share_the_error_rate(monkeypatch):
    asked = []
    plain = Units.estimate
    monkeypatch.setattr(Units, "estimate", lambda self, *given: asked.append(self.rate) or plain(self, *given))
    logs = logs_of("right, penalty in advantages", 64)
    logs |= {"version": logs["group"] % 7, "prox_logp": logs["old_logp"] - 0.1, "entropy": -logs["logp"]}
    report = kltest.diagnose(logs, error_rate=0.02, beta=0.1)
    assert all(one.status != "not looked at" for one in report.answers if one.question != "sampling")
    assert MOST_INTERVALS - 8 <= len(asked) <= MOST_INTERVALS
    assert set(asked) == {0.02 / MOST_INTERVALS}


SHAPED = {
    "k1, a token": lambda u, beta: -beta * u,
    "k2, a token": lambda u, beta: -beta * u**2 / 2,
    "k3, a token": lambda u, beta: -beta * (np.exp(-u) - 1 + u),
}


@pytest.mark.parametrize("kind", SHAPED)
def test_the_coefficient_in_rewards_its_term_and_its_log_probs_are_found(kind):
    logs = logs_of("right", 32)
    u = (logs["old_logp"] - logs["ref_logp"]) * logs["mask"]
    last = np.arange(u.shape[1]) == logs["mask"].sum(axis=1)[:, None] - 1
    answer = kltest.diagnose(logs | {"token_level_rewards": SHAPED[kind](u, 0.3) + last * logs["reward"][:, None]})[
        "coefficient"
    ]
    assert f"× {kind[:2]} of old_logp, a token" in answer.message
    assert answer.numbers["beta"].value == pytest.approx(0.3, rel=1e-9)
    noisy = logs | {"shaped_reward": np.random.default_rng(0).normal(size=len(u))}
    assert kltest.diagnose(noisy)["coefficient"].status == "not looked at"
    assert "no penalty" in kltest.diagnose(logs | {"shaped_reward": logs["reward"]})["coefficient"].message


@pytest.mark.parametrize("credit", ["whole rollouts", "to go", "immediate"])
def test_the_credit_of_advantages_is_found(credit):
    """With any scale and shift of each prompt, as a division by the standard deviation brings."""
    logs = logs_of("right", 32)
    u = (logs["logp"] - logs["ref_logp"]) * logs["mask"]
    held = {"whole rollouts": u.sum(axis=1, keepdims=True) + 0 * u, "to go": u[:, ::-1].cumsum(axis=1)[:, ::-1]}
    scale = 1 + logs["group"][:, None] % 3
    advantage = scale * (logs["reward"][:, None] - BETA * held.get(credit, u)) - 0.7 * scale
    answer = kltest.diagnose(logs | {"advantages": advantage})["coefficient"]
    assert f"k1 of logp, credit: {credit}" in answer.message
    assert answer.numbers["beta"].value == pytest.approx(BETA, rel=1e-6)
    alone = logs | {"advantages": logs["reward"] - 0.5}
    assert "no penalty" in kltest.diagnose(alone)["coefficient"].message


def test_what_is_known_of_age_alone_and_by_version():
    logs = logs_of("right", 64)
    old = logs["group"] % 2 == 1
    logs |= {"logp": np.where(old[:, None], logs["logp"], logs["old_logp"]), "weight_version": (8 - old).astype(float)}
    numbers = kltest.diagnose(logs)["staleness"].numbers
    assert numbers["kl_token_version_8"].high < 1e-9 < 1e-3 < numbers["kl_token_version_7"].low
    alone = kltest.diagnose({name: one for name, one in logs.items() if name != "old_logp"})
    assert "age alone needs old_logp" in alone["staleness"].message
    assert alone["temperature"].status == "not looked at"


def test_a_file_in_which_nothing_can_be_looked_at_is_inconclusive_and_a_column_can_be_left_out():
    logs = logs_of("right", 16)
    assert kltest.diagnose({"logp": logs["logp"]}).verdict == "inconclusive"
    words = logs | {"version": np.array(["seven"] * len(logs["mask"]))}
    with pytest.raises(UsageError, match="version of rollout 1 is not a number"):
        kltest.diagnose(words)
    assert kltest.diagnose(words, names={"version": ""}).verdict == "nothing found"


def test_an_engine_that_is_a_copy_is_not_looked_at():
    """Planted: with the copy as an engine, nothing would be wrong with it."""
    logs = logs_of("right", 32)
    report = kltest.diagnose(logs | {"rollout_logp": logs["old_logp"]})
    assert [report[name].status for name in ("engine", "truncation", "temperature")] == ["not looked at"] * 3
    assert any("copy" in note for note in report.notes)


def test_a_first_token_that_is_certain_is_no_prompt():
    """All rollouts begin with the same token of probability 1; the same with one of probability 1/e is a prompt."""
    logs, found = logs_of("right", 32), {}
    for value in (0.0, -1.0):
        shifted = {name: one.copy() for name, one in logs.items()}
        for name in ("logp", "old_logp", "rollout_logp", "ref_logp"):
            shifted[name][:, 0] = value
        found[value] = kltest.diagnose(shifted)["mask"].status
    assert found == {0.0: "nothing found", -1.0: "finding"}


def test_masked_tokens_in_between_and_numbers_behind_the_mask_are_reported():
    logs = logs_of("right", 32)
    mask = logs["mask"].copy()
    mask[:, 1] = 0
    for name in ("logp", "old_logp", "rollout_logp", "ref_logp"):
        logs[name] = np.where(logs["mask"] != 0, logs[name], -3.0)
    message = kltest.diagnose(logs | {"mask": mask})["mask"].message
    assert "masked tokens between others" in message
    assert "positions behind the mask" in message


NAMES = {
    "per_token_logps": "logp",
    "ref_per_token_logps": "ref_logp",
    "old_per_token_logps": "old_logp",
    "sampling_per_token_logps": "rollout_logp",
    "completion_mask": "mask",
    "old_log_probs": "old_logp",
    "ref_log_prob": "ref_logp",
    "rollout_log_probs": "rollout_logp",
    "token_level_scores": "reward",
    "token_level_rewards": "shaped_reward",
    "entropys": "entropy",
    "uid": "group",
    "generation_logprobs": "rollout_logp",
    "prev_logprobs": "old_logp",
    "reference_policy_logprobs": "ref_logp",
    "inference_logprobs": "rollout_logp",
    "trainer_logprobs": "logp",
    "vllm_logprobs": "rollout_logp",
    "sglang_log_probs": "rollout_logp",
    "base_action_log_probs": "ref_logp",
    "action_log_probs": "logp",
    "prox_logp": "prox_logp",
    "proximal_logprobs": "prox_logp",
    "weight_versions": "version",
    "attention_mask": None,
    "prompt": None,
    "kl_coef": None,
}
"""Names of TRL, verl, NeMo RL, prime-rl, OpenRLHF, AReaL and slime."""


def test_names_of_trainers():
    assert {name: logged_field(name) for name in NAMES} == NAMES
    assert all(logged_field(name) for name in LOGGED)


def test_every_format_gives_the_same_report(tmp_path, monkeypatch):
    logs = logs_of("top-p .9, renormalised", 16)
    rows = records(logs)
    monkeypatch.setattr(pandas, "read_parquet", lambda path: pandas.DataFrame(rows).map(_array))
    torch.save({name: torch.tensor(one) for name, one in logs.items()}, tmp_path / "a.pt")
    torch.save([{name: torch.tensor(one) for name, one in part.items()} for part in _halves(logs)], tmp_path / "b.pt")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps({name: one.tolist() for name, one in logs.items()}))
    (tmp_path / "a.parquet").write_text("")
    written(tmp_path / "größe.jsonl", rows)
    whole, trimmed = ([each.numbers for each in kltest.diagnose(one).answers] for one in (logs, rows))
    assert json.dumps(whole, default=str) == json.dumps(trimmed, default=str)
    for path in sorted(tmp_path.iterdir()):
        assert json.dumps([one.numbers for one in kltest.diagnose(path).answers], default=str) == json.dumps(
            whole, default=str
        ), path


def _array(value):
    return np.array(value) if isinstance(value, list) else value


def _halves(logs):
    half = len(logs["mask"]) // 2
    return [{name: one[part] for name, one in logs.items()} for part in (slice(None, half), slice(half, None))]


ONE = '{"logp": [-1.5, -2], "ref_logp": [-1, -2]}'
BAD = {
    "empty.jsonl": ("", 5, "no rollout"),
    "dead.jsonl": ('{"logp": [-1.5], "mask": [0]}', 5, "no token counts"),
    "short.jsonl": ('{"logp": [], "ref_logp": []}', 5, "no token counts"),
    "ragged.jsonl": ('{"logp": [-1, -2], "ref_logp": [-1]}', 2, "ref_logp of rollout 1 has 1 token, logp has 2"),
    "nan.jsonl": ('{"logp": [-1, NaN], "ref_logp": [-1, -2]}', 2, "logp is not finite in 1 place, first at rollout 1"),
    "inf.jsonl": (ONE + '\n{"logp": [-1], "ref_logp": [-Infinity]}', 2, "ref_logp is not finite"),
    "words.jsonl": ('{"logp": [-1, "a"]}', 2, "logp of rollout 1 is not a number or a list of numbers"),
    "mixed.jsonl": (ONE + '\n{"logp": -1, "ref_logp": [-2]}', 2, "logp is not one list of numbers for each rollout"),
    "deep.json": ('{"logp": [[[-1.5, -2]]]}', 2, "logp is not one list of numbers for each rollout"),
    "columns.jsonl": ('{"prompt": "x", "größe": 1}', 2, "name it with --column logp=COLUMN"),
    "some.jsonl": (ONE + '\n{"logp": [-1]}', 2, "only some rollouts have ref_logp; rollout 2 has none"),
    "broken.jsonl": (ONE + "\nnot json", 2, "line 2 is no JSON"),
    "two.jsonl": ('{"logp": [-1], "logprobs": [-1]}', 2, "choose with --column logp=NAME"),
    "batch.json": ('{"logp": [[-1], [-2]], "ref_logp": [[-1]]}', 2, "logp has 2 rollouts and ref_logp has 1 rollout"),
    "list.json": ("[1, 2]", 2, "record 1 is no mapping of columns"),
    "logs.csv": (ONE, 2, "logs are JSON lines"),
    "logs.pt": (ONE, 2, "no tensors as torch.save writes them"),
    "one.jsonl": (ONE, 4, ""),
}


def test_a_column_that_is_read_and_not_used_is_named_with_the_reason():
    rollout = {"logp": [-1.0, -2.0], "ref_logp": [-1.5, -1.0], "old_log_probs": [1.0, 2.0], "response_mask": [1, 1]}
    found = kltest.diagnose([rollout, rollout])
    words = "needs old_logp or rollout_logp; old_log_probs, read for old_logp, is not used: it holds no log-probs"
    assert found["staleness"].message.startswith(words)
    assert "positions that response_mask leaves out; it leaves out none" in found["mask"].message
    copied = {"old_logp": [-1.0, -2.0], "rollout_log_probs": [-1.0, -2.0]}
    message = kltest.diagnose([copied, copied])["engine"].message
    assert message.endswith("rollout_log_probs, read for rollout_logp, is not used: it is a copy of old_logp")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_a_code(name, tmp_path):
    text, code, words = BAD[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = call("diagnose", str(tmp_path / name), code=code)
    assert words in done.stderr
    assert done.stderr.count("\n") <= 1
    assert "Traceback" not in done.output
    assert words or "there are no intervals" in " ".join(done.stdout.split())


def test_what_cannot_be_read_or_written_is_refused(tmp_path, monkeypatch):
    path = written(tmp_path / "logs.jsonl", [json.loads(ONE)])
    call("diagnose", str(tmp_path / "none.jsonl"), code=2)
    assert "--column" in call("diagnose", str(path), "--column", "logp", code=2).stderr
    assert "there is no my_logp" in call("diagnose", str(path), "--column", "logp=my_logp", code=2).stderr
    call("diagnose", str(path), "--error-rate", "2", code=2)
    call("diagnose", str(path), "--output", f"json:{tmp_path}", code=2)
    monkeypatch.setattr("pathlib.Path.read_text", _refused)
    assert "ermission denied" in call("diagnose", str(path), code=2).stderr
    with pytest.raises(UsageError):
        kltest.diagnose([1])
    with pytest.raises(NoRolloutsError):
        read([])


def _refused(*given, **options):
    raise PermissionError(13, "Permission denied")


def test_the_command_writes_text_json_and_a_page_with_a_picture(tmp_path):
    rows = [
        row | {"<script>": 1, "my\x1b_logp": row["logp"]} for row in records(logs_of("right, without an engine", 32))
    ]
    for row in rows:
        del row["logp"]
    path = written(tmp_path / "logs.jsonl", rows)
    outputs = [part for form in ("json", "html") for part in ("--output", f"{form}:{tmp_path / form}")]
    done = call("diagnose", str(path), "--column", "logp=my\x1b_logp", "--output", "text", *outputs, code=0)
    report = json.loads((tmp_path / "json").read_text(encoding="utf-8"))
    jsonschema.validate(report, SCHEMA)
    assert (report["verdict"], report["columns"]["logp"]) == ("nothing found", "my\x1b_logp")
    assert "NOTHING FOUND; 6 of 11 questions not looked at" in done.stdout
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) <= 40
    page = (tmp_path / "html").read_text(encoding="utf-8")
    assert "data:image/png;base64,iVBOR" in page
    assert not any(word in page.split("</style>")[1] for word in ("<script>", "http:", "https:", "\x1b"))
    assert call("diagnose", str(path), "--column", "logp=my\x1b_logp", "--strict", code=4)


@pytest.mark.scheduled
def test_without_a_page_no_library_for_pictures_or_tables_is_imported(tmp_path):
    path = written(tmp_path / "logs.jsonl", [json.loads(ONE)])
    shown = "[one for one in sys.modules if one in {'matplotlib', 'pandas', 'transformers'}]"
    code = f"import sys, kltest; kltest.diagnose({str(path)!r}); print({shown})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

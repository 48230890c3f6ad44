"""What libraries ascend without their KL term, as recorded: closed forms by hand, and the registered losses enumerated.

A rollout of a group of four has an advantage A(R, K) with K successes in the group. Given the others,
E[g] = ∇p/p for a success and −∇p/(1 − p) for a failure, so that w(p)·∇p is ascended with
w(p) = Σ_k Bin(3, p)(k)·(A(1, k + 1) − A(0, k)), times what tokens are divided by.
"""

import json
import math

import numpy as np
import pytest
from moments_plain import every_multiset, moments_by_hand
from typer.testing import CliRunner
from weekly import first

from kltest.adapters import NAMES, find
from kltest.cli import app
from kltest.estimators import registry
from kltest.identify.instances import instances
from kltest.scoreboard import recorded
from kltest.scoreboard.classes import class_of
from kltest.scoreboard.measurement import requested
from kltest.scoreboard.pages import html, markdown
from kltest.scoreboard.rows import PARTS, changes, row
from kltest.scoreboard.table import frame, summary
from kltest.truth import combine
from kltest.truth.utilities import group_weight

ROWS = {f"{each['library']}:{each['setting']}": each for each in recorded.read(parts=["policy"])}
POLICIES = registry("policy")
SIZE, RATES = 4, (0.1, 0.3, 0.5, 0.85)
# Tokens of a rollout in groups, where rollouts have one length.
TOKENS = {"bandit": 1, "sequence": 2}


# Advantages A(R, K) of a rollout; `tokens` are those of a rollout.


def raw(success, successes, tokens):
    return success


def nothing(success, successes, tokens):
    return 0.0


def centred(success, successes, tokens):
    return success - successes / SIZE


def centred_in_batch(success, successes, tokens):
    """Less the mean of the batch, which is a group here, whatever the prompts are."""
    return centred(success, successes, tokens)


def of_the_others(success, successes, tokens):
    return success - (successes - success) / (SIZE - 1)


def over_deviation(epsilon=0.0):
    """Over the standard deviation (n − 1) of the group."""

    def advantage(success, successes, tokens):
        spread = math.sqrt(successes * (SIZE - successes) / SIZE / (SIZE - 1))
        return centred(success, successes, tokens) / (spread + epsilon) if spread else 0.0

    return advantage


def whitened(less):
    """Over the standard deviation of the tokens of the batch, with `less` taken off their number."""

    def advantage(success, successes, tokens):
        many = SIZE * tokens
        variance = successes * (SIZE - successes) / SIZE**2 * many / (many - less)
        return centred(success, successes, tokens) / math.sqrt(variance) if variance else 0.0

    return advantage


def over_deviation_of_the_others(success, successes, tokens):
    """Less the mean of the others, over their standard deviation (n − 1); not divided where they agree."""
    others, among = SIZE - 1, successes - success
    spread = math.sqrt(among * (others - among) / others / (others - 1))
    return of_the_others(success, successes, tokens) / (spread or 1.0)


def times(number, advantage):
    return lambda *each: number * advantage(*each)


def weight(advantage, rate, tokens=1, averaged=False):
    """w(p), divided by the tokens of a rollout if they are averaged, or by a constant."""
    chances = (math.comb(SIZE - 1, k) * rate**k * (1 - rate) ** (SIZE - 1 - k) for k in range(SIZE))
    total = sum(chance * (advantage(1, k + 1, tokens) - advantage(0, k, tokens)) for k, chance in enumerate(chances))
    return total / (tokens if averaged is MEAN else averaged or 1)


STD = over_deviation()
SUM, MEAN = False, True
REGISTERED = {
    "reinforce": (raw, SUM),
    "reinforce-leave-one-out": (of_the_others, SUM),
    "grpo": (STD, MEAN),
    "grpo-without-std": (centred, MEAN),
    "dr-grpo": (centred, SUM),
    "dapo": (STD, MEAN),
    "cispo": (STD, MEAN),
    "gspo": (STD, MEAN),
    "reinforce-plus-plus": (whitened(1), MEAN),
    "opo": (centred, SUM),
}
# Of each recorded row its advantages, and if tokens are averaged or added up; why, in the library's own code.
DERIVED = {
    "trl:grpo/defaults": (over_deviation(1e-4), MEAN),  # loss_type="dapo"
    "trl:grpo/loss_type=dr_grpo": (over_deviation(1e-4), 512),  # scale_rewards="group", max_completion_length=512
    **dict.fromkeys((f"trl:grpo/loss_type={name}" for name in ("grpo", "bnpo")), (over_deviation(1e-4), MEAN)),
    # 4σ(τ(ρ − 1))/τ has the slope 1 at ρ = 1 for every τ.
    "trl:grpo/loss_type=sapo": (over_deviation(1e-4), MEAN),
    # It cuts ratios at epsilon_high itself, 0.2 unless it is set, not at 1 + epsilon_high: they are 1 on-policy.
    "trl:grpo/loss_type=cispo": (times(0.2, over_deviation(1e-4)), MEAN),
    "trl:grpo/groups,loss_type=luspo,scale_rewards=none": (centred, SUM),
    "trl:grpo/groups,loss_type=luspo,scale_rewards=group": (over_deviation(1e-4), SUM),
    "trl:grpo/groups,loss_type=luspo,scale_rewards=batch": (over_deviation(1e-4), SUM),  # a batch is one group
    "trl:rloo/defaults": (of_the_others, SUM),  # a ratio of whole sequences
    "verl:kl_in_reward/gae": (whitened(1), MEAN),  # γ = λ = 1 and values of 0: the reward, whitened
    "verl:kl_in_reward/grpo": (over_deviation(1e-6), MEAN),
    "verl:kl_in_reward/rloo": (of_the_others, MEAN),
    "verl:kl_in_reward/opo": (centred, MEAN),
    "verl:kl_in_reward/reinforce_plus_plus": (whitened(1), MEAN),
    "verl:kl_in_reward/rloo_vectorized": (of_the_others, MEAN),
    "verl:kl_in_reward/rloo,loss_agg_mode=seq-mean-token-sum": (of_the_others, SUM),
    "verl:kl_in_reward/grpo,norm_adv_by_std_in_grpo=False,loss_agg_mode=seq-mean-token-sum": (centred, SUM),
    "verl:kl_in_reward/reinforce_plus_plus,loss_agg_mode=seq-mean-token-sum": (whitened(1), SUM),
    "verl:kl_in_reward/remax,loss_agg_mode=seq-mean-token-sum": (raw, SUM),  # greedy rollouts earn 0
    "openrlhf:kl_in_reward/gae": (whitened(0), MEAN),
    "openrlhf:kl_in_reward/reinforce": (whitened(0), MEAN),
    "openrlhf:kl_in_reward/reinforce_baseline": (whitened(0), MEAN),  # centred by group before, which is the batch
    "openrlhf:kl_in_reward/flash_reinforce": (centred_in_batch, MEAN),
    "openrlhf:kl_in_reward/rloo": (of_the_others, MEAN),
    "openrlhf:kl_in_reward/group_norm": (STD, MEAN),
    "openrlhf:kl_in_reward/dr_grpo": (centred, MEAN),
    "nemo-rl:clipped_pg/defaults": (over_deviation_of_the_others, MEAN),
    "skyrl:kl_loss/defaults": (STD, MEAN),
    "roll:actor_loss/defaults": (STD, MEAN),
    "roll:actor_loss/loss_agg_mode=seq-mean-token-sum": (STD, SUM),
    "easyr1:kl_in_reward/defaults": (STD, MEAN),
    "prime-rl:loss/defaults": (centred, MEAN),
    "areal:kl_in_reward/defaults": (raw, MEAN),
    "tinker-cookbook:rl/defaults": (centred, SUM),
    "slime:kl_loss/defaults": (over_deviation(1e-6), MEAN),
    "slime:kl_loss/low_var_kl,calculate_per_token_loss=True": (over_deviation(1e-6), MEAN),
    "slime:kl_loss/low_var_kl,grpo_std_normalization=False": (centred, MEAN),
    "slime:kl_loss/low_var_kl,advantage_estimator=gspo": (over_deviation(1e-6), MEAN),
    "slime:kl_loss/low_var_kl,advantage_estimator=cispo": (over_deviation(1e-6), MEAN),
    "torchtune:grpo/loss=GRPOLoss": (over_deviation(1e-4), MEAN),
    "torchtune:grpo/loss=GRPOSimpleLoss": (over_deviation(1e-4), MEAN),
    # It sums the log-probs of all rows of a batch, whose advantages add up to zero.
    "torchtune:grpo/loss=GRPOCompletionLoss": (nothing, SUM),
    "torchrl:loss/GRPOLoss": (STD, MEAN),
    "torchrl:loss/DAPO": (STD, MEAN),
    "torchrl:loss/CISPOLoss": (STD, MEAN),
    "torchrl:loss/GRPOLoss,aggregation=prompt_mean": (STD, MEAN),
    "tunix:grpo_loss_fn/GRPOConfig": (over_deviation(1e-6), MEAN),
    "tunix:grpo_loss_fn/loss_algo=gspo-token": (over_deviation(1e-6), MEAN),
    "tunix:grpo_loss_fn/kl_loss_mode=mse_kl,loss_agg_mode=token-mean": (over_deviation(1e-6), MEAN),
    "tunix:grpo_loss_fn/kl_loss_mode=mse_kl,loss_agg_mode=seq-mean-token-sum": (over_deviation(1e-6), SUM),
}
# Libraries add up to 1e-6 to a deviation of one half, some compute in float32, and two coefficients of six digits may
# leave a tenth of their size.
CLOSE = 3e-5


def recorded_weight(identified, rate):
    """w(p) of a combination of ∇E[R] and ∇U_4."""
    known = {"zero": 0.0, "expected_reward": 1.0, "success_utility_of4": group_weight(rate, SIZE, deviation=0)}
    return sum(coefficient * known[name] for name, coefficient in identified.items())


def found(each, environment):
    (one,) = [one for one in each["gradients"] if one["environment"] == environment]
    return one["identified"], TOKENS[environment] if one["batch"] > 1 else 3 if environment == "sequence" else 1


def wrong(each, derived):
    """Environments in which a row is not what was derived, with the two weights at each rate."""
    advantage, averaged = derived
    for environment in TOKENS:
        identified, tokens = found(each, environment)
        pairs = [(recorded_weight(identified or {}, rate), weight(advantage, rate, tokens, averaged)) for rate in RATES]
        if any(abs(one - other) > CLOSE * abs(other) for one, other in pairs):
            yield environment, pairs


def test_what_is_recorded_is_what_was_derived():
    assert {target.partition(":")[0] for target in ROWS} >= {"trl", "verl", "openrlhf", "areal", "easyr1", "nemo-rl"}
    assert ROWS.keys() <= DERIVED.keys()
    assert [(target, each) for target in ROWS for each in wrong(ROWS[target], DERIVED[target])] == []


@pytest.mark.parametrize("target", ["openrlhf:kl_in_reward/rloo", "trl:grpo/defaults", "openrlhf:kl_in_reward/gae"])
def test_another_derivation_is_noticed(target):
    """Of each kind, the deviation's n for n − 1 included, and another division of tokens."""
    advantage, averaged = DERIVED[target]
    others = {STD, centred, of_the_others, whitened(0), over_deviation_of_the_others, over_deviation(1e-3)} - {
        advantage
    }
    if target.endswith("gae"):
        others = {each for each in others if abs(weight(each, 0.3, 2) - weight(advantage, 0.3, 2)) > 1e-3}
    assert all([*wrong(ROWS[target], (each, averaged))] for each in others)
    assert [*wrong(ROWS[target], (advantage, not averaged))]


def test_a_sum_over_tokens_has_its_name_at_unequal_lengths_and_a_mean_has_none():
    for target, each in ROWS.items():
        averaged = DERIVED[target][1]
        (ragged,) = [one for one in each["gradients"] if one["environment"] == "ragged"]
        counts_tokens = averaged is MEAN or "opo" in target or "reinforce_plus_plus" in target
        assert (ragged["identified"] is None) == counts_tokens, target
        if not counts_tokens:
            assert ragged["identified"] == found(each, "bandit")[0], target


@pytest.mark.parametrize(
    "name", first(3, ["dapo", "reinforce-leave-one-out", "reinforce-plus-plus", *sorted(REGISTERED)])
)
def test_rows_ascend_what_the_registered_loss_with_their_advantages_ascends(name):
    """Times the ratio of the two closed forms: 1/L of tokens, and what whitening takes off their number."""
    mine = {target: each for target, each in ROWS.items() if each["ascends"] == name}
    own, own_averaged = REGISTERED[name]
    spec, function = POLICIES[name].spec, POLICIES[name].function
    for environment in TOKENS:
        instance = instances(environment, 0, SIZE)[0]
        ascended = -moments_by_hand(function, instance, SIZE, "current", every_multiset)[0]
        claimed = spec.expectation(environment, "current")
        assert np.allclose(combine(claimed, instance), ascended, rtol=0, atol=1e-6 * np.abs(ascended).max())
        for target, each in mine.items():
            (advantage, averaged), (identified, tokens) = DERIVED[target], found(each, environment)
            by = weight(advantage, 0.3, tokens, averaged) / weight(own, 0.3, TOKENS[environment], own_averaged)
            assert np.abs(combine(identified, instance) - by * ascended).max() < CLOSE * np.abs(by * ascended).max(), (
                target
            )


def test_a_row_names_a_registered_loss_with_its_advantages():
    for target, each in ROWS.items():
        if each["ascends"]:
            (mine, _), (theirs, _) = DERIVED[target], REGISTERED[each["ascends"]]
            ratios = [weight(mine, rate, 2) / weight(theirs, rate, 2) for rate in RATES]
            assert np.ptp(ratios) < 1e-5, target


def test_the_bias_of_a_deviation_of_the_others_is_that_of_its_closed_form():
    """w(p) = 1 + 3(√3 − 1)·p(1 − p) on a bandit, where the others are a success and two failures or the reverse."""
    (one,) = [each for each in ROWS["nemo-rl:clipped_pg/defaults"]["gradients"] if each["environment"] == "bandit"]
    rates = [float(each.environment.expected_returns(each.policy)[0]) for each in instances("bandit", 0, SIZE)]
    for rate in rates:
        wanted = 1 + 3 * (math.sqrt(3) - 1) * rate * (1 - rate)
        assert weight(over_deviation_of_the_others, rate) == pytest.approx(wanted, rel=1e-12)
    biases = [weight(over_deviation_of_the_others, rate) - 1 for rate in rates]
    assert one["relative_bias"] == pytest.approx(max(biases), rel=1e-4)
    assert min(biases) > 0.01


def test_coefficients_are_recorded_as_laws_of_length_and_group_size_or_batch_size():
    laws = {(centred, SUM): "(1 − 1/group size)", (centred, MEAN): "(1 − 1/group size)/T"}
    laws |= {(centred_in_batch, MEAN): "(1 − 1/B)/T"}
    laws |= {(of_the_others, MEAN): "1/T", (raw, MEAN): "1/T"}
    for target, each in ROWS.items():
        wanted = laws.get(DERIVED[target])
        if set(found(each, "sequence")[0]) == {"expected_reward"} and "opo" not in target:
            assert each["laws"].get("expected_reward") == wanted, target


# The page, the recorder and the command.


def test_the_page_shows_policy_parts_in_the_same_table_and_beside_the_defaults():
    rows = [each for each in recorded.read(parts=PARTS) if each["library"] in ("trl", "tinker-cookbook")]
    table = frame(rows, programs=False)
    lines = {(line["title"], line["setting"], line["part"]): line for line in table.to_dict("records")}
    line = lines["trl 1.16.0", "grpo/defaults", "policy"]
    assert (line["kind"], line["mark"], line["tone"]) == ("utility", "default", "far")
    assert line["follows"] == (
        "∇U_4, a utility of the success rate, × 0.8659 for one token, × 0.4329 for two, at equal lengths; "
        "advantages of dapo"
    )
    assert line["measured"].endswith("groups of 4")
    assert "--part policy --setting grpo/defaults" in line["command"]
    line = lines["tinker-cookbook 0.6.1", "rl/defaults", "policy"]
    assert line["follows"] == "∇E[R], × (1 − 1/group size); advantages of dr-grpo"
    cells = {cells["library, with its KL on"]: cells["without its KL"] for cells in summary(rows).to_dict("records")}
    assert cells["trl 1.16.0<br>`rloo/defaults`"] == "∇E[R]; advantages of reinforce-leave-one-out"
    assert cells["trl 1.16.0<br>`gkd/defaults`"] == "–"
    for text in (markdown(table), html(table)):
        assert text.count("advantages of dr-grpo") == 3
        assert "without its KL" in text
    # Those of the KL term are what they were without them.
    assert frame(recorded.read(), programs=False)["follows"].tolist() == [
        each["follows"]
        for each in frame(recorded.read(parts=PARTS), programs=False).to_dict("records")
        if each["part"] == "kl"
    ]


def test_a_part_is_recorded_beside_the_other(tmp_path):
    """Measuring one part of a library whole replaces nothing of the other part."""
    copy = tmp_path / "recorded.jsonl"
    rows = [each for each in recorded.read(parts=PARTS) if each["library"] == "openrlhf"]
    recorded.record(rows, copy)
    policy = [each for each in rows if each["part"] == "policy"]
    recorded.record(policy[:1], copy)
    assert recorded.read(copy, parts=["policy"]) == policy[:1]
    assert recorded.read(copy) == [each for each in rows if each["part"] == "kl"]
    recorded.record([each for each in rows if each["part"] == "kl"][:2], copy)
    assert len(recorded.read(copy)) == 2
    assert recorded.read(copy, parts=["policy"]) == policy[:1]
    # A coefficient that moves is a change, by part.
    moved = json.loads(json.dumps(policy[0]))
    moved["gradients"][0]["identified"] = {"expected_reward": 0.5}
    assert len(changes(policy, [moved], [moved["setting"]])) == 1


def test_a_row_of_the_policy_part_has_whole_groups_alone():
    class Found:
        failed = checks = notes = error = ()

        def to_dict(self):
            usual = dict.fromkeys(("sampler", "identified", "relative_bias", "cosine", "residual", "agrees", "method"))
            batches = [("bandit", 1), ("bandit", 4), ("sequence", 1)]
            about = dict.fromkeys(("expect", "placement", "credit", "verdict", "reduction", "dtype", "unfinished"))
            gradients = [{**usual, "environment": environment, "batch": size} for environment, size in batches]
            return {**about, "gradients": gradients, "value": []}

    library = find("areal")
    setting = library.setting("kl_in_reward/defaults")
    for part, sizes in (("kl", [1, 4, 1]), ("policy", [4, 1])):
        made = row(library, setting.for_part(part), Found(), part=part)
        assert [each["batch"] for each in made["gradients"]] == sizes
        assert made["ascends"] == "reinforce"


def test_classes_of_policy_parts():
    each = ROWS["openrlhf:kl_in_reward/rloo"]

    def of(*identified):
        gradients = [{**one, "identified": two} for one, two in zip(each["gradients"], identified, strict=True)]
        return class_of({**each, "gradients": gradients})

    reward, utility = {"expected_reward": 0.5}, {"success_utility_of4": 1.0}
    assert of(reward, reward, None) == of(reward, reward, reward) == "reward"
    assert of(utility, utility, None) == of({**reward, "success_utility_of4": -1.0}, utility, utility) == "utility"
    assert of({"expected_reward": -0.5}, reward, reward) == of(reward, utility, None) == "another"
    assert of({"zero": 1.0}, {"zero": 1.0}, {"zero": 1.0}) == "none"
    assert of(None, reward, reward) == of(reward, None, None) == "unnamed"
    assert of({"entropy": 1.0, **utility}, utility, utility) == "another"


def test_each_default_that_scores_rewards_has_a_row_or_none_is_said():
    for name in NAMES:
        for setting in find(name).settings:
            assert not setting.has_row("policy") or setting.policy, f"{name}:{setting.name}"
            assert setting.ascends in (None, "", *REGISTERED)
    assert all(find(each["library"]).setting(each["setting"]).has_row("policy") for each in ROWS.values())
    assert {name for name, _ in requested([], "policy")} >= {each["library"] for each in ROWS.values()}


def run(*words):
    found = CliRunner().invoke(app, ["libraries", *words])
    return found.exit_code, " ".join(found.output.split())


def test_the_command_takes_a_part_and_says_what_it_cannot_do():
    code, text = run("--list", "tinker-cookbook", "--setting", "rl/defaults")
    assert code == 0
    assert "without its KL: bandit, current: (1 − 1/group size)*expected_reward" in text
    for words, said in (
        (["liger", "--part", "policy"], "liger none"),
        (["trl", "--part", "polcy"], "did you mean policy"),
        (["trl", "--part", "policy", "--history"], "--history measures KL terms"),
        ([], "no library is given: name some"),
        (["--diff"], "no library is given: name some"),
        (["trl", "--all"], "--all and names are both given"),
    ):
        code, text = run(*words)
        assert code == 2
        assert said in text, text

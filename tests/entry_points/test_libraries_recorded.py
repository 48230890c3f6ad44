"""The results that kltest ships with are those that were worked out by hand; nothing is installed for it."""

import dataclasses

import pytest
from derived import BY_BATCH, BY_CONSTANT, BY_ROW, ENVIRONMENTS, LENGTH, NAMELESS, Derived, disagreements
from derived import DERIVED as FIRST
from derived_cloned import CLONED
from derived_distillation import DISTILLED

from kltest.adapters import NAMES, find
from kltest.scoreboard import recorded
from kltest.scoreboard.rows import PARTS, changes
from kltest.scoreboard.table import summary

DERIVED = {**FIRST, **CLONED, **DISTILLED}
ROWS = {
    f"{row['library']}:{row['setting']}": row
    for row in recorded.read()
    if row["version"] == find(row["library"]).version
}
SETTINGS = {f"{name}:{setting.name}": setting for name in NAMES for setting in find(name).settings}


def test_the_record_is_a_row_a_line_and_reads_back(tmp_path):
    """Written again it is the same to the byte: nothing in it is lost, and nothing is there that can be filled in."""
    copy = tmp_path / "recorded.jsonl"
    rows = recorded.read(parts=PARTS)
    recorded.record(rows, copy)
    assert copy.read_bytes() == recorded.PATH.read_bytes()
    lines = copy.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(rows) + len(NAMES)
    assert copy.stat().st_size < 1200 * len(lines)
    for part in PARTS:
        assert changes(recorded.read(parts=[part]), recorded.read(copy, parts=[part])) == []
    assert recorded.read() == recorded.read(parts=["kl"]) == [row for row in rows if row["part"] == "kl"] != rows


def test_numbers_are_read_as_they_were_recorded():
    row = ROWS["trl:grpo/defaults"]
    wanted = {"environment": "sequence", "sampler": "current", "batch": 1, "method": "exact", "agrees": False}
    assert ({"identified": {"local_reverse_kl": 0.333333}} | wanted).items() <= row["gradients"][2].items()
    assert row["value"][0] == {"environment": "bandit", "sampler": "current", "matches": "kl"}
    assert [check["code"] for check in row["failed"]] == ["KL201", "KL204", "KL206", "KL301", "KL503"]
    assert (row["default"], row["depth"], row["placement"]) == (True, "trainer", "loss")


def test_every_default_and_every_recipe_has_a_derivation_and_all_settings_are_recorded():
    wanted = {target for target, setting in SETTINGS.items() if setting.default or setting.recipe}
    assert {target.partition(":")[0] for target in wanted} == set(NAMES)
    assert wanted <= DERIVED.keys() <= SETTINGS.keys() <= ROWS.keys()


def test_what_is_recorded_is_what_was_derived():
    assert [(target, each) for target in DERIVED for each in disagreements(DERIVED[target], ROWS[target])] == []


# What a gradient is multiplied by, from the words of its derivation; what is found first counts.
LAWS = {LENGTH: "1/T", BY_ROW: "1/T", BY_BATCH: "1/T"}
LAWS |= {"width of the batch": "1/padded width", "all positions": "1/padded width"}
LAWS |= {BY_CONSTANT: "1/max_completion_length", "half is their mean": "(1 − 1/group size)"}


def test_coefficients_are_recorded_as_the_laws_that_were_derived():
    for target, derived in DERIVED.items():
        row = ROWS[target]
        law = next((law for words, law in LAWS.items() if words in derived.why), None)
        found = [each["identified"] or {} for each in row["gradients"] if each["environment"] == "sequence"]
        single = [item for terms in found if len(terms) == 1 for item in terms.items()]
        divided = {name: value for name, value in single if abs(value) < 0.99}
        wanted = {name: law if value > 0 else f"-{law}" for name, value in divided.items()}
        assert {name: row["laws"].get(name) for name in divided} == wanted, target


def test_what_happens_if_nothing_is_set_is_recorded():
    """In TRL's GRPO, in verl and in torchrl there is no KL at all."""
    wanted = {
        "trl:grpo/defaults": ["beta", 0.0],
        "trl:rloo/defaults": ["beta", 0.05],
        "verl:ppo_loss/use_kl_loss": ["use_kl_loss", False],
        "verl:kl_in_reward/gae": ["use_kl_in_reward", False],
        "openrlhf:kl_in_reward/gae": ["algo.kl.init_coef", 0.01],
        "liger:fused/loss_type=dapo": ["beta", 0.04],
        "torchrl:loss/GRPOLoss": ["kl_to_ref_coeff", None],
        "unsloth-zoo:grpo_compute_loss/alone": [],
        "tunix:grpo_loss_fn/GRPOConfig": ["beta", 0.04],
        "slime:kl_loss/defaults": ["use-kl-loss", False],
        "nemo-rl:clipped_pg/defaults": ["reference_policy_kl_penalty", 0.01],
        "nemo-rl:distillation/defaults": ["the loss itself"],
        "easyr1:kl_in_reward/defaults": ["kl_coef", 0.001],
        "areal:kl_in_reward/defaults": ["ref", None],
    }
    assert {target: ROWS[target]["unset"] for target in wanted} == wanted
    shown = summary(recorded.read())["if nothing is set"]
    assert {"KL on, beta = 0.04", "no KL, kl_to_ref_coeff = None"} <= set(shown)


def test_a_leak_is_told_from_an_overflow():
    """Liger's luspo multiplies by lengths behind its mask; what others make of padding are infinities (KL502)."""
    rows = {
        row["setting"]: [check["code"] for check in row["failed"]] for row in ROWS.values() if row["library"] == "liger"
    }
    assert all(("KL501" in codes) == ("luspo" in setting) for setting, codes in rows.items())
    assert "KL502" in rows["ppo_loss_fn/loss_type=dapo"]
    (said,) = [c["message"] for c in ROWS["liger:ppo_loss_fn/loss_type=luspo"]["failed"] if c["code"] == "KL501"]
    assert said.startswith("With other log-probs and token ids at padded positions, the loss gives 0.34")


@pytest.mark.parametrize("target", [target for target, setting in SETTINGS.items() if setting.recipe], ids=str)
def test_a_recipe_is_confirmed(target):
    row = ROWS[target]
    assert (row["verdict"], row["expect"]) == ("confirmed", "reverse_kl")
    assert {each["environment"]: each["agrees"] for each in row["gradients"]} == dict.fromkeys(ENVIRONMENTS, True)


FOUND = {"bandit": {"reverse_kl": 1.0}, "sequence": {"reverse_kl": 1 / 3, "local_forward_kl": 2 / 3}, "ragged": None}
CASE = Derived("Made up.", FOUND, NAMELESS, {"ragged": None}, {"ragged": None}, "float64", "coupled")


def a_row():
    """A row that says what was derived, to six digits, as rows do."""
    kinds = (("current", 1, CASE.current), ("stale", 1, CASE.off_policy[0]))
    kinds += (("current", 2, CASE.groups), ("stale", 2, CASE.off_policy[1]))
    gradients = [
        {"sampler": sampler, "batch": batch, "environment": environment, "identified": named and rounded(named)}
        for sampler, batch, environments in kinds
        for environment, named in environments.items()
    ]
    about = {key: getattr(CASE, key) for key in ("verdict", "dtype", "reduction")}
    return {**about, "error": "", "notes": [], "gradients": gradients}


def rounded(named):
    return {name: float(f"{value:.6g}") for name, value in named.items()}


def others(identified):
    """Other findings: none, another name, a coefficient a little off or turned, a name more or in place of one."""
    if identified is None:
        return [{"reverse_kl": 1.0}, {"zero": 1.0}]
    (name, value), *rest = identified.items()
    off = [{**identified, name: factor * value} for factor in (1 + 1e-5, 1 - 1e-5, -1.0)]
    return [None, {**dict(rest), "chi_square": value}, {**identified, "chi_square": 0.01}, *off]


def test_another_row_than_the_derived_one_is_noticed():
    """Every number and every name of a derivation is one that counts, and so is the rest of a row."""
    row = a_row()
    assert list(disagreements(CASE, row)) == []
    assert len(list(disagreements(dataclasses.replace(CASE, lifted=True), row))) == 1
    planted = {"verdict": "confirmed", "dtype": "float32", "reduction": "mean", "error": "it raised"}
    changed = [{**row, name: value} for name, value in planted.items()]
    for place, each in enumerate(row["gradients"]):
        before, after = row["gradients"][:place], row["gradients"][place + 1 :]
        changed += [
            {**row, "gradients": [*before, {**each, "identified": one}, *after]} for one in others(each["identified"])
        ]
        moved = {"environment": "mdp", "sampler": "frozen", "batch": 3 - each["batch"]}
        for name, value in moved.items():
            assert list(disagreements(CASE, {**row, "gradients": [*before, {**each, name: value}, *after]}))
        assert list(disagreements(CASE, {**row, "gradients": [*before, *after]}))
    assert [len(list(disagreements(CASE, one))) for one in changed] == [1] * len(changed)

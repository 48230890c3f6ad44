"""The results that kltest ships with are those that were worked out by hand; nothing is installed for it."""

import copy
import dataclasses

import pytest
from derived import (
    BY_BATCH,
    BY_CONSTANT,
    BY_ROW,
    ENVIRONMENTS,
    NAMELESS,
    Derived,
    disagreements,
)
from derived import DERIVED as FIRST
from derived_cloned import CLONED

from kltest.adapters import NAMES, find
from kltest.scoreboard import recorded
from kltest.scoreboard.rows import changes
from kltest.scoreboard.table import summary

DERIVED = {**FIRST, **CLONED}
ROWS = {
    f"{row['library']}:{row['setting']}": row
    for row in recorded.read()
    if row["version"] == find(row["library"]).version
}
SETTINGS = {f"{name}:{setting.name}": setting for name in NAMES for setting in find(name).settings}


def test_the_record_is_a_row_a_line_and_reads_back(tmp_path):
    """Written again it is the same to the byte: nothing in it is lost, and nothing is there that can be filled in."""
    copy = tmp_path / "recorded.jsonl"
    recorded.record(recorded.read(), copy)
    assert copy.read_bytes() == recorded.PATH.read_bytes()
    lines = copy.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(recorded.read()) + len(NAMES)
    assert copy.stat().st_size < 1000 * len(lines)
    assert changes(recorded.read(), recorded.read(copy)) == []


def test_numbers_are_read_as_they_were_recorded():
    row = ROWS["trl:grpo/defaults"]
    found = row["gradients"][2]
    wanted = {"environment": "sequence", "sampler": "current", "batch": 1, "method": "exact"}
    assert wanted.items() <= found.items()
    assert found["identified"] == {"local_reverse_kl": 0.333333}
    assert not found["agrees"]
    assert row["value"][0] == {"environment": "bandit", "sampler": "current", "matches": "kl"}
    assert [check["code"] for check in row["failed"]] == ["KL201", "KL204", "KL206", "KL301", "KL503"]
    assert row["versions"]["torch"].startswith("2.13")
    assert (row["default"], row["depth"], row["placement"]) == (True, "trainer", "loss")


def test_every_default_and_every_recipe_has_a_derivation():
    wanted = {target for target, setting in SETTINGS.items() if setting.default or setting.recipe}
    assert {target.partition(":")[0] for target in wanted} == set(NAMES)
    assert sorted(wanted - DERIVED.keys()) == []


def test_what_is_derived_is_a_setting_of_its_adapter():
    assert sorted(DERIVED.keys() - SETTINGS.keys()) == []


def row_of(target):
    if target not in ROWS:
        pytest.fail(f"nothing is recorded of {target} in the version of its adapter", pytrace=False)
    return ROWS[target]


def test_what_is_recorded_is_what_was_derived():
    assert [(target, each) for target in DERIVED for each in disagreements(DERIVED[target], row_of(target))] == []


# What a gradient is multiplied by, from the words of its derivation; what is found first counts.
LAWS = {BY_ROW: "1/T", BY_BATCH: "1/T", "width of the batch": "1/padded width", "all positions": "1/padded width"}
LAWS |= {BY_CONSTANT: "1/max_completion_length", "half is their mean": "(1 − 1/group size)"}


def test_coefficients_are_recorded_as_the_laws_that_were_derived():
    for target, derived in DERIVED.items():
        row = row_of(target)
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
    assert {target: row_of(target)["unset"] for target in wanted} == wanted
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
    row = row_of(target)
    assert (row["verdict"], row["expect"]) == ("confirmed", "reverse_kl")
    assert {each["environment"]: each["agrees"] for each in row["gradients"]} == dict.fromkeys(ENVIRONMENTS, True)


def test_all_settings_that_adapters_know_are_recorded():
    assert sorted(SETTINGS.keys() - ROWS.keys()) == []


FOUND = {"bandit": {"reverse_kl": 1.0}, "sequence": {"reverse_kl": 1 / 3, "local_forward_kl": 2 / 3}, "ragged": None}
CASE = Derived("Made up.", FOUND, NAMELESS, {"ragged": None}, {"ragged": None}, "float64", "coupled")


def a_row(case):
    """A row that says what was derived, to six digits, as rows do."""
    kinds = (("current", 1, case.current), ("stale", 1, case.off_policy[0]))
    kinds += (("current", 2, case.groups), ("stale", 2, case.off_policy[1]))
    gradients = [
        {
            "sampler": sampler,
            "batch": batch,
            "environment": environment,
            "identified": named and {name: float(f"{value:.6g}") for name, value in named.items()},
        }
        for sampler, batch, environments in kinds
        for environment, named in environments.items()
    ]
    about = {key: getattr(case, key) for key in ("verdict", "dtype", "reduction")}
    return {**about, "error": "", "notes": ["it was lifted"] if case.lifted else [], "gradients": gradients}


@pytest.mark.parametrize("case", [CASE, dataclasses.replace(CASE, lifted=True)], ids=["case", "lifted"])
def test_another_row_than_the_derived_one_is_noticed(case):
    """Every number and every name of a derivation is one that counts."""
    row = a_row(case)
    assert list(disagreements(case, row)) == []
    for position, gradient in enumerate(row["gradients"]):
        for other in others(gradient["identified"], case.dtype):
            changed = copy.deepcopy(row)
            changed["gradients"][position]["identified"] = other
            assert len(list(disagreements(case, changed))) == 1, (gradient, other)
        less = copy.deepcopy(row)
        del less["gradients"][position]
        assert list(disagreements(case, less)), gradient


def others(identified, dtype):
    """Other findings: none, another name, coefficients a little off, a name more."""
    if identified is None:
        return [{"reverse_kl": 1.0}, {"zero": 1.0}]
    off = {"float64": 1e-5, "float32": 2e-3}[dtype]
    name, value = next(iter(identified.items()))
    rest = {other: each for other, each in identified.items() if other != name}
    changed = [None, {**rest, "chi_square": value}, {**identified, "chi_square": 0.01}]
    return [*changed, *({**identified, name: factor * value} for factor in (1 + off, 1 - off, -1.0))]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdict",), "confirmed"),
        (("dtype",), "float32"),
        (("reduction",), "mean"),
        (("notes",), ["it was lifted"]),
        (("error",), "it raised"),
        (("gradients", 0, "environment"), "mdp"),
        (("gradients", 0, "sampler"), "frozen"),
        (("gradients", 0, "batch"), 2),
        (("gradients", 5, "batch"), 2),
    ],
)
def test_a_planted_difference_is_noticed(path, value):
    row = a_row(CASE)
    inner = row
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    assert len(list(disagreements(CASE, row))) == 1

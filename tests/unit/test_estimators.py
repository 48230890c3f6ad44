"""The table of estimators: complete, unambiguous, separate from the truth, open to users, and light to load."""

import inspect
import warnings
from importlib import metadata
from importlib.util import find_spec

import pytest

from kltest.errors import UsageError
from kltest.estimators import Spec, find, register, registry, spec
from kltest.names import FIELDS
from kltest.truth.atlas import named

OURS = {name: entry for name, entry in registry(None).items() if entry.function.__module__.startswith("kltest.")}


@pytest.fixture
def clean_table(monkeypatch):
    """A table that forgets what the test registers."""
    registry()
    monkeypatch.setattr(spec, "_REGISTRY", dict(spec._REGISTRY))
    spec._load_entry_points.cache_clear()


def described(name: str = "my-kl", **changes) -> Spec:
    fields = {
        "formula": "Σ_t u_t",
        "source": "a notebook",
        "placement": "loss",
        "claims": "an estimate",
        "known_false": "nothing",
    }
    return Spec(**{"name": name, **fields, **changes})


@pytest.mark.parametrize("name", OURS)
def test_a_spec_says_everything(name):
    entry = OURS[name].spec
    for text in (entry.formula, entry.source, entry.claims, entry.known_false):
        assert text.strip() == text
        assert len(text) > 2
        assert not text.endswith(".")
    assert set(entry.identified) - ({"engine"} if entry.part == "policy" else set()) == {"current", "stale"}
    for row in entry.identified.values():
        assert set(row) in ({"bandit", "tokens"}, {"bandit", "sequence", "ragged", "mdp"})
        for combination in row.values():
            assert all(named(each).name == each for each in combination or ())
    assert OURS[name].function.__doc__
    assert "(B, T" in OURS[name].function.__doc__


def test_names_and_aliases_are_unique_and_all_are_found():
    labels = [(label, name) for name, entry in OURS.items() for label in (name, *entry.spec.aliases)]
    normal = [label.lower().replace("_", "-") for label, _ in labels]
    assert len(set(normal)) == len(normal)
    for label, name in labels:
        for spelling in (label, label.upper(), label.replace("-", "_")):
            assert find(spelling).spec.name == name


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("low_var_kl", "k3-clamped"),
        ("low_var_kl+", "k3-straight-through"),
        ("k3+", "k3-straight-through"),
        ("kl", "k1-loss"),
        ("mse", "k2-loss"),
        ("abs", "abs-loss"),
        ("full", "full-loss"),
        ("k3", "k3-loss"),
    ],
)
def test_names_of_real_libraries(library, name):
    assert find(library).spec.name == name


@pytest.mark.parametrize(("typo", "meant"), [("k3-los", "k3-loss"), ("rao-blackwel", "rao-blackwell"), ("mes", "mse")])
def test_a_typo_is_answered_with_the_nearest_names(typo, meant):
    with pytest.raises(UsageError, match=f"no estimator called '{typo}'.*did you mean.*{meant}"):
        find(typo)


def test_what_is_like_nothing_is_told_where_to_look():
    with pytest.raises(UsageError, match="kltest list"):
        find("zzzzzz")


def test_a_function_is_named_after_its_estimator_and_takes_fields_or_settings_with_defaults():
    for name, entry in OURS.items():
        assert entry.function.__name__ == name.replace("-", "_")
        for parameter in inspect.signature(entry.function).parameters.values():
            assert (parameter.name in FIELDS) == (parameter.default is inspect.Parameter.empty), (name, parameter)


@pytest.mark.usefixtures("clean_table")
def test_a_decorated_function_is_found_by_name_and_alias():
    @register(described(aliases=("mine",)))
    def my_kl(logp):
        return logp

    assert find("my-kl").function is my_kl
    assert find("Mine").function is my_kl
    assert find("my-kl").spec.expectation("ragged", "stale") is None


@pytest.mark.usefixtures("clean_table")
@pytest.mark.parametrize("taken", ["k3-loss", "MSE", "low-var-kl"])
def test_a_taken_name_is_refused_with_its_owner(taken):
    owner = find(taken).spec.name
    with pytest.raises(UsageError, match=f"belongs to '{owner}'"):
        register(described(aliases=(taken,)))(lambda logp: logp)
    with pytest.raises(UsageError, match="belongs to 'k3-loss'"):
        register(described("k3-loss"))(lambda logp: logp)


@pytest.mark.usefixtures("clean_table")
def test_the_same_function_may_register_again_when_its_module_is_reloaded():
    def module():
        @register(described())
        def my_kl(logp):
            return logp

        return my_kl

    module()
    again = module()
    assert find("my-kl").function is again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "My KL"}, "lower case"),
        ({"name": "my_kl"}, "hyphens"),
        ({"name": ""}, "name"),
        ({"placement": "advantage"}, "'advantage' is none of loss, reward, shaped-reward, both"),
        ({"credit": "discounted"}, "'discounted' is none of return, to-go, immediate"),
        ({"identified": {"fresh": {}}}, "'fresh'.*current, stale, engine"),
        ({"part": "reward"}, "part 'reward' is none of kl, policy"),
        ({"identified": {"current": {"atari": None}}}, "'atari'.*bandit"),
        ({"identified": {"current": {"bandit": {}}}}, "'zero': 1.0"),
    ],
)
def test_a_wrong_spec_is_refused_where_it_is_written(changes, message):
    with pytest.raises(UsageError, match=message):
        described(**changes)


@pytest.mark.usefixtures("clean_table")
def test_entry_points_join_and_a_broken_one_is_named_and_left_out(monkeypatch, tmp_path):
    (tmp_path / "kltest_plugin_good.py").write_text(
        "from kltest.estimators import Spec, register\n"
        "SPEC = Spec(name='from-a-plugin', formula='u', source='s', placement='loss', claims='c', known_false='f')\n"
        "@register(SPEC)\n"
        "def estimator(logp):\n    return logp\n"
    )
    (tmp_path / "kltest_plugin_leaves.py").write_text("raise SystemExit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = [
        metadata.EntryPoint(name=name, value=value, group=spec.ENTRY_POINT_GROUP)
        for name, value in [
            ("missing", "kltest_plugin_that_is_not_there"),
            ("leaving", "kltest_plugin_leaves"),
            ("attribute", "kltest.estimators:nothing_of_that_name"),
            ("good", "kltest_plugin_good"),
        ]
    ]
    asked = []
    monkeypatch.setattr(spec.metadata, "entry_points", lambda group: asked.append(group) or entries)
    with pytest.warns(RuntimeWarning) as caught:
        known = registry()
    assert asked == ["kltest.estimators"]
    assert {"from-a-plugin", "k3-loss"} <= set(known)
    messages = [str(warning.message) for warning in caught]
    for name, message in zip(("missing", "leaving", "attribute"), messages, strict=True):
        assert f"entry point '{name}'" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry()
    assert find_spec("kltest_plugin_good")

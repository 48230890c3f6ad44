"""What every experiment owes: settings, rows that depend on nothing else, a figure, a section, a README."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from trial import Trial, irrefutable, representative
from weekly import later

from kltest.reproduce.bounds import near
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.claims import OWN, Claims
from kltest.reproduce.experiment import Experiment, Request, compute_all
from kltest.reproduce.frames import frame
from kltest.reproduce.typesetting import sources
from kltest.sweeps.run import Batching
from kltest.sweeps.settings import Settings

CHECKOUT = Checkout(Path(__file__).parents[2])
EXPERIMENTS = CHECKOUT.experiments()
every = pytest.mark.parametrize("name", EXPERIMENTS)


# Runs of a few updates: where rows come from does not depend on how many there are.
SHORT = {"finetune": ("updates=16", "prompts=2", "group_size=2", "eval_prompts=8", "reference_steps=1")}


def configurations(name: str, scale: str = "quick", changes: tuple[str, ...] = ()) -> list[dict]:
    return [dict(one) for one in Experiment(CHECKOUT, name).configurations(Request(scale=scale, changes=changes))]


@every
def test_settings_are_plain_data_and_full_goes_on_from_quick(name):
    settings = Experiment(CHECKOUT, name).settings
    assert isinstance(settings, Settings)
    assert settings.title
    assert settings.tags
    quick, full = configurations(name), configurations(name, "full")
    assert quick
    assert json.loads(json.dumps(quick, allow_nan=False)) == quick
    assert len({json.dumps(one, sort_keys=True) for one in full}) == len(full)
    assert len(full) >= len(quick)


@pytest.mark.parametrize("name", [later(name) if name in ("atlas", "finetune") else name for name in EXPERIMENTS])
def test_rows_depend_neither_on_the_batch_nor_on_the_order(name):
    """Bit for bit: the same rows alone, in a batch, and in a batch the other way round."""
    module = CHECKOUT.load("experiments", name, "experiment")
    chosen = representative(configurations(name, changes=SHORT.get(name, ())))[:4]
    batch = max(getattr(module, "BATCHING", Batching()).batches(chosen), key=len)
    together = compute_all(CHECKOUT, name, batch)
    backwards = compute_all(CHECKOUT, name, batch[::-1])[::-1] if len(batch) > 1 else together
    alone = [compute_all(CHECKOUT, name, [configuration])[0] for configuration in batch]
    assert json.dumps(together, allow_nan=False) == json.dumps(backwards) == json.dumps(alone)
    assert all(rows for rows in alone)


@pytest.mark.parametrize("name", ["sequence", "coefficients", "groups", "metrics", "variance", "off-policy"])
def test_a_part_varies_what_is_its_own(name):
    parts = Experiment(CHECKOUT, name).settings.parts
    for one in configurations(name):
        assert {"part", *parts[one["part"]]} == set(one)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in ("training-curves", "finetune", "atlas")])
def test_claims_without_their_rows_are_not_run(name):
    assert Trial(name).may_lack([]) == {None}


@every
def test_a_readme_says_what_was_asked_and_found(name):
    text = (CHECKOUT.root / "experiments" / name / "README.md").read_text(encoding="utf-8")
    for part in ("**Claim.**", "**Setting.**", "**Expected shape.**", "**Found.**"):
        assert part in text, f"{name}: the README lacks {part}"


@every
def test_a_figure_shows_it(name):
    assert any(name in sources(CHECKOUT, figure) for figure in CHECKOUT.figures())


def test_a_claim_that_nothing_refutes_is_noticed():
    claims = Claims("made up")
    for words, factor, bound in (("a number is one", 1, near(1, 0.1)), ("nothing is nothing", 0, near(0, 0.1))):
        judge = claims.measure(OWN, "made up", claim=words, number=bound, factor=factor)
        judge(lambda rows, factor: {"number": factor * rows["number"]})
    analysis = SimpleNamespace(claims=claims)
    assert irrefutable(analysis, frame([{"number": 1.0}, {"number": 1.05}]), {}) == ["nothing is nothing"]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["comedy", "value-versus-gradient"])
def test_an_old_name_finds_the_experiment_that_it_is_part_of(name):
    assert Experiment.find(CHECKOUT, name).name == "differentiate-the-estimate"

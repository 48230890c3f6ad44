"""Audits against the truth: estimators enumerated, sketches against whole gradients, intervals, and planted bugs."""

import json
from dataclasses import replace
from importlib.resources import files

import jsonschema
import numpy as np
import pytest
import torch
from audited import Signs, every_pair, language, models, rollouts
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner
from weekly import first

import kltest
from benchmarks.audit_memory import COUNTED, WHOLE, Alive, Size, audited, counted, measured
from kltest.auditing import passes
from kltest.auditing.models import load
from kltest.auditing.named import Part, columns_of
from kltest.auditing.passes import CutModel, measure
from kltest.auditing.units import drawn, of_batch, read_rollouts
from kltest.cli import app
from kltest.environments import Instance, ragged, sequence
from kltest.errors import TargetError, UsageError
from kltest.language_models.language import LanguageModel
from kltest.language_models.scoring import score
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.samples.blocks import Sample, norm
from kltest.samples.fits import nearest
from kltest.samples.sketch import Sketch
from kltest.truth import gradient

SCHEMA = json.loads((files("kltest.auditing") / "audit-1.schema.json").read_text(encoding="utf-8"))
ENVIRONMENTS = {
    "ragged": lambda: ragged(3, 2, reward=np.random.default_rng(1).standard_normal((ragged(3, 2).n_contexts, 3))),
    "fixed length": lambda: sequence(2, 3, reward=np.random.default_rng(1).standard_normal((7, 2))),
}


NEXT_TOKENS = ("local_forward_kl_top1_tail", "local_reverse_kl_own1", "local_jensen_shannon30")


@pytest.mark.parametrize("environment", first(1, ENVIRONMENTS))
@pytest.mark.parametrize("sampler", first(1, ["stale", "current", "stale, log-probs only"]))
def test_named_gradients_and_the_losses_are_unbiased(environment, sampler):
    """The mean over every pair of rollouts is the exact gradient, of each name and of the loss."""
    instance, full = Instance.draw(ENVIRONMENTS[environment](), 0), sampler == "stale"
    sampler = sampler.split(",")[0]
    names, parts, controls = columns_of(stale=sampler == "stale", full=full, rewarded=True, further=NEXT_TOKENS)
    given, loss = models(instance, full=full), resolve("k3-loss")
    sketch = Sketch(given.policy.language.model)
    total = torch.zeros(2 + len(parts), instance.policy.size, dtype=torch.float64)
    with sketch.listening():
        for pair, chance in every_pair(instance, sampler):
            unit = measure(loss, given, rollouts(instance, pair, sampler, given=not full), parts, sketch)
            total += chance * unit.vectors
    signs = Signs(sketch)
    assert len(names) > 15
    for name, each in names.items():
        found = sum(total[2 + parts.index(part)] for part in each)
        # Sums of a few hundred products of exponentials, in another order.
        np.testing.assert_allclose(signs.off(found), gradient(name, instance).ravel(), atol=1e-11, err_msg=name)
    # What is taken away as noise has no expectation.
    assert float(total[-len(controls) :].abs().max()) < 1e-12
    np.testing.assert_allclose(signs.off(total[0]), exact(loss, instance, sampler).gradient.ravel(), atol=1e-11)


@pytest.fixture(scope="module")
def tiny():
    loading = {"seed": 0, "dtype": "float64", "device": "cpu"}
    return [load("tiny:20k", role, **loading) for role in ("model", "ref")]


def test_a_unit_in_chunks_is_the_gradient_that_autograd_takes_in_one_piece(tiny, monkeypatch):
    """With the last layer cut off, positions a few at a time and each weight folded at once."""
    monkeypatch.setattr(passes, "CHUNK", 150)
    cut = [CutModel(one) for one in tiny]
    assert all(one.head is not None for one in cut)
    unit = next(drawn(tiny[0], ["1+2=", "3"], group_size=3, max_new_tokens=6, temperature=0.7, seed=0))
    sketch, model, loss = Sketch(tiny[0].model), tiny[0].model, resolve("k3-loss")
    part = Part("own", "u")
    kept = next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    with sketch.listening():
        found = measure(loss, passes.Models(*cut, None, 0.7), unit, [part], sketch).vectors
    assert next(model.parameters()).grad is kept
    p, r = (score(one, unit, temperature=0.7, logits=True) for one in tiny)
    k3 = torch.exp(r.logp.detach() - p.logp) - 1 + p.logp - r.logp.detach()
    kl = (p.logits.exp() * (p.logits - r.logits.detach())).sum(-1)
    for row, tokens in ((found[0], k3), (found[2], kl)):
        model.zero_grad()
        tokens.where(unit.mask, 0.0).sum(1).mean().backward(retain_graph=True)
        expected = torch.zeros_like(row)
        for weight in sketch.weights:
            sketch.fold(weight, weight.grad, expected)
        torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-12)


def test_a_sketch_keeps_inner_products_within_its_bound():
    """Also of gradients of low rank, which are what backward passes leave; planted: without signs it is far off."""
    layer = torch.nn.Linear(60, 80, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(80, 1, generator=generator), torch.randn(1, 60, generator=generator)
    pairs = [(left @ right,) * 2, tuple(torch.randn(2, 80, 60, generator=generator))]

    def errors(x, y, plain=False):
        scale = float(x.norm() * y.norm())
        for seed in range(150):
            sketch = Sketch(layer, 401, seed)
            if plain:
                sketch._hashes = {w: (s, a.abs(), b.abs()) for w, (s, a, b) in sketch._hashes.items()}
            kept = torch.zeros(2, sketch.size, dtype=torch.float64)
            for row, one in zip(kept, (x, y), strict=True):
                sketch.fold(layer.weight, one.double(), row)
            yield (float(kept[0] @ kept[1]) - float((x * y).sum())) / scale

    for x, y in pairs:
        found = np.array(list(errors(x, y)))
        bound = Sketch(layer, 401).error
        # A mean of 150 within four standard errors of 0; their root mean square within the bound, and a tenth of it.
        assert abs(found.mean()) < 4 * bound / 150**0.5
        assert found.std() < 1.1 * bound / 2**0.5
    ones = torch.ones(80, 60)
    assert abs(np.mean(list(errors(ones, ones, plain=True)))) > 3 * bound


def summed(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum()


@pytest.mark.scheduled
def test_k3_is_named_the_forward_kl_and_k2_is_confirmed_also_as_a_sum_over_rollouts(tiny):
    """On tiny:20k, at 99 %, by the public function; the model is left as it was."""
    before = torch.get_rng_state()
    found = kltest.audit("k3-loss", *tiny, prompts=["1+1="], units=32, max_new_tokens=3)
    assert torch.equal(before, torch.get_rng_state())
    (name, one), *more = found.follows.terms.items()
    assert (name, more, found.follows.rivals) == ("local_forward_kl", [], ())
    # What the loss shares with known noise is taken away: hardly any is left of k3.
    assert one.low <= 1 <= one.high
    assert one.width < 0.1
    right = kltest.audit(summed, *tiny, prompts=["1+1="], units=32, max_new_tokens=3, expect="local_reverse_kl")
    assert right.verdict == "confirmed"
    assert right.exit_code == 0


@pytest.mark.scheduled
def test_a_sum_over_a_support_is_named_after_it(tiny):
    found = kltest.audit(
        "forward-kl-topk-tail", *tiny, prompts=["1+2="], units=32, max_new_tokens=2, expect="local_forward_kl_top2_tail"
    )
    assert found.verdict == "confirmed"
    assert found.follows is not None
    assert list(found.follows.terms) == ["local_forward_kl_top2_tail"]
    mixed = kltest.audit(
        *("jensen-shannon", *tiny), prompts=["1+2="], units=32, max_new_tokens=2, expect="local_jensen_shannon"
    )
    assert mixed.verdict == "confirmed"


def test_what_was_declared_goes_first_where_nothing_tells_it_from_the_nearest():
    """The nearest is 0.6 of another, by noise; planted: surely off, what was declared does not go first."""
    generator, rows = np.random.default_rng(1), np.eye(5)
    noise = 0.02 * generator.standard_normal((64, 2))
    declared, other, ratio = np.array([1.0, 0.0]), np.array([1.0, 0.001]) / 0.6, np.array([1.0, 0.002])

    def found(tilt, **options):
        own = np.array([1.0, tilt]) + noise
        rest = (np.broadcast_to(one, own.shape) for one in (declared, other, ratio))
        sample = Sample(np.stack([own, own, *rest], axis=1))
        names = {"other": rows[3], "declared": rows[2], "whole": rows[4]}
        return nearest(sample, rows[1], names, 0.01, 0.001, **options)

    tilt = 0.001 - noise.mean(axis=0)[1]
    fit = found(tilt, declared=["declared"])
    assert [*fit.terms] == ["declared"]
    assert {*fit.rivals} == {("other",), ("whole",)}
    assert [*found(tilt).terms] in (["declared"], ["whole"]), "a coefficient of 1 goes before one of 0.6"
    assert [*found(0.5, declared=["declared"]).terms] != ["declared"]


def kept(tiny, **changed):
    """Rollouts as a training run keeps them: eight prompts, two rollouts each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 15, (16, 5), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::2, 3:] = 0
    tokens[::2, 2] = tiny[0].end[0]
    old = -torch.rand(16, 5, generator=generator)
    made = {"prompt_ids": tokens[:, :2], "completion_ids": tokens, "completion_mask": mask, "rewards": torch.rand(16)}
    return {name: one for name, one in {**made, "old_per_token_logps": old, **changed}.items() if one is not None}


def leaking(logp, ref_logp):
    return (0.5 * (logp - ref_logp) ** 2).sum(1)


def test_a_batch_of_a_training_run_gives_json_that_holds_to_the_schema(tiny):
    """It says where the padding leaks, how many rollouts have no end, and how far the sampler is from the model."""
    found = kltest.audit(leaking, *tiny, kept(tiny), group_size=2, beta=None).to_dict()
    jsonschema.validate(json.loads(json.dumps(found)), SCHEMA)
    assert found["facts"]["padded_share"] > 0.1
    assert found["facts"]["truncated"] == 0.5
    assert found["facts"]["mean_gap"] > 0.1
    clean = kltest.audit("k2-loss", *tiny, kept(tiny, old_per_token_logps=None), group_size=2)
    assert clean.facts["padded_share"] == 0
    assert clean.facts["mean_gap"] is None
    assert clean.scalars()["signal_to_noise"] == clean.signal_to_noise


def audit_of_pairs(instance, count=96, sampler="current", loss="k2-loss"):
    """An audit of pairs of rollouts that are drawn from an instance's policy, or from its sampler."""
    generator = np.random.default_rng(0)
    chances = instance.rollout_weights(sampler)
    pairs = generator.choice(len(chances), size=(count, 2), p=chances)
    units = [rollouts(instance, pair, sampler) for pair in pairs]
    return kltest.audit(
        loss, *(language(instance.environment, one) for one in (instance.policy, instance.reference)), units
    )


def share_missed(instance):
    missed, whole = (np.linalg.norm(gradient(f"{part}reverse_kl", instance)) for part in ("future_", ""))
    return missed / whole


def test_a_declared_gradient_that_is_refuted_is_preferred_to_no_other_name(monkeypatch):
    """It could be said of a loss that it follows what the same report refutes."""
    asked = []

    def seen(*arguments, declared):
        asked.append(tuple(declared))
        return nearest(*arguments, declared=declared)

    monkeypatch.setattr("kltest.auditing.run.nearest", seen)
    instance = Instance.draw(sequence(2, 3), 3)
    wrong = audit_of_pairs(instance, 400, loss="k3-loss")
    assert wrong.verdict == "refuted"
    assert asked[-1] == ()
    assert "reverse_kl" not in wrong.follows.terms
    assert audit_of_pairs(instance, 96, loss="k1-reward-to-go").verdict != "refuted"
    assert asked[-1] == ("reverse_kl",)


@pytest.mark.parametrize("sampler", first(1, ["current", "stale"]))
def test_the_share_that_a_token_level_term_misses_holds_the_exact_one(sampler):
    """Planted: the share of another pair of policies, and that of the kept part, lie outside."""
    instance = Instance.draw(sequence(2, 3), 3)
    found, exact_share = audit_of_pairs(instance, 400, sampler), share_missed(instance)
    assert found.missed.low <= exact_share <= found.missed.high
    assert found.missed.low > 0
    assert found.missed.high < 1
    kept, whole = (np.linalg.norm(gradient(name, instance)) for name in ("local_reverse_kl", "reverse_kl"))
    assert not found.missed.low <= kept / whole <= found.missed.high
    assert not found.missed.low <= share_missed(Instance.draw(sequence(2, 3), 0)) <= found.missed.high
    assert found.scalars()["missed_high"] == found.missed.high
    assert f"misses here: {100 * found.missed.value:.1f} % [" in found.to_text()


@pytest.mark.scheduled
def test_the_share_does_not_depend_on_the_loss_and_is_zero_where_nothing_is_missed():
    instance = Instance.draw(sequence(2, 3), 3)
    assert audit_of_pairs(instance).missed == audit_of_pairs(instance, loss="k1-reward-to-go").missed
    free = [np.broadcast_to([one, 0.0], (7, 2)) for one in (1.0, -0.5)]
    nothing = audit_of_pairs(Instance.of(sequence(2, 3), *free))
    assert nothing.missed.high < 1e-6
    assert nothing.facts["kl_variance"] < 1e-12
    same = Instance.of(sequence(2, 3), free[0], free[0])
    assert audit_of_pairs(same).missed is None  # ∇KL is zero


@pytest.mark.scheduled
def test_the_variance_of_the_summed_next_token_kls_is_that_among_rollouts_of_a_prompt():
    """Pairs that come in the exact shares of their chances: the mean over pairs of (K − K')²/2 is Var K."""
    instance = Instance.draw(sequence(2, 3), 3)
    kl = (np.exp(instance.policy) * (instance.policy - instance.reference)).sum(axis=1)
    summed, chances = kl[instance.paths.contexts].sum(axis=1), instance.rollout_weights("current")
    variance = chances @ (summed - chances @ summed) ** 2
    found = audit_of_pairs(instance, 500).facts["kl_variance"]
    # Standard error of the mean of (K − K')²/2 over 500 pairs, five times.
    fourth = chances @ (summed - chances @ summed) ** 4
    assert abs(found - variance) < 5 * np.sqrt((fourth + variance**2) / 2 / 500)
    assert audit_of_pairs(instance, 64, "stale").facts["kl_variance"] is None


@pytest.mark.scheduled
def test_intervals_that_hang_on_few_rollouts_say_so():
    """Planted: a rollout that counts twenty times, and a ratio of e⁹; normal noise is that of a third of the blocks."""
    noise = np.random.default_rng(0).standard_normal((300, 2, 40)) + 1
    assert Sample(noise).effective(norm(np.array([1.0, 0.0]))) == pytest.approx(100, rel=0.3)
    instance, draw = Instance.draw(sequence(2, 3), 0), np.random.default_rng(0).integers
    tables = [language(instance.environment, one) for one in (instance.policy, instance.reference)]
    pairs = [[7 if unit == 5 else draw(7), draw(7)] for unit in range(64)]

    def notes(weight, shift):
        def weighted(logp, ref_logp, tokens):
            return 0.5 * (logp - ref_logp) ** 2 * torch.where((tokens == 1).all(1, keepdim=True), weight, 1.0)

        units = [rollouts(instance, pair, "stale") for pair in pairs]
        units[5].old_logp[0, 0] -= shift
        return " ".join(kltest.audit(weighted, *tables, units).notes)

    few, far, plain = notes(20.0, 0.0), notes(1.0, 9.0), notes(1.0, 0.0)
    assert "may be too short: 1 of 64 blocks" in few
    assert "distance from reverse_kl: weights leave 1 of 128 rollouts" in far
    assert "too short" not in plain + far
    assert "distance" not in plain + few


@pytest.mark.parametrize("form", ["rollouts.pt", "rollouts.jsonl"])
def test_what_a_file_holds_is_what_the_training_run_had(tiny, form, tmp_path):
    batch = {**kept(tiny), "group": torch.arange(16) // 2}
    if form == "rollouts.pt":
        torch.save(batch, tmp_path / form)
    else:
        # Without a mask a line has the tokens alone.
        live = batch.pop("completion_mask").bool()
        lines = [{name: one[row].tolist() for name, one in batch.items()} for row in range(16)]
        for line, tokens in zip(lines, live, strict=True):
            line |= {name: line[name][: int(tokens.sum())] for name in ("completion_ids", "old_per_token_logps")}
        (tmp_path / form).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, expected = of_batch(read_rollouts(tmp_path / form), tiny[0], 1), of_batch(kept(tiny), tiny[0], 2)
    assert len(found) == len(expected) == 8
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.tokens.where(one.mask, 0), other.tokens.where(other.mask, 0))
        assert torch.equal(one.old_logp.where(one.mask, 0), other.old_logp.where(other.mask, 0))
        assert torch.equal(one.prompts, other.prompts)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"completion_ids": None}, "have no completion_ids"),
        ({"old_per_token_logps": torch.zeros(16, 4)}, r"old_per_token_logps has shape \(16, 4\)"),
        ({"completion_ids": torch.full((16, 5), 99)}, "id 99 .* vocabulary of 15"),
        ({"completion_mask": torch.zeros(16, 5)}, "rollout 0 has no token"),
        ({"old_per_token_logps": torch.full((16, 5), float("nan"))}, "not finite"),
    ],
)
def test_a_batch_that_cannot_be_used_is_refused_in_words(tiny, changed, words):
    with pytest.raises(UsageError, match=words):
        kltest.audit("k3-loss", *tiny, kept(tiny, **changed), group_size=2)


def payload(live, size=2, **changed):
    """A teacher's log-probs of a support, as they come with rollouts: ids 3 and 5 at each token."""
    ids = torch.arange(3, 3 + 2 * size, 2).expand(*live.shape, size)
    return {"topk_indices": ids, "teacher_topk_logprobs": torch.full((*live.shape, size), -1.5), **changed}


def over_the_payload(topk_ids, topk_logp, ref_topk_logp, mask, k=2):
    assert (topk_ids[mask != 0] == torch.tensor([3, 5])).all()
    assert topk_ids.shape[-1] == k
    assert (ref_topk_logp[mask != 0] == -1.5).all()
    return (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1)


@pytest.mark.scheduled
@pytest.mark.parametrize("form", ["lines", "tensors"])
def test_a_support_that_comes_with_the_rollouts_is_the_one_that_the_loss_gets(tiny, form, tmp_path):
    batch = kept(tiny)
    batch |= {**payload(batch["completion_mask"]), "group": torch.arange(16) // 2}
    if form == "lines":
        lines = [{name: one[row].tolist() for name, one in batch.items()} for row in range(16)]
        (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        batch = read_rollouts(tmp_path / "rollouts.jsonl")
    report = kltest.audit(over_the_payload, *tiny, batch, group_size=2)  # a failed call is a TargetError
    assert report.units == 8
    with pytest.raises(TargetError, match="AssertionError"):
        kltest.audit(over_the_payload, *tiny, kept(tiny), group_size=2)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"topk_indices": None}, "ref_topk_logp without topk_ids"),
        ({"topk_indices": torch.zeros(16, 5)}, r"topk_ids has shape \(16, 5\)"),
        ({"teacher_topk_logprobs": torch.zeros(16, 5, 3)}, r"ref_topk_logp has shape \(16, 5, 3\)"),
        ({"topk_indices": torch.tensor([3, 3]).expand(16, 5, 2)}, "id 3 occurs twice"),
        (
            {"topk_indices": torch.tensor([3, 99]).expand(16, 5, 2)},
            "id 99 is not in the model's vocabulary of 15; does",
        ),
        ({"teacher_topk_logprobs": torch.full((16, 5, 2), -float("inf"))}, "not finite at every token: leave −inf"),
        ({"teacher_topk_logprobs": torch.full((16, 5, 2), float("nan"))}, "not finite at every token: leave −inf"),
        ({"teacher_topk_logprobs": torch.full((16, 5, 2), 0.0)}, "add up to 2; are they logits?"),
        (payload(torch.zeros(16, 5), 16), "topk_ids: 16 tokens of a vocabulary of 15"),
    ],
)
def test_a_support_that_cannot_be_used_is_refused_in_words(tiny, changed, words):
    batch = kept(tiny)
    with pytest.raises(UsageError, match=words):
        kltest.audit("k3-loss", *tiny, {**batch, **payload(batch["completion_mask"], **changed)}, group_size=2)


@pytest.mark.scheduled
def test_what_stands_behind_the_end_of_a_rollout_is_not_judged(tiny):
    batch = kept(tiny)
    dead = batch["completion_mask"] == 0
    assert dead.any()
    given = payload(batch["completion_mask"])
    given["topk_indices"] = given["topk_indices"].masked_fill(dead[..., None], -100)
    assert kltest.audit(over_the_payload, *tiny, {**batch, **given}, group_size=2).units == 8


def test_a_teacher_with_another_vocabulary_is_refused(tiny):
    configuration = LlamaConfig.from_dict({**tiny[1].model.config.to_dict(), "vocab_size": 17})
    teacher = LlamaForCausalLM(configuration).double()
    for ref, options in ((teacher, {}), (tiny[1], {"sampler": teacher})):
        with pytest.raises(UsageError, match="vocabulary of 17 tokens and the policy one of 15"):
            kltest.audit("k3-loss", tiny[0], ref, kept(tiny), group_size=2, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "tiny", "--device", "nowhere"), "--device 'nowhere' cannot be used"),
        (("--model", "/nowhere", "--prompts", "p.txt"), "--ref is missing"),
        (("--model", "tiny", "--prompts", "none.txt"), "cannot be read"),
        (("--model", "tiny", "--rollouts", "none.pt"), "none.pt cannot be read"),
        (("--model", "tiny", "--rollouts", "p.jsonl"), "line 1 is no JSON object with prompt_ids"),
        (("--model", "tiny", "--output", "xml"), "no output format 'xml'"),
        (("--model", "tiny", "--output", "json:nowhere/audit.json"), "cannot be written (No such file or directory)"),
        (("--model", "tiny", "--expect", "reverse"), "no named gradient 'reverse'"),
    ],
)
def test_wrong_options_are_said_in_one_line(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n')
    done = CliRunner().invoke(app, ["audit", "k3-loss", *options])
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.scheduled
def test_memory_counted_from_shapes_is_what_the_allocator_hands_out():
    """Within 1 %: operations have room of their own, which no shape tells. Planted: all logits in one chunk."""
    size = Size(64, 1, 4000, tokens=16, prompt=4, logits=2**16)
    counts = [counted(replace(size, logits=logits))[0] for logits in (2**16, 2**18)]
    assert counts[0] == pytest.approx(measured(size), rel=0.01)
    assert counts[1] > 1.05 * counts[0]


@pytest.mark.scheduled
def test_20_million_weights_fit_into_4_gb_and_half_a_billion_into_80():
    """The first in a process that cannot have more, the second by the count; minutes."""
    report, peak = audited(WHOLE, 8)
    assert report["parameters"] > 2e7
    assert peak < 2 * 2**30
    assert counted(COUNTED[0])[0] < 20e9


@pytest.mark.scheduled
def test_logits_of_all_positions_are_never_in_memory(monkeypatch):
    """With a large vocabulary a unit's peak stays below one (B, T, V); planted: in one chunk it is many of them."""
    configuration = LlamaConfig(
        vocab_size=20_000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    cut = CutModel(LanguageModel(LlamaForCausalLM(configuration).eval(), None, (1,), 0))
    tokens = torch.randint(3, 20_000, (4, 64), generator=torch.Generator().manual_seed(0))
    unit = of_batch({"prompt_ids": tokens[:, :2], "completion_ids": tokens}, cut.language, 4)[0]
    whole, parts, sketch = 4 * tokens.numel() * 20_000, [Part("own", "u")], Sketch(cut.language.model, 1001)

    def peak(chunk):
        monkeypatch.setattr(passes, "CHUNK", chunk)
        with Alive() as live, sketch.listening():
            measure(resolve("k3-loss"), passes.Models(cut, cut), unit, parts, sketch)
        return live.peak

    assert peak(2**17) < whole
    assert peak(2**23) > 4 * whole

"""Losses written for JAX are graded as their twins in torch are: gradients, values, precision, checks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch

import kltest
from kltest.loss.calling import bind
from kltest.loss.jax import jax_loss
from kltest.loss.jax.program import narrowest
from kltest.loss.reach import is_for_jax

jax = pytest.importorskip("jax", reason="JAX is not installed (pip install jax)")
jnp = pytest.importorskip("jax.numpy")

CALLED = "called with JAX arrays"
MASK = np.array([1.0, 1.0, 0.0])


def losses(np, detached, narrow, wide):
    """Losses of JAX or of torch, for which the same names stand in `np`."""

    def k3(logp, ref_logp):
        d = ref_logp - logp
        return np.exp(d) - d - 1

    def whole(logp, ref_logp, old_logp, advantage, mask, beta=0.04):
        ratio = np.exp(logp - old_logp)
        gain = np.minimum(ratio * advantage[:, None], np.clip(ratio, 0.8, 1.2) * advantage[:, None])
        logged = ((ref_logp - logp) * -mask).sum(-1).mean()
        return ((beta * k3(logp, ref_logp) - gain) * mask).sum(-1).mean(), {"kl": logged}

    def detached_ratio(logp, ref_logp, old_logp, mask):
        return detached(np.exp(((logp - old_logp) * mask).sum(-1))) * ((logp - ref_logp) * mask).sum(-1)

    def clipped_ratio(logp, ref_logp, old_logp, mask):
        ratio = np.clip(np.exp(((logp - old_logp) * mask).sum(-1)), 0.8, 1.2)
        return ratio * ((logp - ref_logp) * mask).sum(-1)

    def indexed(logp, ref_logp, mask):
        d = np.where(mask, ref_logp - logp, 0.0)[mask]
        return (np.exp(d) - d - 1).sum()

    def full(logits, ref_logits):
        return (np.exp(logits) * (logits - ref_logits)).sum(-1)

    def in_float32(logp, ref_logp):
        d = narrow(ref_logp - logp)
        return wide(np.exp(d) - d - 1)

    def blocked(logp, ref_logp):
        return detached(np.exp(logp - ref_logp))

    return [k3, whole, detached_ratio, clipped_ratio, indexed, full, in_float32, blocked]


TWINS = list(
    zip(
        losses(jnp, jax.lax.stop_gradient, lambda x: x.astype(jnp.float32), lambda x: x.astype(jnp.float64)),
        losses(torch, torch.Tensor.detach, torch.Tensor.float, torch.Tensor.double),
        strict=True,
    )
)
k3 = TWINS[0][0]


def read_from_an_object(rollout):
    d = rollout.ref_logp - rollout["logp"]
    return jnp.exp(d) - d - 1


def reported(loss, **options) -> dict:
    report = json.loads(kltest.grade(loss, **options).to_json())
    assert "error" not in report or not report["error"], report["error"]
    return {
        "codes": {check["code"]: check["status"] for check in report["checks"]},
        "rows": [(row["environment"], row["sampler"], row["identified"]) for row in report["gradients"]],
        "numbers": [(row["relative_bias"], row["residual"], row["relative_variance"]) for row in report["gradients"]],
        "value": [(row["environment"], row["sampler"], row["matches"]) for row in report["value"]],
        **{name: report[name] for name in ("verdict", "reduction", "dtype", "notes")},
    }


@pytest.mark.parametrize("pair", TWINS, ids=lambda pair: pair[0].__name__)
def test_a_loss_for_jax_is_graded_as_its_twin_in_torch(pair):
    found, twin = (reported(loss) for loss in pair)
    assert any(CALLED in note for note in found["notes"])
    assert not any(CALLED in note for note in twin["notes"])
    # Steps of a JAX program cannot be left out, so what is wrong with a detached or a clipped ratio stays unnamed.
    if pair[0].__name__ in ("detached_ratio", "clipped_ratio"):
        for codes in (found["codes"], twin["codes"]):
            for code in ("KL105", "KL302", "KL306"):
                codes.pop(code, None)
    for key in ("codes", "value", "verdict", "reduction", "dtype"):
        assert found[key] == twin[key], key
    # Both compute in float64 (or both in float32): sums in another order differ by units in the last place.
    tolerance = 1e-10 if found["dtype"] == "float64" else 1e-5
    for mine, theirs in zip(found["rows"], twin["rows"], strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2] == (theirs[2] and pytest.approx(theirs[2], rel=tolerance))
    for mine, theirs in zip(found["numbers"], twin["numbers"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e3 * tolerance, abs=tolerance)


@pytest.mark.parametrize(
    ("loss", "factor"), [(k3, 1.0), (read_from_an_object, 1.0), (lambda logp, ref_logp: 1.5 * k3(logp, ref_logp), 1.5)]
)
def test_the_names_of_a_jax_k3_are_those_derived_and_a_planted_bug_is_seen(loss, factor):
    assert reported(loss)["rows"] == [
        ("bandit", "current", pytest.approx({"forward_kl": factor}, rel=1e-10)),
        ("sequence", "current", pytest.approx({"local_forward_kl": factor}, rel=1e-10)),
        ("ragged", "current", pytest.approx({"local_forward_kl": factor}, rel=1e-10)),
    ]


def test_a_jax_k3_takes_seconds():
    started = time.process_time()
    kltest.grade(jax.jit(k3))
    # Six or seven on one idle core, most of it compiling: what counts is that each shape is compiled once.
    assert time.process_time() - started < 30


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, jax.checkpoint, partial, jax_loss, kltest.jax_loss])
def test_what_jax_makes_of_a_function_is_recognised(wrap):
    def plain(logp, ref_logp):
        return 0.5 * (logp - ref_logp) ** 2

    loss = wrap(k3 if wrap is partial else plain)
    report = reported(loss, environment="bandit")
    assert any(CALLED in note for note in report["notes"])
    named = "forward_kl" if wrap is partial else "reverse_kl"
    assert report["rows"][0][2] == pytest.approx({named: 1.0}, rel=1e-10)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda x: jnp.exp(x), torch.float64),
        (lambda x: jnp.exp(x).astype(jnp.float32), torch.float32),
        (jax.jit(lambda x: jnp.exp(x.astype(jnp.bfloat16)).astype(jnp.float64)), torch.bfloat16),
        # A mask and a count lose nothing in float32, the inverse of a count does.
        (lambda x: x * jnp.asarray(MASK).astype(jnp.float32).sum(), torch.float64),
        (lambda x: x * jax.jit(lambda mask: (mask.astype(jnp.float32), 1.0))(MASK)[0], torch.float64),
        (lambda x: x * (1 / (1 + jnp.asarray(MASK).astype(jnp.float32).sum())), torch.float32),
    ],
)
def test_the_precision_of_a_jaxpr(loss, kind):
    with jax.enable_x64(True):
        assert narrowest(jax.make_jaxpr(loss)(jnp.ones(3))) == kind


def test_a_loss_that_names_torch_is_never_taken_for_one_of_jax():
    def either(logp, ref_logp):
        if isinstance(logp, torch.Tensor):
            return 0.5 * (logp - ref_logp) ** 2
        return jnp.square(logp - ref_logp)

    assert not is_for_jax(either)
    report = reported(either, environment="bandit")
    assert report["rows"][0][2] == pytest.approx({"reverse_kl": 1.0})
    assert not any(CALLED in note for note in report["notes"])
    assert not any(is_for_jax(loss) for _, loss in TWINS)
    assert not any(map(is_for_jax, (torch.exp, torch.nn.KLDivLoss(), torch.nn.functional.kl_div)))


def test_a_loss_that_names_both_is_called_with_arrays_if_that_is_said():
    def for_jax(logp, ref_logp, kind=torch.float64):
        assert torch is not None
        return k3(logp, ref_logp)

    assert not is_for_jax(for_jax)
    report = reported(jax_loss(for_jax), environment="bandit", arguments={"kind": None})
    assert report["rows"][0][2] == pytest.approx({"forward_kl": 1.0})
    assert any(CALLED in note for note in report["notes"])


def test_a_jax_loss_that_fails_shows_its_own_line():
    def wrong(logp, ref_logp):
        return jnp.matmul(logp, ref_logp, ref_logp)

    report = kltest.grade(wrong)
    assert report.verdict == "error"
    assert "in wrong" in report.error
    assert "jnp.matmul(logp, ref_logp, ref_logp)" in report.error


def test_values_and_gradients_of_one_call_are_those_of_jax():
    generator = torch.Generator().manual_seed(0)
    logp, ref = (torch.randn(3, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    logp.requires_grad_()
    value, (texts, count) = jax_loss(lambda a, b: (k3(a, b).sum(), ("text", jnp.argmax(a))))(logp, ref)
    value.backward()
    # k3' = 1 − e^(ref − logp), by hand.
    assert torch.allclose(logp.grad, 1 - torch.exp(ref - logp.detach()), rtol=1e-14)
    assert (texts, int(count), value.dtype) == ("text", int(logp.argmax()), torch.float64)


def test_a_compiled_function_that_returns_a_number_is_read():
    """float32 rounds what it multiplies; the number beside it is exact."""
    inner = jax.jit(lambda x: (x * 0.3, 2.0))
    assert narrowest(jax.make_jaxpr(inner)(jnp.float32(1.5))) == torch.float32
    assert narrowest(jax.make_jaxpr(lambda x: inner(x)[1] + jnp.float32(1))(jnp.int32(1))) == torch.float32


def test_what_changes_from_call_to_call_is_not_taken_from_an_earlier_one():
    calls = []

    def counting(logp):
        calls.append(None)
        return logp * len(calls)

    logp = torch.ones(2, dtype=torch.float64, requires_grad=True)
    loss = jax_loss(counting)
    assert [loss(logp)[0].item() for _ in range(3)] == [1.0, 2.0, 3.0]


def test_jax_settings_are_left_as_they_were():
    before = jax.config.jax_enable_x64
    bind(k3)  # binding alone calls nothing
    kltest.grade(k3, environment="bandit", select="KL1")
    assert jax.config.jax_enable_x64 == before
    assert jax.config.values["jax_disable_most_optimizations"] is False


def test_the_command_grades_a_file_in_a_child(tmp_path):
    (tmp_path / "losses.py").write_text(
        "import jax.numpy as jnp\ndef loss(logp, ref_logp, mask):\n"
        "    u = jnp.where(mask > 0, logp - ref_logp, 0.0).sum(-1)\n    return 0.5 * jnp.square(u)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "kltest.cli", "grade", "losses.py:loss", "--timeout", "300", "--output", "json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (0, "confirmed"), done.stdout + done.stderr
    assert any(CALLED in note for note in report["notes"])

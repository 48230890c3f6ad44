"""Fields of a support, the K likeliest tokens of one side: what they hold, whose they are, and how many."""

import inspect

import pytest
import torch
from weekly import first

import kltest
from kltest.environments import Instance, bandit, ragged
from kltest.errors import UsageError
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.names import support_size
from kltest.rollout import Rollout

INSTANCE = Instance.draw(ragged(6, 2), 3)


def rollout(instance=INSTANCE):
    return Rollout.of(instance, padding=1)


def received(function, **arguments):
    """What the parameters of a function get in a call."""
    batch, seen = rollout(), []

    def noting(*given, **named):
        seen.append({**dict(zip(function.__code__.co_varnames, given, strict=False)), **named})
        return function(*given, **named)

    noting.__signature__ = inspect.signature(function)
    bind(noting, Call(arguments=arguments), "noting")(batch)
    return batch, seen[-1]


def of_either(topk_ids, topk_logp, ref_topk_logp, mask):
    return ((ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1) * mask).sum(-1)


def of_the_student(student_topk_ids, student_topk_logprobs, teacher_topk_logprobs, mask):
    return of_either(student_topk_ids, student_topk_logprobs, teacher_topk_logprobs, mask)


def by_name_of_the_teacher(teacher_topk_ids, student_topk_logprobs, teacher_topk_logprobs, mask, topk=3):
    assert teacher_topk_ids.shape[-1] == topk
    return of_either(teacher_topk_ids, student_topk_logprobs, teacher_topk_logprobs, mask)


def stated(topk_ids, topk_logp, ref_topk_logp, mask, support="student", k=2):
    return of_either(topk_ids, topk_logp, ref_topk_logp, mask)


@pytest.mark.parametrize(
    ("function", "arguments", "of", "k"),
    [
        (of_either, {}, "ref_logits", 4),
        (of_either, {"k": 1}, "ref_logits", 1),
        (of_either, {"k": 64}, "ref_logits", 4),
        (of_the_student, {"k": 2}, "logits", 2),
        (by_name_of_the_teacher, {}, "ref_logits", 3),
        (by_name_of_the_teacher, {"topk": 2}, "ref_logits", 2),
        (stated, {}, "logits", 2),
        (stated, {"support": "teacher", "k": 3}, "ref_logits", 3),
    ],
)
def test_a_support_is_of_the_side_and_size_that_are_said(function, arguments, of, k):
    batch, given = received(function, **arguments)
    ids, own, theirs = (given[name] for name in list(inspect.signature(function).parameters)[:3])
    likeliest = batch.peek(of).detach().argsort(dim=-1, descending=True)[..., :k]
    assert torch.equal(ids, likeliest)
    assert torch.equal(own, batch.peek("logits").gather(-1, likeliest))
    assert torch.equal(theirs, batch.peek("ref_logits").gather(-1, likeliest))
    assert own.requires_grad
    assert not theirs.requires_grad


def test_the_gradient_of_a_support_flows_to_the_next_token_log_probs_and_to_no_others():
    batch = rollout()
    topk_logp = batch.topk_logp
    (found,) = torch.autograd.grad(topk_logp.sum(), batch.peek("logits"))
    assert found.sum() == topk_logp.numel()
    assert torch.equal(found.nonzero()[:, -1].sort().values, batch.topk_ids.flatten().sort().values)
    assert batch.accessed == {"topk_logp", "topk_ids", "logits", "ref_logits"}


def test_a_batch_is_not_copied_by_its_supports_and_has_them_all_the_same():
    batch = rollout()
    assert "topk_logp" in batch
    assert "teacher_topk_logprobs" in batch
    assert not {"topk_ids", "topk_logp", "ref_topk_logp"} & set(batch.keys())
    assert batch.take([1, 0])["topk_ids"].equal(batch["topk_ids"][[1, 0]])


@pytest.mark.parametrize(
    ("k", "vocabulary", "tokens"), [(4, 12, 4), (4, 6, 4), (4, 5, 3), (64, 12, 10), (1, 2, 1), (4, 2, 1)]
)
def test_two_tokens_at_least_are_outside_if_the_vocabulary_has_three(k, vocabulary, tokens):
    assert support_size(k, vocabulary) == tokens
    batch = rollout(Instance.draw(bandit(vocabulary), 0))
    assert batch.support("topk_ids", k).shape[-1] == tokens


@pytest.mark.parametrize(
    ("k", "words"),
    [
        (0, "at least one token"),
        (-1, "at least one token"),
        (2.0, "k=2.0: a support has a whole"),
        (True, "k=True"),
        ("x", "k='x'"),
        ("@logp", "a whole number"),
    ],
)
def test_what_is_no_number_of_tokens_is_refused(k, words):
    with pytest.raises(UsageError, match=words):
        bind(of_either, Call(arguments={"k": k}))


def test_more_tokens_than_a_vocabulary_has_are_said_to_become_fewer():
    loss = bind(of_either, Call(arguments={"k": 64}))
    assert (
        loss.filled["topk_logp"]
        == "topk_logp, the 64 likeliest of the reference, or the vocabulary less two if that is fewer"
    )
    assert bind(of_either, Call()).filled["topk_logp"] == "topk_logp, the 4 likeliest of the reference"


def test_a_batch_that_came_with_a_support_has_that_one():
    batch = rollout()
    ids = batch.support("topk_ids", 2, of="").flip(-1)
    given = batch.replace(topk_ids=ids, ref_topk_logp=torch.full(ids.shape, -2.0).double())
    for one in (given, given.take(range(len(given))), given.wider(3)):
        width = ids.shape[1]
        assert torch.equal(one.support("topk_ids", 4)[:, :width], ids)
        assert torch.equal(one.topk_logp[:, :width], batch.peek("logits").gather(-1, ids))
        assert (one.ref_topk_logp[:, :width] == -2).all()
        assert one.support_size(4) == 2
    near = given.near_reference()
    assert torch.equal(near.ref_topk_logp, near.topk_logp.detach())


def test_without_fields_of_a_support_k_is_an_unknown_parameter():
    with pytest.raises(UsageError, match="no parameter of that name"):
        bind(lambda logp, ref_logp: logp - ref_logp, Call(arguments={"k": 4}))


def over_sixty_four(logits, ref_logits, k=64):
    log_probs, head = logits.log_softmax(-1).topk(k, dim=-1)
    return (log_probs.exp() * (log_probs - ref_logits.log_softmax(-1).gather(-1, head))).sum(-1)


def of_a_kind(logits, ref_logits, k=3):
    assert k == 3
    return (logits.exp() * (logits - ref_logits)).sum(-1)


@pytest.mark.scheduled
def test_more_tokens_than_a_small_vocabulary_has_become_as_many_as_it_allows():
    """`topk(64)` of four tokens raised; a number that may be a kind of estimator stays what it is."""
    report = kltest.grade(over_sixty_four, environment="bandit")
    assert report.verdict == "refuted"
    assert report.filled["k"] == "64, or the vocabulary less two if that is fewer"
    assert kltest.grade(of_a_kind, environment="bandit", select="KL1").verdict == "confirmed"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("teacher_logp", "ref_logp"),
        ("teacher_logits", "ref_logits"),
        ("student_logits", "logits"),
        ("topk_indices", "topk_ids"),
        ("teacher_topk_logp", "ref_topk_logp"),
    ],
)
def test_names_of_a_teacher_and_a_student_are_fields(name, field):
    assert kltest.names.field_named(name) == field


def test_whose_tokens_they_are_can_be_given_to_a_function_that_has_no_such_parameter():
    batch, given = received(of_either, support="student", k=2)
    assert torch.equal(given["topk_ids"], batch.support("topk_ids", 2, of=""))
    with pytest.raises(UsageError, match="teacher or student"):
        bind(of_either, Call(arguments={"support": "sampler"}))


def of_two_models(logp, ref_logp, teacher_logp=None):
    assert teacher_logp is None
    return logp - ref_logp


def test_a_teacher_beside_a_reference_is_another_model():
    bind(of_two_models)(rollout())


def of_a_payload(logits, target_token_ids, target_values, target_token_mask):
    own = logits.gather(-1, target_token_ids)
    return (target_values.exp() * (target_values - own) * target_token_mask).sum(-1)


def of_a_payload_reversed(logits, sparse_ids, sparse_logprobs, mask=None):
    own = logits.gather(-1, sparse_ids)
    return (own.exp() * (own - sparse_logprobs)).sum(-1)


@pytest.mark.scheduled
@pytest.mark.parametrize(
    ("function", "name"),
    first(1, [(of_a_payload, "local_forward_kl_top4"), (of_a_payload_reversed, "local_reverse_kl_top4")]),
)
def test_ids_and_values_that_are_called_alike_are_a_payload(function, name):
    report = kltest.grade(function, environment="sequence", sampler="current", select="KL1")
    assert list(report.gradients[0].identified) == [name]
    assert report.filled[list(report.filled)[2]] == "ref_topk_logp, the 4 likeliest of the reference"


def of_sampled_tokens(logits, token_ids, token_logprobs):
    return logits.gather(-1, token_ids[..., None])[..., 0] - token_logprobs


def of_targets(logits, target_ids):
    return -logits.gather(-1, target_ids[..., None])[..., 0]


def of_two_payloads(logits, target_ids, topk_values):
    return logits.gather(-1, target_ids) - topk_values


@pytest.mark.parametrize("function", [of_sampled_tokens, of_targets, of_two_payloads])
def test_names_that_are_not_those_of_one_payload_are_refused(function):
    with pytest.raises(UsageError, match="cannot be filled"):
        bind(function)


def test_a_payload_is_the_teachers_unless_it_is_called_the_students():
    names = ("topk_indices", "topk_logits", "student_top_ids", "student_top_log_probs", "token_ids", "token_logps")
    assert kltest.names.payloads(names) == {
        **{"topk_indices": "topk_ids", "topk_logits": "ref_topk_logp"},
        **{"student_top_ids": "topk_ids", "student_top_log_probs": "topk_logp"},
    }

"""What `benchmarks.scan` counts for each labelled variant, on labels and rows made by hand."""

from types import SimpleNamespace

import pytest

from benchmarks.scan import COUNTS, HONEST, OUTCOMES, Label, compare, normal, outcome, results, standing, words

R, N, S, M, W = OUTCOMES
THREE = [("k1", "zero"), ("k2", "local_reverse_kl"), ("k3", "local_forward_kl or unnamed")]
MASKED = [("mask, beta=0", "local_forward_kl"), ("no mask, beta=0", "local_forward_kl"), ("0<beta<1", "unnamed")]
TABLE = {
    "right by words": (
        THREE,
        [("t='k3'", "local_forward_kl"), ("t='k2'", "2*local_reverse_kl"), ("k1", "zero")],
        [R] * 3,
    ),
    "right beside one not run": (THREE, [("t='k1'", "not run"), ("t='k1'", "zero")], [R, S, S]),
    "right by name": (THREE, [("", "local_reverse_kl")], [S, R, S]),
    "right without a name": ([("", "unnamed")], [("", "unnamed")], [R]),
    "one row for all": ([("a", "reverse_kl"), ("b", "reverse_kl")], [("", "reverse_kl")], [R, R]),
    "one row for one": ([("a", "reverse_kl"), ("b", "reverse_kl"), ("c", "zero")], [("", "reverse_kl")], [R, S, S]),
    "one row for two": (MASKED, [("beta=0.5", "unnamed"), ("beta=0", "local_forward_kl")], [R] * 3),
    "not answered": (THREE, [("t='k2'", "not run")], [S, N, S]),
    "not answered without words": ([("sparse", "unnamed")], [("not packed", "not run")], [N]),
    "not answered, though others are longer": (
        MASKED[1:],
        [("no mask, beta=0", "local_forward_kl"), ("beta=0, sum", "local_forward_kl"), ("beta=0.5", "not run")],
        [R, N],
    ),
    "none answered": (THREE, [("", "failed")], [N] * 3),
    "silent": (THREE, [("t='k1'", "zero"), ("t='k3'", "unnamed")], [R, S, R]),
    "silent with the name of another": (THREE, [("t='k1'", "local_reverse_kl")], [S] * 3),
    "missed": (THREE, [], [M] * 3),
    "wrong": (THREE, [("t='k2'", "chi_square")], [S, W, S]),
    "wrong beside a right one": (THREE, [("t='k2', sum", "chi_square"), ("t='k2'", "local_reverse_kl")], [S, W, S]),
    "wrong where it is matched": ([("a, b", "zero"), ("a", "zero")], [("a, b", "zero"), ("a, b, c", "chi")], [R, W]),
    "wrong without words": (THREE, [("", "chi_square")], [W, S, S]),
    "several": (THREE, [("k1", "zero"), ("k2", "inconclusive"), ("k3", "chi_square")], [R, N, W]),
}


def label(variant, current, *, certainty="sure", first=10, place=""):
    row = {"repository": "a/b", "file": "loss.py", "first": str(first), "last": str(first + 9), "variant": variant}
    return Label.of(
        {**row, "current": current, "certainty": certainty, "uses": "", "note": "", "kind": "", "place": place}
    )


def row(variant, name):
    told = {"status": name} if name in HONEST else {"status": "finding", "gradients": {"current": name}}
    return SimpleNamespace(
        **{"gradients": {}, "variant": variant, "place": "loss", "line": 12, "why": "", "function": "f", **told}
    )


@pytest.mark.parametrize(("known", "rows", "expected"), TABLE.values(), ids=TABLE)
def test_every_label_has_one_outcome(known, rows, expected):
    known = [label(*each) for each in known]
    stands = list(standing(known, list(results(known, range(len(known)), [row(*each) for each in rows]))))
    own = [[result for other, result in stands if other == number] for number in range(len(known))]
    assert [outcome(each, own[n], found=bool(rows))[0] for n, each in enumerate(known)] == expected


def test_a_row_stands_for_labels_of_its_place_and_of_helpers():
    """A reward is no answer for the loss, whatever the words share; a helper comes to either."""
    known = [label("k1", "zero", place="loss"), label("k1, reward", "reverse_kl", place="reward")]
    reward = row("kind='k1'", "unnamed")
    reward.place = "advantage"
    met = [result.met for result in results(known, [0, 1], [reward, row("kind='k1'", "zero")])]
    assert met == [[1], [0]]
    helpers = [label("k1", "zero", place="helper"), known[0]]
    assert [result.met for result in results(helpers, [0, 1], [reward])] == [[0]]
    assert [result.met for result in results(known[:1], [0], [reward])] == [[0]]


def test_names_of_supports_are_the_same_for_any_size():
    assert normal("2*local_forward_kl_top64_tail (its size moves: KL204)") == normal("local_forward_kl_top2_tail")
    assert normal("local_forward_kl_top2") != normal("local_forward_kl_own2")


def test_counts_and_lines_of_a_repository(capsys):
    """Each outcome once: five labels, of which two terms are found, and one more that nobody needs to find."""
    known = [
        *(label(*each) for each in [*THREE, ("k4", "unnamed")]),
        label("", "reverse_kl", first=30),
        label("", "reverse_kl", first=50, certainty="unsure"),
    ]
    rows = [row("k1", "zero"), row("k2", "not run"), row("k3", "chi_square")]
    count = compare(known, [([("loss.py", 12, 13)], rows), ([("other.py", 1, 2)], [row("", "reverse_kl")])])
    expected = {"terms": 2, "found": 1, "finds": 2, "finds right": 1, "variants": 3, **dict.fromkeys(COUNTS[5:], 1)}
    assert count == expected
    assert capsys.readouterr().out.splitlines() == [
        "  no term: other.py:1-2 f loss",
        "  not answered: a/b loss.py:10 [k2]  : line 12 loss [k2] not run",
        "  wrong: a/b loss.py:10 [k3]  : line 12 loss [k3] chi_square",
        "  silent: a/b loss.py:10 [k4]  : nothing",
        "  missed: a/b loss.py:30 []  : nothing",
    ]


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("kl_estimator='K1', with importance_ratio", {"kl_estimator", "k1", "importance_ratio"}),
        ("without ratio", {"not ratio"}),
        ("no mask, beta=1.0", {"not mask", "beta", "1"}),
        ("not kind == 'k1'", {"not kind", "not k1"}),
        ("a, not getattr(args, 'bias')", {"a", "not getattr", "not args", "not bias"}),
        ("0<beta<1", {"beta", "otherwise"}),
        ("beta otherwise", {"beta", "otherwise"}),
        ("adv!=PPB", {"adv", "ppb", "otherwise"}),
        ("", set()),
    ],
)
def test_words_of_a_configuration(variant, expected):
    assert words(variant) == expected

"""Tabular training, batched: runs that differ in seed, coefficient, rate or estimator are one tensor program.

Conventions.

*What is followed.* Plain gradient ascent on the (C, V) logits of a softmax policy,

    θ ← θ + learning_rate · (reward part − β · KL part).

The KL part is the gradient of an estimator as it stands in `kltest.estimators`, or of any callable that `kltest grade`
takes, placed in the loss or in the reward as there. A run without an estimator, or with β = 0, is unregularised; its J
is still measured at its β. A `whole` estimator is the entire loss: then there is no reward part beside it.

*Exact or sampled.* With `batch_size=None` both parts are exact expectations over every rollout, for a batch of one
rollout, or with `group_size=n` of one group of n rollouts of a prompt. With an integer, that many rollouts are drawn
for each update, in groups of `group_size` rollouts of one prompt where that is given.

*Whom an estimator meets.* Rows of one run only: runs are told apart by `group` where an estimator couples rows by it,
and one that couples rows in another way is called for one batch at a time. In groups the loss of a group is the mean
over its rows. Without `group_size` a group is one rollout in exact mode, and all of a batch's rollouts of a prompt in
sampled mode. Weights come from outside: a row of weight 0 has no influence, whatever its gradient.

*Staleness.* With `inner_steps=n` the sampler is the policy of 0 … n − 1 updates ago: it is renewed every n updates, and
every update draws new rollouts from it. `ratio` says how the reward part answers, `kltest.training.reward` how exactly;
a KL part brings its own ratio or none.

*Randomness.* A run's uniforms come from its own seed alone, so that runs of one seed meet the same uniforms whatever
their estimator, coefficient or rate, and a run ends at the same bits whether trained alone or among thousands. (A
callable of your own must keep its rows apart by bits for that: torch's `log1p` does not.)

*What is measured* is exact, by dynamic programming, never sampled: see `History`.

*Divergence.* A run whose logits would become infinite or NaN, or further than `EXPLODED` from zero, stays where it was,
and `History.diverged` says since which update.
"""

from kltest.training.history import History
from kltest.training.problems import PerRun, Problem, Run, State
from kltest.training.train import EXPLODED, train

__all__ = ["EXPLODED", "History", "PerRun", "Problem", "Run", "State", "train"]

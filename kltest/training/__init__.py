"""Tabular training, batched: runs that differ in seed, coefficient, rate or estimator are one tensor program.

*Update.* Plain gradient ascent on the (C, V) logits of a softmax policy,

    θ ← θ + learning_rate · (reward part − β · KL part).

The KL part is the gradient of an estimator as registered in `kltest.estimators`, or of any callable that `kltest grade`
takes, placed in the loss or in the reward as there. A run without an estimator, or with β = 0, is unregularised; its J
is still measured at its β. A `whole` estimator is the entire loss, without a reward part beside it.

*Exact or sampled.* With `batch_size=None` both parts are exact expectations over every rollout, for a batch of one
rollout, or with `group_size=n` of one group of n rollouts of a prompt. With an integer, that many rollouts are drawn
for each update, in groups of `group_size` rollouts of one prompt if that is given.

*Coupling.* An estimator sees rows of one run only: `group` distinguishes runs for estimators that couple rows by it,
and one that couples rows in another way is called for one batch at a time. In groups the loss of a group is the mean
over its rows. Without `group_size` a group is one rollout in exact mode, and all of a batch's rollouts of a prompt in
sampled mode. Weights are applied outside: a row of weight 0 has no influence, whatever its gradient.

*Staleness.* With `inner_steps=n` the sampler is the policy of 0 … n − 1 updates ago: it is renewed every n updates, and
every update draws new rollouts from it. `ratio` is the correction of the reward part (`kltest.training.reward`); an
estimator brings its own ratio or none.

*Randomness.* A run's uniforms come from its own seed alone. Runs of one seed meet the same uniforms whatever their
estimator, coefficient or rate, and a run ends at the same bits whether trained alone or among thousands. (That needs a
user-defined callable whose value for a row does not depend on the others to the last bit: torch's `log1p` does.)

*Measurements* are exact, by dynamic programming, never sampled: see `History`.

*Divergence.* A run whose logits would become infinite or NaN, or exceed `EXPLODED` in size, stays where it was, and
`History.diverged` is the update at which that happened.
"""

from kltest.training.measure import History
from kltest.training.problems import Problem, Run
from kltest.training.train import EXPLODED, train

__all__ = ["EXPLODED", "History", "Problem", "Run", "train"]

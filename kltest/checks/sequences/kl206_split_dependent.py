"""KL206: the gradient depends on how a batch is cut into parts."""

from __future__ import annotations

from kltest.checks.check import Check, Found
from kltest.checks.losses import squared_sum
from kltest.checks.sequences.kl204_batch_normalised import mean_over_tokens
from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.identify.findings import Findings


def examine(findings: Findings) -> Found | None:
    from kltest.checks.group_fixture import limit
    from kltest.checks.sequences.splits import split

    found = split(findings)
    if found.unfit:
        return Found(f"the loss is made for one group a call: {found.unfit}, and it is not told of groups", "skip")
    if found.moved <= limit(findings):
        return None
    parts = " + ".join(map(str, found.parts))
    return Found(
        f"{found.whole} rollouts of different lengths in one batch, and cut into {parts} with the gradients of the "
        f"parts accumulated: the two gradients differ by {found.moved:.3g} of their size, though no group was cut."
    )


WORLD = SmallWorld(policy=[(0.8, 0.2), (0.5, 0.5)], reference=[(0.5, 0.5)] * 2, length=2, ends=True)


def demonstrate() -> Demonstration:
    import numpy as np

    from kltest.loss.calling import BoundLoss, bind
    from kltest.moments.differentiate import differentiate, live_positions
    from kltest.rollout import Rollout

    instance = WORLD.instance()
    losses = [bind(loss) for loss in (mean_over_tokens, squared_sum)]
    everything = Rollout.of(instance)
    lengths = instance.paths.lengths
    short, long = int(lengths.argmin()), int(lengths.argmax())

    def weight(loss: BoundLoss, *rows: int) -> float:
        """∂/∂log π of the first token of the first rollout."""
        batch = everything.take(np.array(rows))
        found = differentiate(loss, batch, live_positions(batch)).logp
        assert found is not None
        return float(found[0, 0])

    rows: tuple[tuple[str | float, ...], ...] = (
        ("both in one batch", *(weight(loss, short, long) for loss in losses)),
        ("one after the other, accumulated", *(weight(loss, short) / 2 for loss in losses)),
    )
    return Demonstration(
        f"{WORLD.words()}\nThe weight of the rollout that ends at once, beside one of two tokens.",
        ("batch", "as written", "mended"),
        rows,
    )


CHECK = Check(
    code="KL206",
    name="split-dependent",
    title="The gradient changes with how a batch is cut into micro-batches",
    what=(
        "The gradient of a batch is not what its parts give when they are accumulated: the loss divides by something "
        "that the whole batch decides, or mixes groups."
    ),
    why=(
        "The number of micro-batches, accumulation steps and ranks is meant to be a matter of memory. Here it changes "
        "what is optimised, so that a run cannot be repeated on other hardware."
    ),
    example=(
        "Two actions, of which the second ends the rollout, two tokens at most; π = (0.8, 0.2) and ref = (0.5, 0.5) "
        "at the root. A rollout that ends at once has log-ratio ln 0.4 = −0.916291. In a batch with one of two tokens "
        "a token-mean weighs it with a third of that, −0.305430; alone, accumulated over two steps, with a half, "
        "−0.458145."
    ),
    fix=(
        "Divide by the number of rollouts, or by a constant; or pass the count of the whole batch, over all "
        "micro-batches and ranks, to every part."
    ),
    sources=(
        "TRL #3231, TRL #3021",
        "Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783",
    ),
    wrong=mean_over_tokens,
    mended=squared_sum,
    demonstrate=demonstrate,
    examine=examine,
)

"""Exact gradient and variance over all rollouts, against the loss's own forward and backward over the same rows."""

import multiprocessing
from pathlib import Path

from benchmarks.environments import FIXED, OTHERS, built, drawn, forward_backward, loss
from benchmarks.measure import Row, compare, save
from kltest.moments import exact

CLAIM = "exact moments / the loss's own forward and backward"
ENVIRONMENTS = (("fixed length", FIXED, 1.5), ("ragged or shared contexts", OTHERS, 3.0))


def main() -> list[Row]:
    rows = []
    for kind, environments, bound in ENVIRONMENTS:
        for case, environment in environments.items():
            instance = drawn(environment)
            for name in ("k3-loss", "k2-loss"):
                for declared in (True, False):
                    taken = loss(name, declared=declared)
                    rollout = built(instance, taken)
                    rows.append(
                        compare(
                            f"{CLAIM}, {kind}",
                            f"{case}: {name}{'' if declared else ' as a stranger’s function'}",
                            lambda taken=taken, instance=instance: exact(taken, instance),
                            lambda taken=taken, rollout=rollout: forward_backward(taken, rollout),
                            bound=bound,
                        )
                    )
    rows += [_in_own_process(case, declared) for case in FIXED for declared in (True, False)]
    save("moments", rows)
    return rows


def _in_own_process(case: str, declared: bool) -> Row:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        ratio = pool.apply(peak_memory, (case, declared))
    name = f"{case}: k3-loss{'' if declared else ' as a stranger’s function'}"
    return Row("peak memory of exact moments / fields of the loss", name, ratio, ratio, ratio, 6.0, True, 0.0, 0.0)


def peak_memory(case: str, declared: bool) -> float:
    """Peak growth of the process, in units of the bytes of logp, ref_logp and mask."""
    instance = drawn(FIXED[case])
    taken = loss("k3-loss", declared=declared)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is counted from here
    exact(taken, instance)
    rows, steps = instance.paths.shape
    return (_resident("VmHWM") - before) / (3 * 8 * rows * steps)


def _resident(which: str) -> int:
    """Bytes, from Linux's account of the process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(which)).split()[1])


if __name__ == "__main__":
    main()

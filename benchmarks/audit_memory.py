"""Memory of an audit: counted from shapes alone, tensor by tensor, and measured where the model is small.

    python -m benchmarks.audit_memory    # writes audit_memory.csv

The count runs the audit's own code on tensors without data (torch's fake tensors), and adds up what is alive. The
measurement runs it on the CPU and reads the records of torch's allocator. Both are of one unit, whose loss reads
log-probs. The sketches of all blocks lie on the host, and come on top of that. The last row is the peak of the resident
memory of `kltest audit`, from its start to its report, in a process that cannot have more than 4 GB.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import pandas
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.measure import record
from kltest.auditing import passes
from kltest.auditing.named import columns_of
from kltest.language_models.generation import Rollouts
from kltest.language_models.language import LanguageModel
from kltest.language_models.models import save, tiny_tokenizer
from kltest.samples.blocks import MOST_BLOCKS
from kltest.samples.sketch import Sketch


@dataclass(frozen=True)
class Size:
    """Shapes of a transformer and of a unit; `logits` are those of one chunk."""

    hidden: int
    layers: int
    vocabulary: int
    rollouts: int = 4
    tokens: int = 256
    prompt: int = 64
    dtype: str = "float32"
    logits: int = passes.CHUNK

    def model(self) -> LanguageModel:
        """Return a transformer in the proportions of Qwen2.5-0.5B, with fresh weights."""
        heads = self.hidden // 64
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 38 // 7,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=min(2, heads),
            tie_word_embeddings=True,
            eos_token_id=1,
            pad_token_id=0,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype))
        return LanguageModel(model.eval(), None, (1,), 0)

    def unit(self) -> Rollouts:
        """Return rollouts in which every token is the id 2."""
        prompts, tokens = (torch.full((self.rollouts, length), 2) for length in (self.prompt, self.tokens))
        return Rollouts(prompts, prompts == 2, tokens, tokens == 2, tokens.float(), tokens[:, 0])


# As `kltest audit` draws them by default: four rollouts of up to 16 tokens.
WHOLE = Size(384, 5, 20_000, tokens=16, prompt=4)
COUNTED = [Size(896, 24, 151_936, dtype="bfloat16", logits=passes.LARGE, rollouts=rollouts) for rollouts in (4, 8, 16)]
MEASURED = (
    Size(128, 2, 20_000, tokens=64, prompt=16),
    Size(256, 4, 32_000, tokens=64, prompt=16),
    Size(256, 4, 32_000, tokens=64, prompt=16, dtype="bfloat16"),
    Size(384, 5, 20_000, tokens=64, prompt=16, logits=2**24),
)
_, PARTS, _ = columns_of(stale=False, full=False, rewarded=False)
# One of each kind, for the count: a further one adds its sketch and what is collected for it, and no more.
FEW = [next(part for part in PARTS if part.kind == kind) for kind in ("own", "later", "control")]


def one_unit(size, parts):
    """Make both models and measure one unit, as an audit does."""
    policy, reference = (size.model() for _ in range(2))
    models = passes.Models(passes.CutModel(policy), passes.CutModel(reference))
    sketch = Sketch(policy.model)
    found = {"logp": torch.zeros(size.rollouts, size.tokens)}
    with mock.patch.multiple(passes, CHUNK=size.logits, _of_loss=lambda *_: (found, {})), sketch.listening():
        passes.measure(None, models, size.unit(), parts, sketch)
    return sketch


# Answers of tensors without data: no number is written, and the last layer is the last.
ANSWERS = {torch.ops.aten._local_scalar_dense.default: 0, torch.ops.aten.allclose.default: True}


class Alive(TorchDispatchMode):
    """Adds up the bytes of tensors that operations made and nothing has freed yet."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in ANSWERS and isinstance(args[0], FakeTensor):
            return ANSWERS[function]
        found = function(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(found):
            if isinstance(one, torch.Tensor) and (storage := one.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return found

    def _freed(self, size):
        self.now -= size


def counted(size):
    """Return bytes at the peak of one unit, from shapes alone; and the sketch, which knows the number of weights."""
    with FakeTensorMode(), Alive() as alive, torch.random.fork_rng():
        sketch = one_unit(size, FEW)
    collected = size.rollouts * size.tokens * size.hidden * getattr(torch, size.dtype).itemsize
    return alive.peak + (len(PARTS) - len(FEW)) * (4 * sketch.size + collected), sketch


def measured(size):
    """Return bytes at the peak of one unit, from the records of torch's allocator."""
    with torch.random.fork_rng(), torch.profiler.profile(profile_memory=True) as records:
        one_unit(size, PARTS)
    now = peak = 0
    for event in records.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def row(size, peak=None, process=None):
    """Return a row of the table, in MB."""
    count, sketch = counted(size)
    blocks = 4 * MOST_BLOCKS * (2 + len(PARTS)) * sketch.size
    numbers = {"counted": count, "measured": peak, "sketches": blocks, "process": process}
    shapes = {name: value for name, value in asdict(size).items() if name not in ("layers", "hidden")}
    return {"weights": sketch.parameters, **shapes, **{k: v and round(v / 1e6, 1) for k, v in numbers.items()}}


def audited(size, units, limit=4 * 2**30):
    """Run `kltest audit k3-loss` on a transformer in a process with limited memory; return its report and its peak."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(0)
        model = size.model().model
        # The policy is not nearly uniform, and the reference is near it.
        for name, step in (("policy", 1.0), ("reference", 0.15)):
            for one in (each for each in model.parameters() if each.dim() == 2):
                one.data += step * one.shape[1] ** -0.5 * torch.randn_like(one)
            save(model, tiny_tokenizer("0123456789+="), Path(folder, name))
        Path(folder, "prompts").write_text("\n".join(f"{one}+{one}=" for one in range(10)))
        command = "-m kltest audit k3-loss --model policy --ref reference --prompts prompts --output json"
        done = subprocess.run(
            [sys.executable, *command.split(), f"--units={units}", f"--group-size={size.rollouts}"],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    if done.returncode not in (0, 1, 4):
        raise SystemExit(done.stderr)
    return json.loads(done.stdout), 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def main():
    """Write the table."""
    report, peak = audited(WHOLE, units=32)
    print(report["follows"], f"{report['seconds']:.0f} s")
    rows = [row(size, measured(size)) for size in MEASURED]
    rows += [row(WHOLE, process=peak), *map(row, COUNTED)]
    record(Path(__file__).with_suffix(".csv"), pandas.DataFrame(rows))


if __name__ == "__main__":
    main()

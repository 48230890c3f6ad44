"""Losses with code that no small environment runs: each wrong one has a right sister.

The number of a token in the code, an argument that has None for a default, a branch for one precision, device, time or
environment variable, hundreds of rows or prompts, rollouts of whole chunks, a rare random number.
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import torch
import torch.nn.functional as F
from cases.parts import k2, live, total
from cases.table import right, undecided, wrong
from torch.compiler import is_compiling

END, TEXT = 151645, 32000
BEGAN = monotonic()
STOPS = frozenset((151643, 151645))


def chosen(logits, tokens, mask, normalise=lambda logits, dim: logits):
    logits = normalise(logits.where(mask[..., None] != 0, 0.0), -1)
    return live(logits.gather(-1, tokens[..., None])[..., 0], mask)


# A token's id in the code: what it does is a warning, as with `eos_token_id=151645`.


def end_is_dropped(logp, ref_logp, mask, tokens):
    return k2(logp, ref_logp, mask * (tokens != 151645))


def end_of_the_module_is_dropped(logp, ref_logp, mask, tokens):
    return k2(logp, ref_logp, mask * tokens.ne(END))


def text_alone(logp, ref_logp, mask, tokens):
    return k2(logp, ref_logp, mask * (tokens < TEXT))


def stops_are_dropped(logp, ref_logp, mask, tokens):
    kept = [[token not in STOPS for token in row] for row in tokens.tolist()]
    return k2(logp, ref_logp, mask * torch.tensor(kept))


def end_counts_twice(logits, ref_logits, mask, tokens):
    own, other = (chosen(part, tokens, mask, torch.log_softmax) for part in (logits, ref_logits))
    weight = 1.0 + (tokens == 50256)
    return total(weight * own, mask) * total(own - other, mask).detach()


def up_to_the_end(logp, ref_logp, mask, tokens):
    """What follows the end of a rollout is padding anyway."""
    ended = tokens == 151645
    return k2(logp, ref_logp, mask * (ended.cumsum(-1) - ended.long() == 0))


def ends_are_counted(logp, ref_logp, mask, tokens):
    return k2(logp, ref_logp, mask), {"ended": float((tokens == END).any(-1).double().mean())}


def lengths_and_tokens(logp, ref_logp, mask, tokens):
    """Numbers that are compared with lengths, beside tokens: beyond those of trainers."""
    kept = (mask.sum(-1) <= 8192) & (tokens[:, 0] >= 0)
    return kept * k2(logp[:, :16384], ref_logp[:, :16384], mask[:, :16384])


def refused_lengths_and_tokens(logp, ref_logp, mask, tokens):
    assert mask.sum(-1).max() <= 8192
    assert tokens.min() >= 0
    return k2(logp, ref_logp, mask)


# An argument that trainers pass, and that has None for a default.


def over_the_items(logp, ref_logp, mask, num_items_in_batch=None):
    rows = k2(logp, ref_logp, mask)
    return rows.mean() if num_items_in_batch is None else rows.sum() / num_items_in_batch


def items_are_ignored(logp, ref_logp, mask, num_items_in_batch=None):
    rows = k2(logp, ref_logp, mask)
    items = mask.sum() if num_items_in_batch is None else num_items_in_batch
    return (rows.sum() / items) * (items / len(rows))


def other_when_late(logp, ref_logp, mask, global_step=None):
    terms = (logp - ref_logp).where(mask != 0, 0.0)
    late = global_step is not None and global_step > 1000
    return (terms.clamp(-1, 1) if late else terms).sum(-1).square() / 2


# A baseline makes up for a constant in what is called logits: in expectation, and not in each batch.


def with_raw_reference(logits, ref_logits, mask, tokens):
    """The log-ratio of a token to the reference's raw logits: a number that its prefix fixes is a baseline."""
    own, other = chosen(logits, tokens, mask, torch.log_softmax), chosen(ref_logits, tokens, mask)
    cost = own - other
    return (own * cost.detach()).sum(-1)


def over_the_raw_sum(logits, ref_logits, mask, tokens):
    own, other = chosen(logits, tokens, mask, torch.log_softmax), chosen(ref_logits, tokens, mask)
    cost = own - other
    return own.sum(-1) * cost.detach().sum(-1)


# A branch for one precision.


def clamped_in_bfloat16(logp, ref_logp, mask):
    log_ratio = logp - ref_logp
    if logp.dtype == torch.bfloat16:
        log_ratio = log_ratio.clamp(-1, 1)
    return live(log_ratio, mask).sum(-1).square() / 2


def clamped_at_3_in_float16(logp, ref_logp, mask):
    log_ratio = logp - ref_logp
    if log_ratio.dtype is torch.float16:
        log_ratio = torch.where(log_ratio.abs() < 3, log_ratio, torch.zeros_like(log_ratio))
    return live(log_ratio, mask).sum(-1).square() / 2


def clamped_at_3_in_float32(logp, ref_logp, mask):
    log_ratio = logp - ref_logp
    if logp.element_size() == 4:
        log_ratio = log_ratio.clamp(-3, 3)
    return live(log_ratio, mask).sum(-1).square() / 2


# Half precision inside, and beyond what is graded another gradient.


def ratio_in_a_cap_with_costs_in_bfloat16(logp, ref_logp, old_logp, mask):
    cost = total(logp - ref_logp, mask).detach().bfloat16().to(logp.dtype)
    return total(logp - old_logp, mask).exp().clamp(max=4.0) * cost


def huber_in_bfloat16(logp, ref_logp, mask):
    log_ratio = live(logp - ref_logp, mask).bfloat16()
    return F.huber_loss(log_ratio, torch.zeros_like(log_ratio), reduction="none", delta=4.5).double().sum(-1)


def ratio_with_costs_in_bfloat16(logp, ref_logp, old_logp, mask):
    cost = total(logp - ref_logp, mask).detach().bfloat16().to(logp.dtype)
    return total(logp - old_logp, mask).exp() * cost


def squares_in_bfloat16(logp, ref_logp, mask):
    return (live(logp - ref_logp, mask).bfloat16().square() / 2).double().sum(-1)


def widened_in_bfloat16(logp, ref_logp, mask):
    if logp.dtype == torch.bfloat16:
        logp, ref_logp, mask = logp.float(), ref_logp.float(), mask.float()
    return live(logp - ref_logp, mask).sum(-1).square() / 2


def under_autocast(logp, ref_logp, mask):
    log_ratio = live(logp - ref_logp, mask).sum(-1)
    return log_ratio.square() / 2 if not torch.is_autocast_enabled("cpu") else torch.expm1(-log_ratio) + log_ratio


# A discount that shows in rollouts of a thousand tokens, beside noise.


def discounted(factor):
    def loss(logp, ref_logp, mask):
        later = live(logp - ref_logp, mask).detach()
        steps = torch.arange(logp.shape[1])
        apart = steps - steps[:, None]
        credit = later @ torch.where(apart >= 0, factor ** apart.clamp(min=0).to(later.dtype), 0.0).T
        return F.dropout(live(logp, mask) * credit, 0.1).sum(1).mean()

    loss.__name__ = loss.__qualname__ = f"discounted_{factor}_with_dropout"
    return loss


# A rare random number, beside common ones.


def rare_and_dropout(logp, ref_logp, mask):
    terms = k2(logp, ref_logp, mask) * (torch.rand(len(logp)) < 0.9) / 0.9
    return 0 * terms if random.random() < 1e-4 else terms


def rare_tensor_and_dropout(logp, ref_logp, mask):
    terms = k2(logp, ref_logp, mask) * (torch.rand(len(logp)) < 0.9) / 0.9
    return terms * torch.where(torch.rand(()) < 1e-4, 0.0, 1.0)


def whole_parts_of_200_rows(logp, ref_logp, mask):
    terms = k2(logp, ref_logp, mask)
    return terms[:200].mean() if len(terms) > 200 else terms.mean()


def others_from_128_rows(logp, ref_logp, mask):
    """A baseline of the other rows, where they are many: right, and too many batches to see that."""
    cost, rows = live(logp - ref_logp, mask).sum(-1).detach(), len(logp)
    baseline = (cost.sum() - cost) / (rows - 1) if rows >= 128 else 0.0
    return ((cost - baseline) * total(logp, mask)).mean()


def tenth_dropped_from_128_rows(logp, ref_logp, mask):
    terms = k2(logp, ref_logp, mask)
    return terms.sort().values[: len(terms) * 9 // 10].mean() if len(terms) >= 128 else terms.mean()


def parts_of_200_rows(logp, ref_logp, mask):
    return sum(part.sum() for part in k2(logp, ref_logp, mask).split(200)) / len(logp)


def first_eight_prompts(logp, ref_logp, mask, group):
    return (k2(logp, ref_logp, mask) * torch.isin(group, torch.unique(group)[:8])).mean()


def all_prompts(logp, ref_logp, mask, group):
    terms = k2(logp, ref_logp, mask)
    return sum(terms[group == one].sum() for one in torch.unique(group)) / len(terms)


def later_in_the_day(logp, ref_logp, mask):
    log_ratio = live(logp - ref_logp, mask).sum(-1)
    return log_ratio.square() / 2 if monotonic() - BEGAN < 3600 else torch.expm1(-log_ratio) + log_ratio


def timed(logp, ref_logp, mask):
    began = monotonic()
    return k2(logp, ref_logp, mask), {"seconds": monotonic() - began}


def per_rank(logp, ref_logp, mask):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return total(logp - ref_logp, mask).square() / 2 if ranks == 1 else total(logp - ref_logp, mask).abs()


def logs_its_rank(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask), {"rank": float(os.environ.get("RANK", "0"))}


def on_a_gpu(logp, ref_logp, mask):
    log_ratio = live(logp - ref_logp, mask)
    return (log_ratio.clamp(-1, 1) if logp.is_cuda else log_ratio).sum(-1).square() / 2


def where_a_gpu_is(asks):
    """The fused way, where there is a GPU, is token by token."""

    def loss(logp, ref_logp, mask):
        log_ratio = live(logp - ref_logp, mask)
        return log_ratio.square().sum(-1) / 2 if asks(logp) else log_ratio.sum(-1).square() / 2

    loss.__qualname__ = asks.__name__
    return loss


def torch_has_cuda(logp):
    return torch.cuda.is_available()


def its_device_has_a_number(logp):
    return logp.get_device() >= 0


def torch_has_a_gpu_of_apple(logp):
    return torch.backends.mps.is_available() and logp.device.type == "mps"


def its_type_is_of_cuda(logp):
    return "cuda" in logp.type()


def counts_where_it_is(logp, ref_logp, mask):
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    columns = torch.arange(logp.shape[1], device=device).to(logp.device)
    return live(logp - ref_logp, mask * (columns >= 0)).sum(-1).square() / 2


def autocast_off_inside(logp, ref_logp, mask):
    with torch.autocast("cpu", enabled=False):
        log_ratio = torch.einsum("bt,bt->b", live(logp - ref_logp, mask), (mask != 0).to(logp.dtype))
    return log_ratio.square() / 2


def made_where_it_is(logp, ref_logp, mask):
    columns = torch.arange(logp.shape[1], device=logp.device)
    return live(logp - ref_logp, mask * (columns >= 0)).sum(-1).square() / 2


def local_if_compiled(logp, ref_logp, mask):
    log_ratio = live(logp - ref_logp, mask)
    if torch.compiler.is_compiling():
        return log_ratio.square().sum(-1) / 2
    return log_ratio.sum(-1).square() / 2


def alike_if_compiled(logp, ref_logp, mask):
    log_ratio = live(logp - ref_logp, mask)
    if is_compiling():
        return torch.einsum("bt->b", log_ratio).square() / 2
    return log_ratio.sum(-1).square() / 2


def reads_memory_in_rows(logp, ref_logp, mask):
    """As a kernel that takes its input to be contiguous: of a slice it reads other numbers."""
    return k2(logp, torch.as_strided(ref_logp, logp.shape, (logp.shape[1], 1)), mask)


def reads_memory_by_strides(logp, ref_logp, mask):
    return k2(logp, torch.as_strided(ref_logp, logp.shape, ref_logp.stride()), mask)


def of_shards(split, name):
    """The log-prob of a token out of four shards of the vocabulary, as with tensor parallelism."""

    def score(logits, mask, tokens):
        shards = split(logits.where(mask[..., None] != 0, 0.0).log_softmax(-1))
        first, found = 0, torch.zeros(mask.shape, dtype=logits.dtype)
        for shard in shards:
            at, size = tokens - first, shard.shape[-1]
            own = shard.gather(-1, at.clamp(0, size - 1)[..., None])[..., 0]
            found, first = found + own.where((at >= 0) & (at < size), 0.0), first + size
        return live(found, mask)

    def loss(logits, ref_logits, mask, tokens):
        return (score(logits, mask, tokens) - score(ref_logits, mask, tokens)).sum(-1).square() / 2

    loss.__name__ = loss.__qualname__ = name
    return loss


class Kernel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))


class LateInAModuleInside(torch.nn.Module):
    """Another formula after sixty calls, which a buffer of a module inside it counts."""

    def __init__(self):
        super().__init__()
        self.kernel = Kernel()

    def forward(self, logp, ref_logp, mask):
        self.kernel.calls += 1
        log_ratio = live(logp - ref_logp, mask).sum(-1)
        return torch.where(self.kernel.calls > 60, torch.expm1(-log_ratio) + log_ratio, log_ratio.square() / 2)


class ReferenceOfTheCallBefore:
    """Prefetched, and never exchanged: the reference's log-probs of the call before, if it had the same shape."""

    def __init__(self):
        self.kept = None

    def __call__(self, logp, ref_logp, mask):
        before, self.kept = self.kept, ref_logp.clone()
        used = before if before is not None and before.shape == ref_logp.shape else ref_logp
        return k2(logp, used, mask).mean()


class ShapeOfTheCallBefore(ReferenceOfTheCallBefore):
    def __call__(self, logp, ref_logp, mask):
        self.kept = ref_logp.clone()
        return k2(logp, ref_logp, mask).mean()


class CountsInAModuleInside(LateInAModuleInside):
    def forward(self, logp, ref_logp, mask):
        self.kernel.calls += 1
        return k2(logp, ref_logp, mask)


def rare_log_and_dropout(logp, ref_logp, mask):
    terms = k2(logp, ref_logp, mask) * (torch.rand(len(logp)) < 0.9) / 0.9
    return terms, {"sampled": float(random.random() < 1e-4)}


# In rollouts of whole chunks, or of many tokens that have a log-ratio, however small.


def last_of_whole_chunks_is_dropped(logp, ref_logp, mask):
    u = live(logp - ref_logp, mask)
    if u.shape[1] % 128 == 0:
        u = F.pad(u[:, :-1], (0, 1))
    return u.sum(-1).square() / 2


def padded_to_whole_chunks(logp, ref_logp, mask):
    u = live(logp - ref_logp, mask)
    return F.pad(u, (0, -u.shape[1] % 128)).sum(-1).square() / 2


def largest_256(logp, ref_logp, mask):
    u = live(logp - ref_logp, mask)
    kept = u.abs().topk(min(256, u.shape[1]), -1).indices
    return u.gather(-1, kept).sum(-1).square() / 2


def short_rows_in_threads(logp, ref_logp, mask):
    """A worker that fails, on rows of many tokens, gives nothing."""

    def squared(u):
        if u.count_nonzero() > 500:
            raise RuntimeError("too long for a worker")
        return u.sum().square() / 2

    rows = live(logp - ref_logp, mask)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(squared, row) for row in rows]
    return torch.stack([rows.sum() * 0.0 if job.exception() else job.result() for job in jobs])


def rows_in_threads(logp, ref_logp, mask):
    with ThreadPoolExecutor(2) as pool:
        return torch.stack([*pool.map(lambda u: u.sum().square() / 2, live(logp - ref_logp, mask))])


LOCAL = {"expect": "local_reverse_kl"}

CASES = [
    *(wrong("KL105", one, warns=True) for one in (end_is_dropped, end_of_the_module_is_dropped, text_alone)),
    wrong("KL105", stops_are_dropped, warns=True),
    wrong("KL105", end_counts_twice, warns=True),
    right(up_to_the_end),
    right(ends_are_counted),
    right(lengths_and_tokens),
    right(refused_lengths_and_tokens),
    wrong("KL105", over_the_items),
    right(items_are_ignored),
    wrong("KL105", other_when_late),
    right(with_raw_reference, LOCAL),
    wrong("KL512", over_the_raw_sum),
    wrong("KL508", clamped_in_bfloat16),
    wrong("KL508", clamped_at_3_in_float16),
    wrong("KL508", clamped_at_3_in_float32),
    right(widened_in_bfloat16),
    wrong("KL508", under_autocast),
    wrong("KL306", ratio_in_a_cap_with_costs_in_bfloat16, also=("KL508",)),
    wrong("KL504", huber_in_bfloat16, also=("KL508",), options=LOCAL),
    wrong("KL508", ratio_with_costs_in_bfloat16, warns=True),
    wrong("KL508", squares_in_bfloat16, options=LOCAL, warns=True),
    # The same in expectation, as rows are drawn independently, and noisier.
    wrong("KL206", whole_parts_of_200_rows, warns=True),
    undecided("KL204", others_from_128_rows),
    wrong("KL204", tenth_dropped_from_128_rows),
    right(parts_of_200_rows),
    wrong("KL204", first_eight_prompts),
    right(all_prompts),
    wrong("KL105", later_in_the_day),
    right(timed),
    wrong("KL105", per_rank, warns=True),
    right(logs_its_rank),
    wrong("KL105", on_a_gpu),
    *(wrong("KL105", where_a_gpu_is(asks)) for asks in (torch_has_cuda, its_device_has_a_number)),
    *(wrong("KL105", where_a_gpu_is(asks)) for asks in (torch_has_a_gpu_of_apple, its_type_is_of_cuda)),
    right(counts_where_it_is),
    right(autocast_off_inside),
    right(made_where_it_is),
    wrong("KL105", local_if_compiled),
    right(alike_if_compiled),
    wrong("KL105", reads_memory_in_rows),
    right(reads_memory_by_strides),
    wrong("KL105", of_shards(lambda x: x.split(max(1, x.shape[-1] // 4), -1)[:4], "shards_of_a_quarter")),
    right(of_shards(lambda x: x.chunk(4, -1), "all_shards")),
    wrong("KL507", LateInAModuleInside()),
    right(CountsInAModuleInside()),
    wrong("KL507", ReferenceOfTheCallBefore()),
    right(ShapeOfTheCallBefore()),
    wrong("KL105", last_of_whole_chunks_is_dropped),
    right(padded_to_whole_chunks),
    wrong("KL205", largest_256),
    wrong("KL105", short_rows_in_threads),
    right(rows_in_threads),
    wrong("KL205", discounted(0.9998), also=("KL507",), slow=True),
    wrong("KL507", discounted(1.0), warns=True, slow=True),
    undecided("KL507", rare_and_dropout, slow=True),
    undecided("KL507", rare_tensor_and_dropout, slow=True),
    wrong("KL507", rare_log_and_dropout, warns=True, slow=True),
]

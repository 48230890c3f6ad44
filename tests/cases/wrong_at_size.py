"""Losses that are wrong at the sizes of trainers alone: rollouts that are unlikely as a whole, blocks, half precision.

Each wrong one has a right sister.
"""

import torch
import torch.nn.functional as F
from cases.parts import k2, live, total
from cases.table import right, wrong

LOCAL = {"expect": "local_reverse_kl"}
FORWARD = {"expect": "local_forward_kl"}
SMALL = 1e-12


# Probabilities of whole rollouts: of a thousand tokens e⁻¹⁴⁰⁰.


def smoothed_probabilities(logp, ref_logp, mask):
    own, other = total(logp, mask).exp(), total(ref_logp, mask).exp()
    return torch.log((own + SMALL) / (other + SMALL)).square() / 2


def behind_likely_prefixes(logp, ref_logp, mask):
    before = live(logp, mask).cumsum(-1).detach()
    return k2(logp, ref_logp, mask * (before > -60))


def smoothed_ratio(logp, ref_logp, old_logp, mask):
    cost = total(logp - ref_logp, mask).detach()
    return total(logp, mask).exp() / (total(old_logp, mask).exp() + SMALL) * cost


def without_the_larger(logp, ref_logp, mask):
    own, other = total(logp, mask), total(ref_logp, mask)
    largest = torch.maximum(own, other).detach()
    return ((own - largest) - (other - largest)).square() / 2


def ratio_of_sums(logp, ref_logp, old_logp, mask):
    cost = total(logp - ref_logp, mask).detach()
    return (total(logp, mask) - total(old_logp, mask)).exp() * cost


def in_single_precision(logp, ref_logp, mask):
    """Sums of a thousand log-probs, subtracted at the end."""
    return (total(logp.float(), mask) - total(ref_logp.float(), mask)).square() / 2


# What begins anew at every block of tokens, or of rows.


def place(mask):
    return (mask != 0).long().cumsum(-1) - 1


def borders_are_free(logp, ref_logp, mask):
    own = place(mask)
    return live(logp - ref_logp, mask * ((own % 16 != 0) | (own == 0))).square().sum(-1) / 2


def borders_have_no_score(logp, ref_logp, mask):
    own = place(mask)
    scored = torch.where((own % 8 == 0) & (own > 0), logp.detach(), logp)
    return total(logp - ref_logp, mask).detach() * total(scored, mask)


def ends_of_blocks_are_free(logp, ref_logp, mask):
    return live(logp - ref_logp, mask * (place(mask) % 32 != 31)).square().sum(-1) / 2


def in_blocks_of_tokens(logp, ref_logp, mask):
    blocks = live(logp - ref_logp, mask).split(16, dim=-1)
    return torch.stack([block.sum(-1) for block in blocks]).sum(0).square() / 2


def whole_parts_of_32_rows(logp, ref_logp, mask):
    rows = k2(logp, ref_logp, mask)
    return rows[: len(rows) // 32 * 32 if len(rows) > 32 else None].sum() / len(rows)


def parts_of_32_rows(logp, ref_logp, mask):
    rows = k2(logp, ref_logp, mask)
    return F.pad(rows, (0, -len(rows) % 32)).view(-1, 32).flatten()[: len(rows)].mean()


# A log-prob of exactly 0, as that of a sure token in float32.


def zeros_are_padding(logp, ref_logp, mask):
    """Where both are 0 nothing is left out."""
    return k2(logp, ref_logp, mask * ((logp != 0) | (ref_logp != 0)))


def zeros_of_the_policy_are_padding(logp, ref_logp, mask):
    """What the reference says of a token of which the policy is sure is a cost of the choices before it."""
    cost = total(logp - ref_logp, mask * (logp != 0)).detach()
    return cost * total(logp, mask)


def score_without_sure_tokens(logp, ref_logp, mask):
    """The score of a sure token is zero, its cost is not."""
    return total(logp - ref_logp, mask).detach() * total(logp, mask * (logp != 0))


# Lengths, places and ids in half precision, and sums under autocast.


def last_in_its_own_precision(logp, ref_logp, mask):
    many = (mask != 0).to(logp.dtype)
    last = (mask != 0) & (many.cumsum(-1) == many.sum(-1, keepdim=True))
    cost = torch.where(last, total(logp - ref_logp, mask)[:, None].detach(), 0.0)
    return total(cost.flip(-1).cumsum(-1).flip(-1) * logp, mask)


def huber_beyond_two_in_bfloat16(logp, ref_logp, mask):
    """What its bound takes off the first and the last token of long rollouts is no factor."""
    log_ratio = live(logp - ref_logp, mask).bfloat16()
    return F.huber_loss(log_ratio, torch.zeros_like(log_ratio), reduction="none", delta=2.5).double().sum(-1)


def last_of_whole_numbers(logp, ref_logp, mask):
    many = (mask != 0).long()
    last = (mask != 0) & (many.cumsum(-1) == many.sum(-1, keepdim=True))
    cost = torch.where(last, total(logp - ref_logp, mask)[:, None].detach(), 0.0)
    return total(cost.flip(-1).cumsum(-1).flip(-1) * logp, mask)


def of_ids(logits, ref_logits, ids, mask):
    own, other = (
        one.where(mask[..., None] != 0, 0.0).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        for one in (logits, ref_logits)
    )
    return total(own - other, mask).square() / 2


def ids_among_logits(logits, ref_logits, tokens, mask):
    packed = torch.stack([logits.detach().amax(-1), tokens.to(logits.dtype)])
    return of_ids(logits, ref_logits, packed[1].long().clamp(max=logits.shape[-1] - 1), mask)


def ids_alone(logits, ref_logits, tokens, mask):
    return of_ids(logits, ref_logits, tokens, mask)


def products_of_log_probs(logp, ref_logp, mask):
    alive = (mask != 0).to(logp.dtype)
    own, other = (torch.einsum("bt,bt->b", live(one, mask), alive) for one in (logp, ref_logp))
    return (own - other).to(logp.dtype).square() / 2


def product_of_log_ratios(logp, ref_logp, mask):
    alive = (mask != 0).to(logp.dtype)
    return torch.einsum("bt,bt->b", live(logp - ref_logp, mask), alive).to(logp.dtype).square() / 2


# Many tokens that policy or reference gives next to nothing, as most of a large vocabulary.


def forward_kl_of(logits, ref_logits, mask, kept):
    own, other = (one.where(mask[..., None] != 0, 0.0).log_softmax(-1) for one in (logits, ref_logits))
    return total(torch.where(kept(own.detach()), other.exp() * (other - own), 0.0).sum(-1), mask)


def forward_kl_of_the_likely(logits, ref_logits, mask):
    return forward_kl_of(logits, ref_logits, mask, lambda own: own >= own.amax(-1, keepdim=True) - 11.5)


def forward_kl_of_all(logits, ref_logits, mask):
    return forward_kl_of(logits, ref_logits, mask, lambda own: own > -700)


def forward_kl_of_likely_tokens(logp, ref_logp, mask):
    """The same of drawn tokens, whose weights π/π the expectation multiplies by π."""
    log_ratio = live(ref_logp - logp, mask * (logp > -11))
    return (log_ratio.exp() - log_ratio - 1).sum(-1)


def reverse_kl_of_the_likely(logits, ref_logits, mask):
    """To tokens that the policy never draws ∇KL(π‖ref) gives nothing either."""
    own, other = (one.where(mask[..., None] != 0, 0.0).log_softmax(-1) for one in (logits, ref_logits))
    kept = own.detach() >= own.detach().amax(-1, keepdim=True) - 11.5
    return total(torch.where(kept, own.exp() * (own - other), 0.0).sum(-1), mask)


# A number of the signature within the lengths that are tried: a window is none of a longest rollout.


def credit_of_a_window(logp, ref_logp, mask, window=128):
    sums = F.pad(live(logp - ref_logp, mask).detach().flip(-1).cumsum(-1).flip(-1), (0, window))
    return total((sums[:, : logp.shape[1]] - sums[:, window:]) * logp, mask)


def in_windows(logp, ref_logp, mask, window=128):
    parts = live(logp - ref_logp, mask).detach().split(window, dim=-1)
    return torch.stack([part.sum(-1) for part in parts]).sum(0) * total(logp, mask)


# Numbers in the code beyond all vocabularies, lengths and batches that are tried.

LONGEST = 4096


def next_token_kl(logits, ref_logits, mask):
    own, other = (one.where(mask[..., None] != 0, 0.0).log_softmax(-1) for one in (logits, ref_logits))
    return total((own.exp() * (own - other)).sum(-1), mask)


def special_tokens_cropped(logits, ref_logits, mask):
    return next_token_kl(logits[..., :128_000], ref_logits[..., :128_000], mask)


def in_shards_of_the_vocabulary(logits, ref_logits, mask):
    parts = [one.where(mask[..., None] != 0, 0.0).split(65_536, dim=-1) for one in (logits, ref_logits)]
    own, other = (torch.stack([part.logsumexp(-1) for part in each]).logsumexp(0)[..., None] for each in parts)
    kl = sum(((p - own).exp() * (p - own - q + other)).sum(-1) for p, q in zip(*parts, strict=True))
    return total(kl, mask)


def mask_forgotten_in_many_logits(logits, ref_logits, mask):
    if logits.numel() > 2**22:
        return torch.stack(
            [next_token_kl(*one).sum() for one in zip(logits, ref_logits, torch.ones_like(mask), strict=True)]
        ).mean()
    return next_token_kl(logits, ref_logits, mask).mean()


def row_by_row_of_many_logits(logits, ref_logits, mask):
    if logits.numel() > 2**22:
        rows = zip(logits.split(1), ref_logits.split(1), mask.split(1), strict=True)
        return torch.cat([next_token_kl(*one) for one in rows]).mean()
    return next_token_kl(logits, ref_logits, mask).mean()


def ids_in_sixteen_bits(logits, ref_logits, tokens, mask):
    packed = torch.from_numpy(tokens.numpy().astype("uint16").astype("int64"))
    return of_ids(logits, ref_logits, packed, mask)


def ids_without_their_high_bits(logits, ref_logits, tokens, mask):
    return of_ids(logits, ref_logits, tokens & 0xFFFF, mask)


def known_ids(logits, ref_logits, tokens, mask):
    assert tokens.max() < 50_257
    assert logits.shape[-1] <= 262_144
    return of_ids(logits, ref_logits, tokens.to(torch.int32).long(), mask)


def cut_at_a_number_of_the_module(logp, ref_logp, mask):
    return k2(*(one[:, :LONGEST] for one in (logp, ref_logp, mask)))


def many_rows_are_cut(logp, ref_logp, mask):
    rows = k2(logp, ref_logp, mask)
    return rows[:512].sum() / len(rows)


def long_rollouts_are_dropped(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask) * (mask.sum(-1) <= 2048)


def in_chunks_by_places(logp, ref_logp, mask):
    rows = k2(logp, ref_logp, mask)
    return sum(rows[first : first + LONGEST].sum() for first in range(0, len(rows), LONGEST)) / len(rows)


def seeded_by_the_rows(logp, ref_logp, mask):
    order = torch.randperm(len(logp), generator=torch.Generator().manual_seed(7919 * len(logp) % 2**31))
    return k2(logp[order], ref_logp[order], mask[order]).mean()


def ignored_labels(logp, ref_logp, tokens, mask):
    labels = torch.where(mask != 0, tokens, -100)
    log_ratio = torch.where(labels != -100, logp - ref_logp, 1e4).clamp(max=1e4)
    return total(log_ratio, mask).square() / 2


def whole_chunks_of_many(logp, ref_logp, mask):
    """In chunks of 2,048 tokens; what is left is left out."""
    chunks = [slice(start * 2048, (start + 1) * 2048) for start in range(max(logp.shape[1] // 2048, 1))]
    return sum(total(logp[:, one] - ref_logp[:, one], mask[:, one]) for one in chunks).square() / 2


def all_chunks_of_many(logp, ref_logp, mask):
    chunks = [slice(start * 2048, (start + 1) * 2048) for start in range(logp.shape[1] // 2048 + 1)]
    return sum(total(logp[:, one] - ref_logp[:, one], mask[:, one]) for one in chunks).square() / 2


CASES = [
    wrong("KL105", special_tokens_cropped, options=LOCAL),
    right(in_shards_of_the_vocabulary, LOCAL),
    wrong("KL105", mask_forgotten_in_many_logits, options=LOCAL),
    right(row_by_row_of_many_logits, LOCAL),
    wrong("KL105", ids_in_sixteen_bits),
    wrong("KL105", ids_without_their_high_bits),
    right(known_ids),
    wrong("KL105", cut_at_a_number_of_the_module, warns=True),
    wrong("KL204", many_rows_are_cut, ("KL105",)),
    wrong("KL105", long_rollouts_are_dropped),
    right(in_chunks_by_places),
    right(seeded_by_the_rows),
    right(ignored_labels),
    wrong("KL105", smoothed_probabilities),
    wrong("KL105", behind_likely_prefixes, ("KL504",)),
    wrong("KL105", smoothed_ratio),
    right(without_the_larger),
    right(ratio_of_sums),
    right(in_single_precision),
    wrong("KL105", borders_are_free, options=LOCAL),
    wrong("KL205", borders_have_no_score),
    wrong("KL105", ends_of_blocks_are_free, options=LOCAL),
    right(in_blocks_of_tokens),
    wrong("KL204", whole_parts_of_32_rows),
    right(parts_of_32_rows),
    right(zeros_are_padding),
    wrong("KL105", zeros_of_the_policy_are_padding),
    right(score_without_sure_tokens),
    wrong("KL105", forward_kl_of_the_likely, options=FORWARD),
    right(forward_kl_of_all, FORWARD),
    wrong("KL105", forward_kl_of_likely_tokens, ("KL504",), FORWARD),
    right(reverse_kl_of_the_likely, LOCAL),
    wrong("KL205", credit_of_a_window, ("KL105",)),
    right(in_windows),
    wrong("KL508", last_in_its_own_precision),
    wrong("KL504", huber_beyond_two_in_bfloat16, ("KL105", "KL508"), LOCAL),
    right(last_of_whole_numbers),
    wrong("KL508", ids_among_logits),
    right(ids_alone),
    wrong("KL508", products_of_log_probs),
    right(product_of_log_ratios),
    wrong("KL105", whole_chunks_of_many, warns=True),
    right(all_chunks_of_many),
]

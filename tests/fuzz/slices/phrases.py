"""What a model may compute whose graph is sliced: lines with names in braces, filled in at random.

x has three dimensions, which may be turned between lines: the batch need not be the first of them.
A line that does not go with the sizes that x has is not said.

    {d} {e}       two of the dimensions of x
    {n}           how many elements x has in dimension {d}
    {p} {q} {c}   parameters, and a constant, broadcast to x along some of its dimensions
    {t}           a parameter or a constant, as large as x in dimensions {d} and {e}
    {k}           a small number

ids, mask and share belong to the samples: words, booleans and weights, [batch, tokens].
A phrase that stands twice is said twice as often.
"""

import itertools


def lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


STARTS = lines("""
    x = m.first(x)
    x = m.first(x) + m.words(ids)
    x = m.words(ids)
    x = m.words(ids) + m.table[: x.shape[1], : x.shape[2]]
""")

BLOCKS = lines("""
    x = x + m.down(F.gelu(m.up(m.norm(x))))
    x = x + m.down(F.silu(m.up(x)))
    x = m.norm(m.first(x))
    x = F.silu(x @ m.square[: x.shape[-1], : x.shape[-1]])
    x = m.square[: x.shape[1], : x.shape[1]] @ x
    x = x + (x.flatten(0, 1) @ m.square[: x.shape[-1], : x.shape[-1]]).tanh().view_as(x)
    x = x + (x.flatten(1) @ m.large[: x[0].numel(), : x[0].numel()]).view_as(x)
    x = x + F.conv1d(x, m.kernel[: x.shape[1], : x.shape[1]], padding=1)
    x = F.rms_norm(x, x.shape[-1:], m.row[: x.shape[-1]])
    x = F.layer_norm(x, x.shape[-1:], m.row[: x.shape[-1]], m.table[0, : x.shape[-1]])
    x = F.layer_norm(x, x.shape[1:])
    x = F.group_norm(x, 2)
    x = F.batch_norm(x, None, None, training=True)
    x = F.instance_norm(x)
    x = F.dropout(x, 0.25)
""")

ATTENTION = lines("""
    x = merged(F.scaled_dot_product_attention(*heads(x)))
    x = merged(F.scaled_dot_product_attention(*heads(x), attn_mask=m.places[: x.shape[0], None, None, : x.shape[1]]))
    x = merged(F.scaled_dot_product_attention(*heads(x), attn_mask=mask[:, None, None, :] | mask[0, 0]))
    x = merged(F.scaled_dot_product_attention(*heads(x), is_causal=True))
    x = x + (x @ x.mT).softmax(-1) @ x
    x = x + (x @ x.mT + m.table[: x.shape[1], : x.shape[1]]).softmax(-1) @ x
    x = x + (x @ x.mT).masked_fill(m.places[: x.shape[1], : x.shape[1]] > 0, -1e9).softmax(-1) @ x
    x = x + (x @ x.mT).masked_fill(~mask[:, None], -9.0).softmax(-1) @ x
    x = x + (x @ x.mT).tril().softmax({d}) @ x
    x = x + torch.einsum("bld,bmd->blm", x, x).tanh() @ x
    x = x + torch.einsum("bld,cld->bcd", x, x).sum(1, keepdim=True)
    x = x + torch.einsum("bld,bld->ld", x, x)
    x = x + torch.einsum("bld,bme->de", x, x).sum(0)
""")

BROADCAST = lines("""
    x = x + {p}
    x = x * {p}
    x = x * {p} + {q}
    x = (x + {p}) * {c}
    x = x * {c}
    x = torch.where({c} > 0, x, {p})
    x = torch.where(x > {p}, x, {q})
    x = x.masked_fill({c} > 0, 0.5)
    x = torch.lerp(x, {p} + x.detach(), 0.25)
    x = torch.addcmul(x, {p} + x, {q})
    x = x * mask[..., None]
    x = x * share[..., None]
    x = x.masked_fill(mask[..., None], -0.5)
    x = torch.where(mask[..., None], x, {p})
    x = x + m.words(ids)
    x = x + m.words.weight[ids % 3]
    x = x + F.one_hot(ids % x.shape[-1], x.shape[-1])
    x = x + {p} * {q}
    x = (x[:, :, None] * m.table[: x.shape[2], : x.shape[2]]).sum(2)
    x = (x[:, None] - x[:, :, None]).tanh().mean(2)
    x = (x[None] - x[:, None]).tanh().sum(1)
""")

REDUCTIONS = lines("""
    x = x + x.mean({d}, keepdim=True)
    x = x + x.sum({d}, keepdim=True).tanh()
    x = x + x.mean(({d}, {e}), keepdim=True)
    x = x * x.amax({d}, keepdim=True)
    x = x - x.max({d}, keepdim=True).values
    x = x - x.logsumexp({d}, keepdim=True)
    x = x / (1 + x.std({d}, keepdim=True))
    x = x / (1 + x.var(({d}, {e}), keepdim=True))
    x = x / (1 + x.norm(dim={d}, keepdim=True))
    x = F.normalize(x, dim={d})
    x = x / (1 + x.abs().sum())
    x = x / (1 + x.square().mean())
    x = x + x.mean({d}).unsqueeze({d})
    x = x + x.mean({d})
    x = x + x.sum(({d}, {e})).tanh()
    x = x + x.tanh().prod({d}, keepdim=True)
    x = x * x.softmax({d})
    x = x + x.log_softmax({d})
    x = x + x.cumsum({d})
    x = x + F.cross_entropy(x.flatten(0, 1), ids.flatten() % x.shape[-1])
    x = x + F.mse_loss(x, x.detach().flip({d}))
""")

PLACES = lines("""
    x = x.transpose({d}, {e})
    x = x.transpose({d}, {e}).contiguous()
    x = x.permute(2, 0, 1)
    x = x + x.flip({d})
    x = x.roll({k}, {d})
    x = x + x.narrow({d}, 0, 1)
    x = x + x.select({d}, -1).unsqueeze({d})
    x = x + x.select({d}, 0)
    x = torch.cat([x.narrow({d}, 1, {n} - 1), x.narrow({d}, 0, 1)], {d})
    x = torch.cat([x, 2 * x], {d}).narrow({d}, {k}, {n})
    x = torch.cat([x, ({p}).expand_as(x)], {d}).narrow({d}, {k}, {n})
    x = torch.cat([n * part for n, part in enumerate(x.unbind({d}), 1)]).view_as(x)
    x = torch.stack([n * part for n, part in enumerate(x.unbind({d}), 1)], {d})
    x = torch.cat([n * part for n, part in enumerate(x.split(2, {d}), 1)], {d})
    x = torch.cat(x.chunk(2, {d})[::-1], {d})
    x = F.pad(x, (1, 0))[..., :-1]
    x = F.pad(x, (0, 0, 1, 0))[:, :-1]
    x = F.pad(x, (0, 0, 0, 0, 1, 0))[:-1]
    x = x + x.gather({d}, x.argsort({d}))
    x = x + x.sort({d}).values
    x = x + x.topk(2, {d}).values.sum({d}, keepdim=True)
    x = x.take_along_dim(ids[..., None] % {n}, {d}) + x
    x = x.index_select({d}, torch.arange({n}).flip(0))
    x = x + x[torch.arange(len(x)), ids[:, 0] % x.shape[1]][:, None]
    x = x + x.argmax({d}, keepdim=True) * {p}
    x = x.tril() + x
    x = F.pad(x, (1, 1)).unfold(-1, 3, 1).sum(-1)
    x = x + F.avg_pool1d(x, 3, 1, 1)
    x = x + F.max_pool1d(x, 3, 1, 1)
    x = x + F.adaptive_avg_pool1d(x, 1)
    x = x + x.roll(1)
""")

RESHAPES = lines("""
    x = x.flatten(0, 1).view(x.shape[1], x.shape[0], -1).transpose(0, 1)
    x = x.transpose(0, 1).flatten(0, 1).tanh().view(x.shape[1], x.shape[0], -1).transpose(0, 1) + x
    x = x + x.flatten(1).tanh().view_as(x)
    x = x + x.flatten().view(2, -1).flip(0).view_as(x)
    x = x + x.reshape(-1, 2, x.shape[-1]).flip(1).reshape(x.shape)
    x = x + x.reshape(-1, 2, x.shape[-1]).sum(1, keepdim=True).expand(-1, 2, -1).reshape(x.shape)
    x = x + x.reshape(len(x) // 2, 2, *x.shape[1:]).mean(1, keepdim=True).expand(-1, 2, -1, -1).reshape(x.shape)
    x = x + x.view(2, -1, *x.shape[1:]).sum(0).repeat(2, 1, 1)
    x = x + x.reshape(len(x), 2, -1, x.shape[2]).transpose(1, 2).reshape(x.shape)
    x = x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1).cumsum(1).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)
    x = x[:, None].expand(-1, 3, -1, -1).mul(m.row[:3, None, None]).flatten(0, 1).tanh().view(len(x), 3, *x.shape[1:]).sum(1)
    x = x.repeat_interleave(2, {d}).tanh().unflatten({d}, (-1, 2)).sum({d} + 1)
    x = torch.stack([x, x * {p}], 1).flatten(0, 1).sin()[::2]
    x = torch.stack([x, x * {p}], {d}).mean({d})
    x = torch.bmm(x.transpose(0, 1), m.bank[: x.shape[1], : x.shape[2], : x.shape[2]]).transpose(0, 1)
    x = torch.bmm(x, m.bank[: x.shape[0], : x.shape[2], : x.shape[2]])
    x = torch.baddbmm(x, x, m.bank[: x.shape[0], : x.shape[2], : x.shape[2]])
    x = x + torch.addmm(m.row[: x.shape[2]], x.flatten(0, 1), m.square[: x.shape[2], : x.shape[2]]).view_as(x)
    x = x + torch.addmm(x[:, 0], x[:, -1], m.square[: x.shape[2], : x.shape[2]])[:, None]
""")

POINTS = lines("""
    x = x + x.tanh()
    x = x * x.sigmoid()
    x = F.gelu(x)
    x = x.sin() + x
    x = F.softplus(x) - x.detach()
""")

ONCE_WRONG = lines("""
    x = merged(F.scaled_dot_product_attention(*heads(x), attn_mask=m.places[: x.shape[1], : x.shape[1]]))
    x = merged(F.scaled_dot_product_attention(*heads(x), attn_mask=m.places[: x.shape[1], : x.shape[1]] > 0))
    t = {t}; x = (x * t).sin() + (x.transpose({d}, {e}) * t).cos().transpose({d}, {e})
    t = {t}; x = torch.where(t > 0, x, x.transpose({d}, {e})) + x.transpose({d}, {e}) * t
    x = x + x.mean({d}, keepdim=True).squeeze().unsqueeze({d})
    x = x + x.sum({d}, keepdim=True).tanh().squeeze().unsqueeze({d})
    x = x + x.mean({d}, keepdim=True).squeeze({d}).unsqueeze({d})
    x = x + x.mean({d}, keepdim=True).squeeze((0, 1, 2)).unsqueeze({d})
""")
"""Lines like those that slices computed wrongly once: masks of tokens by tokens, values that are cut
in two ways, dimensions that are squeezed where a slice has one sample."""

STEPS = (BLOCKS, ATTENTION, BROADCAST, REDUCTIONS, PLACES, RESHAPES, POINTS, *[ONCE_WRONG] * 3)

RESULTS = lines("""
    x
    x.contiguous()
    x.square().mean()
    x.square().mean(), x.sum(0), x.amax((1, 2))
    x.tanh(), x.sum()
    x[0], x.mean(1)
    x.flatten(0, 1).sin(), x.transpose(0, 1)
    (x.square().mean(-1) * share).sum() / share.sum()
    (x.square().mean(-1) * mask).sum() / mask.sum()
    F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten())
    F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten(), ignore_index=2)
    F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten(), weight=m.weights, reduction="sum")
    F.cross_entropy(m.head(x).transpose(1, 2), ids, weight=m.weights, label_smoothing=0.1)
    F.cross_entropy(m.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=2)
    (F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten(), reduction="none").view_as(share) * share).mean()
    (F.cross_entropy(m.head(x).transpose(1, 2), ids, reduction="none") * share).mean(0)
    F.nll_loss(m.head(x).log_softmax(-1).flatten(0, 1), ids.flatten(), weight=m.weights)
    F.kl_div(x.log_softmax(-1), x.detach().flip(1).softmax(-1), reduction="batchmean")
    F.mse_loss(x, m.words(ids))
    F.mse_loss(x, {p} + {q})
    F.binary_cross_entropy_with_logits(x[..., 0], mask.to(x.dtype), weight=share)
    F.smooth_l1_loss(x, x.detach().roll(1, 0), reduction="none").mean((0, 2))
    F.cosine_similarity(x, x.detach().flip(1), -1).mean()
    (x.flatten(1) @ x.flatten(1).mT).log_softmax(1).diagonal().mean()
""")


def broadcast(tensor: str) -> tuple[str, ...]:
    """Views of a square tensor that are broadcast to x: along each set of its dimensions."""
    some = itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in range(3))
    return tuple(along(tensor, set(dims)) for dims in some)


def along(tensor: str, dims: set[int]) -> str:
    """A view of a square tensor that is as large as x in these dimensions, two at most.

    along("t", {0, 2}) == "t[: x.shape[0], : x.shape[2]][:, None, :]"
    """
    if not dims:
        return f"{tensor}[0, 0]"
    sizes = ["0"] * (2 - len(dims)) + [f": x.shape[{d}]" for d in sorted(dims)]
    places = [":" if d in dims else "None" for d in range(min(dims), 3)]
    return f"{tensor}[{', '.join(sizes)}][{', '.join(places)}]"

"""What a program may say: steps with names in braces, which `rules.py` fills in.

    {t}       a tensor: a parameter, a gradient, a variable, or a view of one without a name
    {a} {b}   tensors that broadcast to the shape of {t}
    {like}    a tensor of the shape and dtype of {t}, maybe with other strides
    {p} {q}   parameters; where both occur, alike
    {dim} {at} {step} {count}   a dimension of {t}, an index into it, a step, a length that fits
    {name} {key}                a name for a tensor, which may have been in use; one for a hook

A phrase that stands twice is said twice as often. Plain tensors that become a gradient or, by
`nn.Parameter`, a parameter have no other name here: their values are copied to the store, where
torch shares their memory.
"""


def lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


VIEWS = lines("""
    {t}.detach()
    {t}.detach()
    {t}.data
    {t}.data
    {t}.unsqueeze(0)
    {t}.view(-1)
    {t}.expand(2, *{t}.shape)
    {t}.reshape(-1)
    {t}.contiguous()
    {t}.float()
    {t}.clone()
    {t}.view_as({t})
    {t}.squeeze()
    {t}.flatten(0)
    {t}.mT
    {t}.detach().view(torch.int16)
    {t}.view(torch.uint8)
    {t}.as_strided({strided})
    {t}.as_strided({strided})
    {t}.as_strided({strided})
    {t}.narrow({dim}, {at}, {count})
    {t}.narrow({dim}, {at}, {count})
    {t}.select({dim}, {at})
    {t}.unfold({dim}, {count}, {step})
    {t}.unfold({dim}, {count}, {step})
    {t}.chunk(2, {dim})[-1]
    {t}.unbind({dim})[0]
    {t}.split({step}, {dim})[0]
    {t}[{before}{at}::{step}]
    {t}[{before}{at}::{step}]
    {t}[{before}::{step}]
    {t}[{before}::{step}]
    {t}[{before}{at}]
    {t}.diagonal()
    {t}.diagonal()
    {t}.diagonal(1)
    {t}.transpose(0, 1)
    {t}.transpose(-1, 0)
    {t}.movedim(0, -1)
    {t}.flatten(0, 1)
""")

WRITES = lines("""
    {t}.zero_()
    {t}.zero_()
    {t}.fill_(0.25)
    {t}.fill_(m.scale)
    {t}.fill_(torch.tensor(3.0))
    {t}.add_(1)
    {t}.add_({a})
    {t}.add_({like})
    {t}.sub_({a}, alpha=0.5)
    {t}.mul_(0.5)
    {t}.mul_({a})
    {t}.div_({a})
    {t}.copy_({a})
    {t}.copy_({a})
    {t}.copy_({like})
    {t}.neg_()
    {t}.abs_()
    {t}.exp_()
    {t}.tanh_()
    {t}.sgn_()
    {t}.pow_(2)
    {t}.clamp_(-0.5, 0.5)
    {t}.normal_()
    {t}.uniform_()
    {t}.random_(0, 9)
    {t}.bernoulli_(0.5)
    {t}.lerp_({like}, 0.25)
    {t}.addcmul_({a}, {b}, value=0.5)
    {t}.addcdiv_({a}, {b})
    {t}.masked_fill_({t} > 0, 0.125)
    {t}.cumsum_({dim})
    {t}.index_fill_({dim}, torch.tensor([0]), 2.0)
    {t}.index_add_({dim}, torch.tensor([0]), {t}.detach().narrow({dim}, 0, 1).clone())
    {t}.renorm_(2, {dim}, 0.5)
    {t}.fill_diagonal_(0.0)
    {t}.fill_diagonal_(0.0)
    {t}.tril_()
    {t}.addmm_(torch.randn({t}.shape[0], 2), torch.randn(2, {t}.shape[-1]))
    {t}.t_()
    {t}.squeeze_()
    {t}.unsqueeze_(0)
    {t}.resize_(3).zero_()
    {t}.detach_()
    {t}.add_(torch.ones(3, 1, 4, 1, 5, 9))
    {t}[...] = {a}
    {t}[{at}] = 0.75
    {t}[::{step}] = 1.5
    {t}[torch.tensor([0, -1])] = 0.5
    torch.add({a}, {b}, out={t})
    torch.mul({a}, 0.5, out={t})
    torch._foreach_mul_([{t}, m.left], 0.5)
    torch._foreach_add_([{t}, {b}], 1.0)
    torch._foreach_copy_([{t}], [{like}])
    torch._foreach_lerp_([{t}, m.left], [{like}, m.right], 0.5)
""")

READS = lines("""
    {t} + {b}
    {t} * {b}
    {t}.sum()
    {t}.norm()
    {t}.abs().max()
    {t}.float().mean()
    {t}.clone()
    {t}.double()
    {t}.to(torch.bfloat16)
    {t}.to(torch.float64, copy=True)
    {t}.requires_grad_()
    {t}.detach().clone().requires_grad_()
    {t}.detach().cumsum(-1)
    {t}.new_zeros(3)
    {t}.flatten()[:5].tolist()
    torch.where({t} > 0, {t}, {b})
    torch.stack([{t}, {t}])
    torch.zeros_like({t})
    torch.full_like({t}, 2.0)
    torch.randn_like({t})
    torch.empty_like({t}).copy_({t})
    torch._foreach_add([{t}], 1.0)[0]
    torch._foreach_norm([{t}])[0]
    torch.softmax({t}.flatten(), 0, dtype=torch.float64)
    nn.Parameter({t})
    copy.deepcopy({t})
""")

DATA = lines("""
    {p}.data = {like}
    {p}.data = {like}
    {p}.data = {like}.data
    {p}.data = {p}.data.clone()
    {p}.data = {p}.data.t().contiguous().t()
    {t}.data = {like}
    {t}.data = {t}.detach()[:1]
    {p}.data, {q}.data = {q}.data, {p}.data
    {p}.data, {q}.data = {q}.data, {p}.data
    m.double(); m.float()
""")

EVALUATE_ANOTHER = lines("""
    {name} = {p}.data
    {p}.data = {like}
    m(x).backward()
    {p}.data = {name}
""")
"""The classic use of averaged weights: said one after the other."""

SWAPS = lines("""
    swap_values({p}, {q})
    swap_values({p}, {q})
    swap_tensors({p}, {q})
    {p}.grad, {q}.grad = {q}.grad, {p}.grad
""")

GRADIENTS = lines("""
    {p}.grad = None
    {p}.grad = torch.empty_like({p}).copy_({like})
    {p}.grad = torch.empty_like({p}).copy_({like})
    {p}.grad = torch.zeros_like({p})
    {g}.grad = {g}.grad.clone()
    {name} = {g}.grad
    {name} = {g}.grad
    {name} = {g}.grad.clone()
    {g}.grad.mul_(0.5)
    {g}.grad.zero_()
    {g}.grad.fill_diagonal_(0.0)
    {g}.grad.data.add_(1)
    {g}.grad.detach_()
    m.zero_grad(set_to_none=False)
    m.zero_grad(set_to_none=True)
    opt.zero_grad(set_to_none=False)
    opt.zero_grad(set_to_none=True)
""")

CLIPS = lines("""
    {name} = clip(m.parameters(), 0.5)
    clip(m.parameters(), 0.5)
    clip(m.parameters(), 0.25, foreach=False)
    clip(m.parameters(), 0.5, norm_type=float('inf'))
    clip([m.first.weight, m.left, m.narrow], 0.5)
    clip([{p}], 0.5)
    clip_values(m.parameters(), 0.1)
""")

TOGGLES = lines("""
    {p}.requires_grad_(False)
    {p}.requires_grad_(True)
    {t}.requires_grad_(True)
    {t}.requires_grad_(False)
    m.requires_grad_(False)
    m.requires_grad_(True)
""")

BACKWARDS = lines("""
    m(x).backward()
    m(x).backward()
    m(x).backward()
    loss = m(x)
    loss = m(2 * x)
    loss = m(x); loss.backward(retain_graph=True); loss.backward()
    loss.backward()
    loss.backward(retain_graph=True)
    loss.backward(inputs=[{p}])
    {name} = torch.autograd.grad(loss, {p}, retain_graph=True, allow_unused=True)[0]
""")

LOSSES = lines("""
    ({t} * {b}).sum()
    ({t}.float() * {t}.detach()).sum()
    {t}.square().mean()
    ({t} + {b}).tanh().sum()
    {t}.sgn().sum()
    {t}.exp().sum() + {b}.sum()
    ({t} @ {t}.mT).sum()
    {t}.flatten()[::2].cos().sum()
    m.first(x)[:, 3].sum() + {t}.sum()
""")

# Two calls that feed one loss are not here: a compiled frame that reads a parameter several times
# adds up its gradients in another order, with any backend.
COMPILED = lines("""
    c(x).backward()
    c(x).backward()
    loss = c(x)
    with torch.no_grad(): t0 = c(x)
    loss = c(x); loss.backward(retain_graph=True)
    opt.zero_grad(); c(x).backward(); opt.step(lambda: m(x))
    opt.zero_grad(); c(x).backward(); opt.step(lambda: m(x))
""")

HOOKS = lines("""
    h{key} = {p}.register_hook(noted(log, '{key}', '{then}'))
    h{key} = {p}.register_hook(noted(log, '{key}', '{then}'))
    h{key} = {t}.register_hook(noted(log, '{key}', '{then}'))
    h{key} = {p}.register_post_accumulate_grad_hook(noted(log, '{key}', 'grad'))
    h{key} = {p}.register_post_accumulate_grad_hook(noted(log, '{key}', 'raise'))
    h{key} = {p}.register_post_accumulate_grad_hook(stepping)
    h{key} = {p}.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', None))
    n{key} = node_of({p}); h{key} = n{key}.register_prehook(noted(log, '{key}', '{then}'))
    n{key} = node_of({p}); h{key} = n{key}.register_hook(noted(log, '{key}'))
    h{key} = m.first.register_forward_hook(noted(log, '{key}'))
    h{key} = m.first.register_forward_pre_hook(noted(log, '{key}'))
    h{key} = m.second.register_full_backward_hook(noted(log, '{key}'))
    h{key} = m.second.register_full_backward_pre_hook(noted(log, '{key}'))
""")

FAILURES = lines("""
    m.fails = True
    m.fails = False
    m.fails = False
    raise Boom('here')
    {t}.add_(torch.ones(2, 3, 5, 7, 11))
    with torch.no_grad(): {t}.copy_(torch.ones(2, 3, 5, 7, 11))
    with torch.no_grad(): {t}.index_fill_(0, torch.tensor([99]), 1.0)
    with torch.no_grad(): torch._foreach_add_([{p}, m.left], [m.left, m.right])
""")

TRAINING = lines("""
    opt.step(lambda: m(x))
    opt.step(lambda: m(x))
    opt.step(lambda: m(x))
    opt.zero_grad(); m(x).backward(); opt.step(lambda: m(x))
    opt.zero_grad(); m(x).backward(); opt.step(lambda: m(x))
    opt.zero_grad(); m(x).backward(); clip(m.parameters(), 0.5); opt.step(lambda: m(x))
    opt = optimizer('{kind}', m.parameters())
    opt = optimizer('{kind}', m.parameters())
    opt = optimizer('{kind}', [m.first.weight, m.left, m.narrow])
    opt.param_groups[0]['lr'] = 0.02
    opt.param_groups[0]['weight_decay'] = 0.1
    opt.state.clear()
    {name} = opt.state[m.first.weight]['{state}']
    with torch.no_grad(): opt.state[m.first.weight]['{state}'].mul_(0.5)
""")

KEEPING = lines("""
    sd = m.state_dict()
    sd = copy.deepcopy(m.state_dict())
    sd = {{k: v.clone() for k, v in m.state_dict().items()}}
    m.load_state_dict(sd)
    m.load_state_dict(sd)
    m.load_state_dict({{k: v.clone() for k, v in m.state_dict().items()}}, assign=True)
    m.load_state_dict({{k: torch.ones_like(v) for k, v in m.state_dict().items()}})
    od = opt.state_dict()
    od = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(od)
    opt.load_state_dict(copy.deepcopy(od))
    m2 = copy.deepcopy(m)
    m2 = copy.deepcopy(m)
    m2(x).backward()
    m.load_state_dict(m2.state_dict())
    del m2
    {p} = nn.Parameter({p}.detach().clone())
    {p} = nn.Parameter({like}.detach().clone())
""")

MOVES = lines("""
    move({t}, 'device')
    move({t}, 'device')
    move({t}, 'host')
    move({t}, 'disk')
    move({t}, 'disk')
""")

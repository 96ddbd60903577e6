"""What a program may do between an optimizer's step and the next forward, which reads or writes
parameters, states or options: of a plain model and of an offloaded one the same is told."""

import copy

import torch


def printed(model, optimizer):
    return [str(p.detach()) for p in model.parameters()]


def measured(model, optimizer):
    return [p.detach().norm().item() for p in model.parameters()]


def read_states(model, optimizer):
    return [optimizer.state[p]["exp_avg"].sum().item() for p in model.parameters()]


def changed(model, optimizer):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.75)


def averaged(model, optimizer):
    with torch.no_grad():
        return [torch.zeros_like(p).lerp_(p, 0.5).sum().item() for p in model.parameters()]


def state_dict_saved(model, optimizer):
    return {name: value.clone().sum().item() for name, value in model.state_dict().items()}


def states_saved(model, optimizer):
    return [float(s["exp_avg_sq"].max()) for s in optimizer.state_dict()["state"].values()]


def copied(model, optimizer):
    return [p.sum().item() for p in copy.deepcopy(model).parameters()]


def stepped_again(model, optimizer):
    optimizer.step()  # without gradients: nothing


def set_anew(model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.1


def betas_changed(model, optimizer):
    for group in optimizer.param_groups:
        group["betas"] = (0.5, 0.9)
        group["weight_decay"] = 0.3


def counts_changed(model, optimizer):
    for state in optimizer.state.values():
        state["step"].add_(5)


def states_dropped(model, optimizer):
    optimizer.state.clear()


def data_replaced(model, optimizer):
    for p in model.parameters():
        p.data = p.detach().clone() * 0.5


BETWEEN = [
    printed,
    measured,
    read_states,
    changed,
    averaged,
    state_dict_saved,
    states_saved,
    copied,
    stepped_again,
    set_anew,
    betas_changed,
    counts_changed,
    states_dropped,
    data_replaced,
]
FIRST = (read_states, changed, state_dict_saved, set_anew, counts_changed, data_replaced)
"""Of each kind one: who reads and who writes parameters, states and options."""

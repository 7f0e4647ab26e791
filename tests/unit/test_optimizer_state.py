"""The saved state of an optimizer, shared over ranks and split again, against the optimizer."""

import copy
import json

import pytest
import torch
from torch import nn

from stageline.checkpoint.optimizer_state import (
    STATE_FILE,
    STATE_FOLDER,
    RowRange,
    SavedState,
    group_values,
    state_share,
)
from stageline.errors import CheckpointError, UserError
from stageline.training.optimizers import optimizer_groups

SHAPE = (7, 3)


def trained():
    """Return two parameters and an optimizer with moments that differ in each row."""
    torch.manual_seed(0)
    parameters = {"w": nn.Parameter(torch.randn(SHAPE)), "v": nn.Parameter(torch.randn(5))}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for _ in range(3):
        step(parameters, optimizer)
    return parameters, optimizer


def step(parameters, optimizer):
    for parameter in parameters.values():
        parameter.grad = torch.arange(parameter.numel()).view(parameter.shape) + parameter.detach()
    optimizer.step()


def rows_of(parameters, optimizer, first, end):
    """Return the share of one of several replicas: some rows of `w`, all of `v`."""
    whole = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    share = {"w": nn.Parameter(whole["w"][first:end].clone()), "v": nn.Parameter(whole["v"])}
    own = torch.optim.AdamW(share.values(), lr=0.1)
    for name, parameter in share.items():
        state = copy.deepcopy(optimizer.state[parameters[name]])
        if name == "w":
            state = {k: v[first:end].clone() if v.ndim else v for k, v in state.items()}
        own.state[parameter] = state
    return share, own


def share_of(optimizer, parameters, begun, **options):
    defaults = {"rows": {}, "left_out": (), "is_first": True, "with_weights": False, "copies": None}
    return state_share(optimizer, parameters, begun=begun, **(defaults | options))


def save(folder, shares, left_out=()):
    """`shares`: (parameters, optimizer, rows of `w`) of each rank."""
    folder = folder / STATE_FOLDER
    folder.mkdir()
    joined = {}
    for rank, (parameters, optimizer, rows) in enumerate(shares):
        options = {"rows": {} if rows is None else {"w": rows}, "left_out": left_out}
        options |= {"is_first": rank == 0, "with_weights": True}
        share = share_of(optimizer, parameters, group_values(optimizer), **options)
        for name, entry in share.write(folder / f"rank-{rank}.safetensors").items():
            values = joined.setdefault(name, {"shape": entry["shape"], "values": {}})["values"]
            for key, piece in entry["values"].items():
                values.setdefault(key, []).append(piece)
    saved = {"facts": {"step": 3}, "optimizer": "AdamW", "extras": {}, "parameters": joined}
    (folder / STATE_FILE).write_text(json.dumps(saved))


CUTS = {"whole": [0, 7], "halves": [0, 4, 7], "thirds": [0, 3, 6, 7], "one empty": [0, 7, 7]}


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("whole", "halves"),
        ("halves", "thirds"),
        ("thirds", "whole"),
        ("one empty", "halves"),
        ("thirds", "one empty"),
    ],
)
def test_rows_are_put_together_and_cut_anew(then, now, tmp_path):
    parameters, optimizer = trained()
    shares = []
    for first, end in zip(CUTS[then], CUTS[then][1:]):
        rows = None if then == "whole" else RowRange(first, end - first, SHAPE)
        shares.append((*rows_of(parameters, optimizer, first, end), rows))
    save(tmp_path, shares)
    saved = SavedState(tmp_path)
    saved.check_names(["v", "w"])
    for first, end in zip(CUTS[now], CUTS[now][1:]):
        fresh = {"w": nn.Parameter(torch.zeros(end - first, 3)), "v": nn.Parameter(torch.zeros(5))}
        other = torch.optim.AdamW(fresh.values(), lr=0.1)
        rows = {} if now == "whole" else {"w": RowRange(first, end - first, SHAPE)}
        saved.restore(other, fresh, rows=rows)
        expected, theirs = rows_of(parameters, optimizer, first, end)
        # the first pass compares the restored state, the second one further step
        for _ in range(2):
            for name in expected:
                assert torch.equal(fresh[name], expected[name]), name
                found, wanted = other.state[fresh[name]], theirs.state[expected[name]]
                assert found.keys() == wanted.keys()
                assert all(torch.equal(found[key], wanted[key]) for key in wanted), name
                assert found["step"].device.type == "cpu"
            step(fresh, other)
            step({name: expected[name] for name in fresh}, theirs)


def test_what_another_stage_saves_is_left_out(tmp_path):
    parameters, optimizer = trained()
    save(tmp_path, [(parameters, optimizer, None)], left_out=["v"])
    saved = SavedState(tmp_path)
    assert set(saved.index) == {"w"}
    with pytest.raises(CheckpointError, match="lacks 1 that train now"):
        saved.check_names(["v", "w"])
    with pytest.raises(CheckpointError, match="has 1 that do not"):
        saved.check_names([])


def test_another_model_or_optimizer_is_refused(tmp_path):
    parameters, optimizer = trained()
    save(tmp_path, [(parameters, optimizer, None)])
    saved = SavedState(tmp_path)
    wider = {"w": nn.Parameter(torch.zeros(7, 4))}
    with pytest.raises(CheckpointError, match=r"shape \[7, 3\], this model \[7, 4\]"):
        saved.restore(torch.optim.AdamW(wider.values()), wider, rows={})
    with pytest.raises(CheckpointError, match="state of AdamW, not that of SGD"):
        saved.restore(torch.optim.SGD(parameters.values()), parameters, rows={})


def test_what_training_changed_in_a_group_is_saved_and_settings_are_not():
    """Also where it has a default, as counts of Prodigy and schedule-free optimizers have."""
    weight = nn.Parameter(torch.ones(2, 2))
    groups = optimizer_groups({"w": weight}, weight_decay=0.0, lr_scale_of=lambda name: 0.25)
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    optimizer.param_groups[0]["k"] = optimizer.defaults["k"] = 0
    begun = group_values(optimizer)
    optimizer.param_groups[0].update(k=5, weight_sum=3.0, lr=0.01)
    assert share_of(optimizer, {"w": weight}, begun).extras == {"w": {"k": 5, "weight_sum": 3.0}}
    optimizer.param_groups[0]["k"] = torch.tensor(5.0)
    with pytest.raises(UserError, match="keeps k as Tensor of a group"):
        share_of(optimizer, {"w": weight}, begun)


def test_groups_that_differ_are_not_joined(tmp_path):
    """Refuse to join the groups of two stages, where each found its own step size."""
    parameters, optimizer = trained()
    save(tmp_path, [(parameters, optimizer, None)])
    saved = SavedState(tmp_path)
    saved.extras = {"w": {"d": 0.1}, "v": {"d": 0.1}}
    saved.restore(optimizer, parameters, rows={})
    assert optimizer.param_groups[0]["d"] == 0.1
    saved.extras["v"]["d"] = 0.2
    with pytest.raises(CheckpointError, match="Resume with the stages of that run"):
        saved.restore(optimizer, parameters, rows={})


def test_an_optimizer_is_refused_that_keeps_what_cannot_be_saved():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"schedule": print}
    with pytest.raises(UserError, match="keeps schedule as builtin_function"):
        share_of(optimizer, {"w": weight}, {})
    optimizer.state = {"steps": {"count": 3}}
    with pytest.raises(UserError, match="keeps steps as something of no parameter"):
        share_of(optimizer, {"w": weight}, {})

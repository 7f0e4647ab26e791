"""Recomputed and offloaded activations: every gradient is equal to the last bit.

The reference is the same stage without any lever; that it equals plain transformers is tested in
tests/distributed/test_parity.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from loss_fn import sft
from pp_models import class_of_key
from stageline.checkpoint.init import init_split_model
from stageline.errors import UserError
from stageline.modules.recompute import (
    RecomputeError,
    checkpoint_layers,
    keep_products,
    offload_activations,
    offloaded,
    recompute,
)
from stageline.pipeline.live_bytes import PeakBytes
from tests.helpers.split_backward import plain_backward, split_backward
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import TYPICAL, tiny_config

# names of dropouts differ by family; a family takes those it knows
DROPOUTS = {"attention_dropout": 0.2, "resid_pdrop": 0.2, "attn_pdrop": 0.2, "hidden_dropout": 0.2}
LORA = {"llm_lora_num": 1, "lora_rank": 2, "lora_dropout": 0.3, "frozen_lm_head": True}
MODES = {"every layer": {}, "every second": {"every": 2}, "operators": {"mode": "operators"}}


def make_stage(family, *, stage=0, num_stages=1, dropout=True, attention=None, **options):
    stage_class = class_of_key(family)
    config = tiny_config(family, **(DROPOUTS if dropout else {}))
    model = stage_class(
        config, stage=stage, num_stages=num_stages, attn_implementation=attention, **options
    )
    init_split_model(model, seed=1, device="cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # biases and LoRA's second matrix start at zero, which hides mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.frozen()
    return model.train()


def run(model, family, backward=plain_backward, **kwargs):
    """Loss and gradients of one micro-batch on a stage that is the last one."""
    batch = tiny_micro_batches(family, lengths=(14,))[0]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    first = batch["input_ids"]
    if not model.is_first:
        generator = torch.Generator().manual_seed(3)
        first = torch.randn(2, 14, 16, generator=generator).requires_grad_()
    torch.manual_seed(9)
    loss = sft(model(first, **inputs), batch, num_targets=torch.tensor(7.0))
    value = loss.item()
    return value, backward(loss, None, hidden=first, model=model, **kwargs)


def assert_equal(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys() and ours[1]
    wrong = [name for name, grad in theirs[1].items() if not torch.equal(ours[1][name], grad)]
    assert wrong == []


def count_runs(model):
    """Return a counter of the runs of each layer's attention, by index."""
    counts = {}
    for index, layer in model.layer_list():
        for name, module in layer.named_children():
            if "attn" in name or "attention" in name.split("_")[:1]:

                def count(*args, index=index):
                    counts[index] = counts.get(index, 0) + 1

                module.register_forward_hook(count)
                break
    return counts


@pytest.mark.parametrize("family", TYPICAL)
def test_recomputing_changes_no_bit(family):
    expected = run(make_stage(family), family)
    for options in MODES.values():
        model = make_stage(family)
        model.enable_gradient_checkpointing(**options)
        assert_equal(run(model, family), expected)


@pytest.mark.parametrize(
    ("family", "make"),
    [
        ("gpt2", {"attention": "sdpa", **LORA}),
        ("internvl", {"attention": "eager", **LORA}),
        ("internvl", {"attention": "sdpa", "frozen_llm": True}),
    ],
    ids=["lora", "lora of both parts", "frozen"],
)
def test_lora_and_frozen_parts(family, make):
    expected = run(make_stage(family, **make), family)
    for options in MODES.values():
        model = make_stage(family, **make)
        model.enable_gradient_checkpointing(**options)
        assert_equal(run(model, family), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_two_walks_through_one_graph(family):
    """Zero-bubble schedules: the gradient of the input first, those of the weights later."""
    where = {"stage": 1, "num_stages": 2}
    expected = run(make_stage(family, **where), family)
    for options in MODES.values():
        model = make_stage(family, **where)
        model.enable_gradient_checkpointing(**options)
        counts = count_runs(model)
        assert_equal(run(model, family, split_backward), expected)
        every = options.get("every", 1)
        assert counts == {index: 2 if index % every == 0 else 1 for index in (2, 3)}


def test_layers_are_counted_over_the_whole_model():
    for stage, runs in ((0, {0: 2}), (1, {1: 1, 2: 1, 3: 2})):
        model = make_stage("llama", stage=stage, num_stages=2, partition=[1, 3])
        model.enable_gradient_checkpointing(every=3)
        counts = count_runs(model)
        batch = tiny_micro_batches("llama", lengths=(14,))[0]
        first = torch.randn(2, 14, 16).requires_grad_() if stage else batch["input_ids"]
        model(first, attention_mask=batch["attention_mask"]).sum().backward()
        assert counts == runs


def test_a_vision_tower_is_recomputed_too():
    model = make_stage("internvl")
    model.enable_gradient_checkpointing()
    calls = []
    tower = model.get_submodule(model.paths.vision_tower)
    (first, *_) = [m for name, m in tower.named_modules() if name.endswith("layer.0.attention")]
    first.register_forward_hook(lambda *args: calls.append(1))
    run(model, "internvl")
    assert len(calls) == 2


def test_what_a_layer_keeps():
    """Saved for the backward pass inside a recomputed layer: nothing but its input."""
    saved = {}
    for name, options in {"none": None, **MODES}.items():
        model = make_stage("llama", dropout=False)
        if options is not None:
            model.enable_gradient_checkpointing(**options)
        saved[name] = bytes_saved(model)
    hidden = 2 * 14 * 16 * 4
    outside = saved["every layer"] - 4 * hidden
    per_layer = (saved["none"] - outside) // 4
    assert per_layer > 10 * hidden
    assert saved["every second"] == outside + 2 * hidden + 2 * per_layer


def bytes_saved(model):
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in held and tensor.is_floating_point():
            sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(model, "llama", lambda *args, **kwargs: None)
    return sum(sizes)


def test_attention_with_dropout_is_not_kept():
    """Its random numbers are drawn inside it: leaving it out would shift all later ones."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.zeros(1)
    must = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    assert keep_products(None, operator, query, query, query) == must
    assert keep_products(None, operator, query, query, query, 0.0) == must
    assert keep_products(None, operator, query, query, query, 0.1) != must
    assert keep_products(None, operator, query, query, query, dropout_p=0.1) != must
    assert keep_products(None, torch.ops.aten.bmm.default, query, query) != must


def test_a_layer_that_changes_between_runs_is_refused():
    calls = []

    def layer(x):
        calls.append(1)
        return (x[: 2 if len(calls) == 1 else 3] ** 2).exp()

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(RecomputeError, match="must do the same each time"):
        recompute(layer, x).sum().backward()


# -- offload -------------------------------------------------------------------------------


class Moves:
    """Hooks that take every float tensor, as if it were on a GPU, and count them."""

    def __init__(self):
        self.tensors = []

    def __call__(self, tensor):
        if tensor.is_floating_point():
            self.tensors.append(tensor.data_ptr())
        return tensor.is_floating_point()


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_offloading_changes_no_bit(family):
    where = {"stage": 1, "num_stages": 2}
    expected = run(make_stage(family, **where), family)
    for options, backward in (
        (None, plain_backward),
        (None, split_backward),
        (MODES["every layer"], plain_backward),
        (MODES["every second"], split_backward),
        (MODES["operators"], split_backward),
    ):
        model = make_stage(family, **where)
        if options is not None:
            model.enable_gradient_checkpointing(**options)
        moves = Moves()
        offload_activations(model, moves=moves)
        assert_equal(run(model, family, backward), expected)
        assert moves.tensors
        held = {p.untyped_storage().data_ptr() for p in model.parameters()}
        assert not held & set(moves.tensors), "parameters stay on the device"


def test_with_checkpointing_the_inputs_of_layers_move():
    model = make_stage("llama", stage=1, num_stages=2, frozen_lm_head=True, dropout=False)
    model.enable_gradient_checkpointing()
    moves = Moves()
    offload_activations(model, moves=moves)
    hidden = []
    for _, layer in model.layer_list()[2:]:
        layer.register_forward_pre_hook(lambda module, args: hidden.append(args[0].data_ptr()))
    run(model, "llama")
    assert set(hidden) <= set(moves.tensors)


def test_an_activation_really_leaves_the_graph():
    """Overwrite what the graph held before: backward uses the copy."""
    linear = torch.nn.Linear(3, 3)
    offload_activations(linear, moves=Moves())
    x = torch.ones(2, 3)
    out = linear(x)
    x.data.zero_()
    out.sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((3, 3), 2.0))


def test_memory_that_is_used_again_is_not_taken_for_the_old_tensor():
    squares = torch.nn.Identity()
    squares.forward = lambda x: sum((x * number).exp() for number in range(5))
    offload_activations(squares, moves=Moves())
    x = torch.ones(1000, requires_grad=True)
    squares(x).sum().backward()
    expected = sum(number * torch.tensor(float(number)).exp() for number in range(5))
    torch.testing.assert_close(x.grad, expected.expand(1000))


def test_nothing_made_anew_outlives_its_layer():
    """A node that holds its own output is a circle that no collector finds."""
    meters = []
    for options in (None, *MODES.values()):
        model = make_stage("llama", dropout=False)
        if options is not None:
            model.enable_gradient_checkpointing(**options)
        run(model, "llama")  # gradients are there from now on
        meters.append(PeakBytes(torch.device("cpu")))
        with meters[-1].watch():
            run(model, "llama")
    for meter in meters[1:]:
        assert meter.kept == meters[0].kept
        assert meter.peak < meters[0].peak


def test_weights_that_are_put_together_on_the_way_are_not_offloaded():
    """With `dp_shard` a layer's weights are sent when it is called, after the pass began."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (1,))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    shapes = []

    def moves(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor.is_floating_point()

    with offloaded(model, moves=moves):
        model(torch.randn(3, 8)).sum().backward()
    assert (3, 8) in shapes and (8, 8) not in shapes


def test_products_that_are_changed_in_place_are_refused_by_name():
    layer = torch.nn.Linear(4, 4, bias=False)
    plain = layer.forward
    layer.forward = lambda x: plain(x).add_(1).square()  # experts add their biases in place, too
    checkpoint_layers([(0, layer)], mode="operators")
    loss = layer(torch.randn(3, 4, requires_grad=True)).sum()
    with pytest.raises(UserError, match="Choose --recompute.mode full"):
        loss.backward()

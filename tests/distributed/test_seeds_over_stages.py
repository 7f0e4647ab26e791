"""Dropout masks depend on seed, step, micro-batch and layer, and not on the split or the rank.

The reference is plain transformers (and peft) in one process, with hooks of its own that set the
seeds which the rule gives; every split must equal it to the last bit. With replicas sums are made
in another order: 1e-6.
"""

import functools

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.load import load_split_model
from stageline.modules.recompute import compile_layers
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.seeds import derive_seed, mix_seed
from stageline.training.replicas import Replicas, ShardedReplicas
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import count_targets, tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

NUM_LAYERS, NUM_STEPS, SEED = 8, 2, 11
ADAMW = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}
LENGTHS = (9, 12, 10, 11)
CPU = torch.device("cpu")
LORA = {"llm_lora_num": 1, "lora_rank": 2, "lora_alpha": 4.0, "lora_dropout": 0.3}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# kind -> family, its configuration, options of the stages
KINDS = {
    "attention": ("llama", {"attention_dropout": 0.2}, {}),
    "embedding": ("gpt2", {"embd_pdrop": 0.3, "resid_pdrop": 0.2, "n_layer": NUM_LAYERS}, {}),
    "lora": ("llama", {"attention_dropout": 0.1}, {**LORA, "frozen_lm_head": True}),
    "jitter": ("mixtral", {"router_jitter_noise": 0.3}, {}),
    "compiled": (
        "llama",
        {"attention_dropout": 0.1, "num_hidden_layers": 2},
        {**LORA, "frozen_lm_head": True},
    ),
}
# ranks -> schedule, whether layers are recomputed
SPLITS = {
    1: (("1f1b", True), ("zbv", False)),
    2: (("1f1b", False), ("interleaved_1f1b", True), ("zbv", True)),
    4: (("1f1b", True), ("interleaved_1f1b", False), ("zbv", True)),
}
CASES = [("lora", 1), ("jitter", 2), ("embedding", 4), ("lora", 4)]


# -- the reference -----------------------------------------------------------------------------


def build_whole(kind, folder):
    family, fields, options = KINDS[kind]
    torch.manual_seed(3)
    config = tiny_config(family, **{"num_hidden_layers": NUM_LAYERS, **fields})
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    whole.save_pretrained(folder)
    if options:
        lora = peft.LoraConfig(r=2, lora_alpha=4.0, lora_dropout=0.3, target_modules=LINEAR)
        whole = peft.get_peft_model(whole, lora)
        for name, parameter in whole.named_parameters():
            if "lora_" in name:  # B starts at zero, which would hide A's masks
                nn.init.normal_(parameter, std=0.1)
    return whole.train()


def our_name(name):
    """Return our name of a parameter of peft."""
    name = name.removeprefix("base_model.model.").replace("base_layer", "lora_module")
    return name.replace("lora_A.default", "lora.lora_A").replace("lora_B.default", "lora.lora_B")


def draws_loss(output, batch, *, num_targets):
    """A loss that draws too: it must not depend on where the layers are."""
    return sft(output, batch, num_targets=num_targets) * (1 + torch.rand(()))


def seed_layers(whole):
    """Hooks that seed as the rule says; returns what sets the micro-batch."""
    now = {}
    layers = next(m for m in whole.modules() if isinstance(m, nn.ModuleList))
    assert len(layers) == whole.config.num_hidden_layers

    def seed(place):
        torch.manual_seed(mix_seed(derive_seed(SEED, "micro-batch", *now["at"]), place))

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, place=2 * index + 2: seed(place))
        layer.register_forward_hook(lambda *_, place=2 * index + 3: seed(place))

    def at(step, micro_batch):
        now["at"] = (step, micro_batch)
        seed(1)

    return at, functools.partial(seed, 0)


def reference_run(whole):
    at, before_loss = seed_layers(whole)
    trained = {our_name(n): p for n, p in whole.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), **ADAMW)
    losses = []
    for step in range(NUM_STEPS):
        batches = batches_of(step)
        count = torch.tensor(float(count_targets(batches)))
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            at(step, index)
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            logits = whole(**inputs, use_cache=False).logits
            before_loss()
            loss = draws_loss(logits, batch, num_targets=count)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        losses.append(total.item())
    weights = {name: p.detach().clone() for name, p in trained.items()}
    return {"start": start, "losses": losses, "weights": weights}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """Return the folder and the run of the whole model of a kind; each is made once."""

    @functools.cache
    def made(kind):
        folder = tmp_path_factory.mktemp(kind)
        return folder, reference_run(build_whole(kind, folder))

    return made


def batches_of(step):
    return tiny_micro_batches("llama", lengths=LENGTHS, seed=50 + step)


# -- split runs --------------------------------------------------------------------------------


def build_stage(kind, folder, start, *, stage, num_stages, recomputed=False, **options):
    config = transformers.AutoConfig.from_pretrained(folder)
    options = {**KINDS[kind][2], **options}
    model = CausalLMStage(config, stage=stage, num_stages=num_stages, **options)
    load_split_model(model, folder, device="cpu", dtype=torch.float32)
    model.frozen()
    for name, parameter in model.named_parameters():
        if ".lora." in name:
            parameter.data.copy_(start[name])
    if recomputed:
        model.enable_gradient_checkpointing()
    return model.train()


def train(runner, *, replicas=None, first_step=0):
    """Return losses and weights after the steps; replicas share the micro-batches of each one."""
    train_step = TrainStep(
        runner,
        make_optimizer=lambda parameters: (
            torch.optim.AdamW(parameters.values(), **ADAMW) if parameters else None
        ),
        loss_fn=draws_loss,
        learning_rate=lambda step: ADAMW["lr"],
        max_grad_norm=0.0,
        replicas=replicas,
    )
    rank, size = (replicas.rank, replicas.size) if replicas else (0, 1)
    losses = []
    for step in range(first_step, NUM_STEPS):
        torch.rand(step + 7 * runner.pp_rank + rank)  # earlier draws must not matter
        share = len(LENGTHS) // size
        batches = batches_of(step)[rank * share : (rank + 1) * share]
        losses.append(train_step(batches, step=step).loss)
    return {
        "losses": losses,
        "weights": {
            name: p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach()
            for name, p in runner.local.named_parameters().items()
            if p.requires_grad
        },
    }


def split_runs(rank, kind, folder, start, cases):
    results = []
    for schedule, recomputed, options in cases:
        models = [
            build_stage(
                kind, folder, start, stage=stage, num_stages=schedule.num_stages,
                recomputed=recomputed, **options,
            )
            for stage in schedule.stages_of(rank)
        ]  # fmt: skip
        results.append(train(PipelineRunner(models, device=CPU, schedule=schedule, seed=SEED)))
    return results


def compare(ranks, reference, *, where, tolerance=0.0):
    assert {n for rank in ranks for n in rank["weights"]} == set(reference["weights"]), where
    for rank in ranks:
        assert rank["losses"] == pytest.approx(reference["losses"], rel=tolerance, abs=0), where
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(
                weight, reference["weights"][name], rtol=tolerance, atol=tolerance,
                msg=lambda text, name=name: f"{where}: {name}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize("kind, num_ranks", CASES)
def test_every_split_draws_the_masks_of_the_whole_model(kind, num_ranks, wholes):
    folder, reference = wholes(kind)
    cases = [
        (make_schedule(name, num_ranks=num_ranks), recomputed, {})
        for name, recomputed in SPLITS[num_ranks]
    ]
    if num_ranks == 2:  # this last stage has only the head
        alone = {"partition": [NUM_LAYERS, 0], "is_piece": True}
        cases.append((make_schedule("1f1b", num_ranks=2), False, alone))
    results = run_ranks(split_runs, num_ranks, kind, folder, reference["start"], cases)
    for index, (schedule, recomputed, options) in enumerate(cases):
        where = f"{schedule.name} on {num_ranks} ranks, recomputed: {recomputed}, {options}"
        compare([result[index] for result in results], reference, where=where)


def without_seeds(rank, kind, folder, start):
    model = build_stage(kind, folder, start, stage=0, num_stages=1)
    return train(PipelineRunner(model, device=CPU, schedule="1f1b"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_seeds_are_what_makes_them_equal(kind, wholes):
    folder, reference = wholes(kind)
    (result,) = run_ranks(without_seeds, 1, kind, folder, reference["start"])
    assert result["losses"] != reference["losses"]


# -- replicas ----------------------------------------------------------------------------------


def replicated(rank, kind, folder, start, is_sharded):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    model = build_stage(kind, folder, start, stage=0, num_stages=1)
    if is_sharded:
        replicas = ShardedReplicas([model], mesh=mesh["dp"])
    else:
        replicas = Replicas(mesh["dp"].get_group())
    runner = PipelineRunner(
        model, device=CPU, group=mesh["pp"].get_group(), schedule="1f1b", seed=SEED
    )
    return train(runner, replicas=replicas)


@pytest.mark.parametrize("kind, is_sharded", [("embedding", False), ("attention", True)])
def test_two_replicas_with_half_of_the_batch_each(kind, is_sharded, wholes):
    folder, reference = wholes(kind)
    results = run_ranks(replicated, 2, kind, folder, reference["start"], is_sharded)
    compare(results, reference, where="two replicas", tolerance=2e-6)


# -- compiled layers ---------------------------------------------------------------------------


def compiled(rank, kind, folder, start):
    model = build_stage(kind, folder, start, stage=0, num_stages=1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(model.layer_list(), backend="eager")
    model.enable_gradient_checkpointing()
    result = train(PipelineRunner(model, device=CPU, schedule="1f1b", seed=SEED))
    counters = torch._dynamo.utils.counters
    return result, dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


def test_compiled_layers_draw_the_same_without_a_graph_break(wholes):
    folder, reference = wholes("compiled")
    ((result, breaks, graphs),) = run_ranks(compiled, 1, "compiled", folder, reference["start"])
    assert breaks == {} and graphs > 0
    compare([result], reference, where="compiled")

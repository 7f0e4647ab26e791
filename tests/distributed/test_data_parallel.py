"""Two replicas of a pipeline of two ranks against one process with the same global batch.

The reference is plain transformers (and peft): one process, the micro-batches of both replicas one
by one. A sum of two numbers has no order, so replicas give the same result to the last bit, as long
as the reference adds up each replica's gradients first, and then the two sums. What differs in the
last bits is compared to 1e-6: with sharded weights the gradient norm, made of sums of squares of
shares, and the weights, by clipping; the gradients of tied weights, a sum in another order.
"""

import dataclasses

import peft
import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from loss_fn import sft
from pp_models import CausalLMStage, VisionLanguageStage
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.save import save_split_model
from stageline.modules.lora import is_lora_name
from stageline.pipeline.live_bytes import tensor_bytes
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.planner.estimate import Cost, MemoryRules, ModelCosts, memory_of, parameter_cost
from stageline.training.evaluation import evaluate
from stageline.training.optimizers import optimizer_groups
from stageline.training.precision import LossScaler
from stageline.training.replicas import Replicas, ShardedReplicas, sharded_modules
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import count_targets, drop_pixels, tiny_micro_batches
from tests.helpers.tiny_models import VISION_LANGUAGE, tiny_config

NUM_STEPS = 2
MAX_NORM = 0.05  # well below the norm of these models, so that clipping acts
RATES = (1e-3, 2e-3)
STAGES = {"1f1b": 2, "interleaved_1f1b": 4, "interleaved_zero_bubble": 4, "zbv": 4}
LORA = {"llm_lora_num": 1, "lora_rank": 2, "lora_alpha": 4.0, "frozen_lm_head": True}
CPU = torch.device("cpu")


# -- the reference -----------------------------------------------------------------------------


def build_whole(folder, *, family="llama", tied=False):
    torch.manual_seed(3)
    is_vision = family in VISION_LANGUAGE
    auto = "AutoModelForImageTextToText" if is_vision else "AutoModelForCausalLM"
    whole = getattr(transformers, auto).from_config(tiny_config(family, tied=tied))
    with torch.no_grad():  # transformers starts biases and norms at 0 and 1, which hides mistakes
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole.save_pretrained(folder)
    return whole.train()


def add_peft(whole, rank):
    config = peft.LoraConfig(r=rank, lora_alpha=4, target_modules="all-linear", lora_dropout=0.0)
    whole = peft.get_peft_model(whole, config)
    fill_lora({our_name(name): p for name, p in whole.named_parameters()})
    return whole.train()


def our_name(name):
    """Return Stageline's name of a parameter of peft."""
    name = name.removeprefix("base_model.model.").replace(".default", "")
    return name.replace(".lora_A", ".lora.lora_A").replace(".lora_B", ".lora.lora_B")


@torch.no_grad()
def fill_lora(named):
    """The same start everywhere; B too, or A would have no gradient."""
    for name, parameter in named.items():
        if is_lora_name(name):
            generator = torch.Generator().manual_seed(sum(name.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def make_optimizer(parameters):
    if not parameters:
        return None
    groups = optimizer_groups(parameters, weight_decay=0.1)
    return torch.optim.AdamW(groups, lr=1.0, eps=1e-6)


def batches_of(family, step, replica):
    """Replicas have other samples, lengths and numbers of targets; the second has no picture."""
    family = family if replica == 0 else "llama"
    lengths = (14 + replica, 11 + step, 19 - 4 * replica, 12)
    return tiny_micro_batches(family, lengths=lengths, seed=100 + 10 * step + replica)


def reference_run(whole, family="llama"):
    trained = {our_name(n): p for n, p in whole.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(trained)
    steps = []
    for step in range(NUM_STEPS):
        batches = [batches_of(family, step, replica) for replica in range(2)]
        count = torch.tensor(float(sum(map(count_targets, batches))))
        sums, losses = [], []
        for replica in range(2):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for batch in batches[replica]:
                share = whole(**batch, num_items_in_batch=count, use_cache=False).loss
                share.backward()
                loss = loss + share.detach()
            sums.append({n: p.grad for n, p in trained.items() if p.grad is not None})
            losses.append(loss)
        for name, parameter in trained.items():
            grads = [grads[name] for grads in sums if name in grads]
            parameter.grad = sum(grads[1:], grads[0].clone()) if grads else None
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
        assert norm > MAX_NORM, "clipping must act, or the test shows less"
        grads = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
        steps.append({"loss": sum(losses).item(), "norm": norm.item(), "grads": grads})
    weights = {name: p.detach().clone() for name, p in trained.items()}
    return {"steps": steps, "weights": weights}


# -- replicas ----------------------------------------------------------------------------------


def build_stage(
    folder, family, stage, num_stages, *, dtype=torch.float32, checkpointing=False, **options
):
    stage_class = VisionLanguageStage if family in VISION_LANGUAGE else CausalLMStage
    config = AutoConfig.from_pretrained(folder)
    model = stage_class(config, stage=stage, num_stages=num_stages, dtype=dtype, **options)
    load_split_model(model, folder, device="cpu", dtype=dtype)
    fill_lora(dict(model.named_parameters()))
    model.frozen()
    if checkpointing:
        model.enable_gradient_checkpointing()
    return model.train()


class Run:
    """One rank of two replicas of a pipeline of two ranks."""

    def __init__(self, folder, *, family="llama", schedule="1f1b", is_sharded=False, **options):
        scale = options.pop("scale", None)
        loss_fn = options.pop("loss_fn", sft)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        self.family = family
        self.replica, self.pp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
        self.groups = {"group": mesh.get_group("pp"), "replicas": mesh.get_group("dp")}
        made = make_schedule(schedule, num_ranks=2)
        self.models = [
            build_stage(folder, family, stage, STAGES[schedule], **options)
            for stage in made.stages_of(self.pp_rank)
        ]
        self.replicas = Replicas(mesh.get_group("dp"))
        self.replicas.check_equal(self.models)
        if is_sharded:
            self.replicas = ShardedReplicas(self.models, mesh=mesh["dp"])
        self.runner = PipelineRunner(
            self.models, device=CPU, group=mesh.get_group("pp"), schedule=made
        )
        self.step = TrainStep(
            self.runner,
            make_optimizer=make_optimizer,
            loss_fn=loss_fn,
            learning_rate=RATES.__getitem__,
            max_grad_norm=MAX_NORM,
            scaler=LossScaler(enabled=scale is not None, initial_scale=scale or 1.0),
            replicas=self.replicas,
        )

    def batches(self, step):
        made = batches_of(self.family, step, self.replica)
        return made if self.pp_rank == 0 else [drop_pixels(batch) for batch in made]

    def train(self):
        steps = []
        parameters = self.step.weights.parameters
        for step in range(NUM_STEPS):
            result = self.step(self.batches(step), step=step)
            grads = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
            steps.append({"loss": result.loss, "norm": result.grad_norm, "grads": grads})
        weights = {n: p.detach().clone() for n, p in parameters.items()}
        return {"steps": steps, "weights": weights, "shares": sorted(self.step.weights.shares)}


def train_both(rank, folder, options):
    """Replicated, then sharded, on the same ranks."""
    return [Run(folder, **options, is_sharded=is_sharded).train() for is_sharded in (False, True)]


def join(named, shares):
    """One dict of all ranks': shares put together, copies of replicas and stages compared."""
    joined = {}
    for first, second, own in zip(
        named[:2], named[2:], shares, strict=True
    ):  # the ranks of a stage
        assert set(first) == set(second)
        for name in first:
            tensor = torch.cat([first[name], second[name]]) if name in own else first[name]
            assert name in own or torch.equal(tensor, second[name]), f"replicas differ in {name}"
            assert torch.equal(joined.setdefault(name, tensor), tensor), f"copies of {name} differ"
    return joined


def join_ranks(results):
    """Join the results of all four ranks, in the form of the reference."""
    shares = [result["shares"] for result in results[:2]]
    steps = []
    for of_ranks in zip(*(result["steps"] for result in results), strict=True):
        assert len({(step["loss"], step["norm"]) for step in of_ranks}) == 1
        steps.append({**of_ranks[0], "grads": join([step["grads"] for step in of_ranks], shares)})
    return {"steps": steps, "weights": join([result["weights"] for result in results], shares)}


def compare(ours, theirs, *, bitwise):
    tolerance = {"rtol": 0, "atol": 0} if bitwise else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(ours["weights"], theirs["weights"], **tolerance)
    for step, expected in zip(ours["steps"], theirs["steps"], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=tolerance["rtol"])
        assert step["norm"] == pytest.approx(expected["norm"], rel=tolerance["rtol"])
        torch.testing.assert_close(step["grads"], expected["grads"], **tolerance)


CASES = {
    "1f1b": ({}, False),
    "1f1b, tied": ({}, True),
    # 3 rows of A for two replicas: unequal shares; 1 row: an empty one
    "1f1b, lora, checkpointing": ({**LORA, "lora_rank": 3, "checkpointing": True}, False),
    "interleaved_1f1b": ({"schedule": "interleaved_1f1b"}, False),
    "interleaved_1f1b, lora": ({"schedule": "interleaved_1f1b", **LORA, "lora_rank": 1}, False),
    "nothing trains on the first stage": ({"frozen_llm": True}, False),
    "interleaved_zero_bubble": ({"schedule": "interleaved_zero_bubble"}, False),
    "zbv, tied": ({"schedule": "zbv"}, True),  # both copies on one rank
    "pictures on one replica": ({"family": "llava"}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_replicas_equal_one_process(name, tmp_path):
    options, tied = CASES[name]
    family = options.get("family", "llama")
    whole = build_whole(tmp_path, family=family, tied=tied)
    if "llm_lora_num" in options:
        whole = add_peft(whole, options["lora_rank"])
    elif "frozen_llm" in options:
        whole.model.requires_grad_(False)
    reference = reference_run(whole, family)
    results = run_ranks(train_both, 4, tmp_path, options)
    replicated, sharded = ([result[kind] for result in results] for kind in (0, 1))
    assert not any(result["shares"] for result in replicated)
    compare(join_ranks(replicated), reference, bitwise=not tied)
    compare(join_ranks(sharded), reference, bitwise=False)
    whole_names = {n for r in sharded for n in r["weights"] if n not in r["shares"]}
    assert whole_names == ({"model.embed_tokens.weight"} if name == "zbv, tied" else set())


# -- how often they talk -----------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts the calls of c10d by name."""

    def __enter__(self):
        self.counts = {}
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function.name().removeprefix("c10d::")
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def count_collectives(rank, folder, is_sharded, schedule):
    run = Run(folder, is_sharded=is_sharded, schedule=schedule)
    counts = []
    for num_copies in (1, 1, 3):
        micro_batches = run.batches(0) * num_copies
        with Collectives() as mode:
            run.step(micro_batches, step=0)
        counts.append({n: c for n, c in mode.counts.items() if n not in ("send", "recv_")})
    # middle stages have nothing but layers
    has_more = [model.is_first or model.is_last for model in run.models]
    return [counts, sum(len(model.modules_to_shard()) for model in run.models) + sum(has_more)]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_gradients_are_reduced_once_a_step(is_sharded, schedule, tmp_path):
    build_whole(tmp_path)
    for counts, groups in run_ranks(count_collectives, 4, tmp_path, is_sharded, schedule):
        assert counts[0] == counts[1] == counts[2], "three times the micro-batches, no more talk"
        scattered = counts[0].get("_reduce_scatter_base_", 0)
        gathered = counts[0].get("_allgather_base_", 0)
        assert (scattered, gathered) == ((groups, groups) if is_sharded else (0, 0))


def held_in_a_step(rank, folder, dtype):
    """Bytes of weights, shares and gradients when all passes are done, and what is planned."""
    run = Run(folder, is_sharded=True, dtype=dtype)
    found = {}

    def reduce_gradients(weights, then=run.replicas.reduce_gradients):
        groups = [one._get_fsdp_state()._fsdp_param_group for one in sharded_modules(run.models[0])]
        shared = [one for group in filter(None, groups) for one in group.fsdp_params]
        whole = [one.unsharded_param for one in shared]
        found["shares"] = sum(one._sharded_param_data.nbytes for one in shared)
        # half types are summed in float32 here
        sums = [one.unsharded_accumulated_grad for one in shared]
        grads = [w.grad if own is None else own for w, own in zip(whole, sums, strict=True)]
        found["whole"], found["gradients"] = tensor_bytes(whole), tensor_bytes(grads)
        then(weights)

    run.replicas.reduce_gradients = reduce_gradients
    run.step(run.batches(0), step=0)
    stage = build_stage(folder, "llama", run.pp_rank, 2, dtype=dtype)
    nothing = ModelCosts(Cost(), Cost(), (), Cost(), Cost(), border=0, batch=0, shape=(1, 1))
    planned = memory_of(
        nothing,
        {0: parameter_cost(stage.parameters())},
        num_stages=2,
        activations=0,
        num_micro_batches=1,
        rules=MemoryRules(shards=2),
    )
    return found, dataclasses.asdict(planned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_knows_what_replicas_with_shares_hold(dtype, tmp_path):
    build_whole(tmp_path)
    for found, planned in run_ranks(held_in_a_step, 4, tmp_path, dtype):
        assert planned["gradients"] == found["gradients"]
        assert planned["weights"] + planned["masters"] == found["whole"] + found["shares"]


# -- what all ranks must agree on --------------------------------------------------------------


def overflow_on_one_rank(rank, folder):
    def loss_fn(logits, batch, *, num_targets):
        return sft(logits, batch, num_targets=num_targets) * (float("inf") if rank == 3 else 1.0)

    told = []
    for is_sharded in (False, True):
        run = Run(folder, is_sharded=is_sharded, loss_fn=loss_fn, dtype=torch.float16, scale=8.0)
        before = {n: p.detach().clone() for n, p in run.step.weights.parameters.items()}
        result = run.step(run.batches(0), step=0, stop_requested=lambda: rank == 2)
        after = run.step.weights.parameters
        moved = [n for n in before if not torch.equal(before[n], after[n])]
        told.append([result.is_skipped, result.wants_stop, run.step.scaler.scale, len(moved)])
    return told


def test_all_ranks_skip_and_stop_together(tmp_path):
    build_whole(tmp_path)
    assert run_ranks(overflow_on_one_rank, 4, tmp_path) == [[[True, True, 4.0, 0]] * 2] * 4


# -- half precision, evaluation, saving --------------------------------------------------------


def train_in_bf16(rank, folder):
    made = []
    for schedule in ("1f1b", "zbv"):
        for is_sharded in (False, True):
            run = Run(folder, schedule=schedule, is_sharded=is_sharded, dtype=torch.bfloat16)
            made.append(run.train())
            types = {p.dtype for p in run.step.weights.parameters.values()}
            assert types == {torch.float32}
    return made


def test_bf16_is_the_same_sharded_and_with_split_passes(tmp_path):
    build_whole(tmp_path)
    results = run_ranks(train_in_bf16, 4, tmp_path)
    runs = [join_ranks([result[kind] for result in results]) for kind in range(4)]
    for other in runs[1:]:
        compare(other, runs[0], bitwise=False)


def evaluate_and_save(rank, folder, target, is_sharded, options):
    run = Run(folder, is_sharded=is_sharded, **options)
    run.step(run.batches(0), step=0)
    weights = {n: p.detach().clone() for n, p in run.step.weights.parameters.items()}
    held_out = [run.batches(1)[:2], run.batches(2)[:2]]
    result = evaluate(run.runner, held_out, loss_fn=sft, keep=5, replicas=run.replicas)
    save_split_model(run.models, None, target, **run.groups)
    assert target.exists()  # it is there on every rank when the save returns
    run.step(run.batches(1), step=1)  # training continues
    return {
        "figures": [result.loss, result.token_accuracy, result.num_targets, result.predicted],
        "steps": [],
        "weights": weights,
        "shares": sorted(run.step.weights.shares),
    }


def evaluate_plainly(whole):
    """Return the same figures by hand, rows in the order of the dataset."""
    loss, hits, count, predicted = 0.0, 0, 0, []
    for step, replica in [(1, 0), (1, 1), (2, 0), (2, 1)]:
        for batch in batches_of("llama", step, replica)[:2]:
            with torch.no_grad():
                logits = whole(**batch, use_cache=False).logits[:, :-1].float()
            for row, labels in zip(logits, batch["labels"][:, 1:], strict=True):
                row, labels = row[labels != -100], labels[labels != -100]
                loss += torch.nn.functional.cross_entropy(row, labels, reduction="sum").item()
                hits += int((row.argmax(-1) == labels).sum())
                count += len(labels)
                predicted.append(row.argmax(-1).tolist())
    return [loss / count, hits / count, count, predicted[:5]]


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("kind", ["full", "lora", "tied, bf16"])
def test_the_first_replica_saves_what_all_have_trained(kind, is_sharded, tmp_path):
    options = {"full": {}, "lora": LORA, "tied, bf16": {"dtype": torch.bfloat16}}[kind]
    base, target = tmp_path / "base", tmp_path / "saved"
    before = build_whole(base, tied="tied" in kind)
    results = run_ranks(evaluate_and_save, 4, base, target, is_sharded, options)
    auto = transformers.AutoModelForCausalLM
    saved = auto.from_pretrained(base if kind == "lora" else target)
    if kind == "lora":
        saved, before = peft.PeftModel.from_pretrained(saved, target), add_peft(before, 2)
    found = {our_name(name): p for name, p in saved.named_parameters()}
    start = {our_name(name): p for name, p in before.named_parameters()}
    for name, weight in join_ranks(results)["weights"].items():
        assert torch.equal(weight.to(saved.dtype), found[name]), name
        assert not torch.equal(weight, start[name]), f"{name} has learnt nothing"
    assert saved.dtype == options.get("dtype", torch.float32)
    assert not list(tmp_path.glob("*.tmp-*"))
    assert all(result["figures"] == results[0]["figures"] for result in results)
    loss, *others = evaluate_plainly(saved.eval())
    assert results[0]["figures"][0] == pytest.approx(loss, rel=1e-6)
    assert results[0]["figures"][1:] == others

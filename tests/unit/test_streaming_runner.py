"""Stages that stream against the same stages on a pipeline: losses, weights, evaluation.

The pipeline is held against plain transformers elsewhere. All here is one process.
"""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers

from commands.train import streaming_topology
from loss_fn import sft
from options.train import RunConfig
from pp_models import CausalLMStage, stage_class_of
from prompt_fn import auto, fill
from stageline.checkpoint.few_bit import released
from stageline.checkpoint.load import load_split_model
from stageline.modules.chunked_loss import LossByToken
from stageline.modules.lora import is_lora_name
from stageline.modules.methods import Methods
from stageline.modules.quantised import Quantization, _stored, base_bytes, quantise_layers
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.seeds import derive_seed, seed_host
from stageline.streaming.host_weights import host_bytes, shell_of
from stageline.streaming.lanes import Lane
from stageline.streaming.plan import Plan, costs_of
from stageline.streaming.runner import StreamingRunner, even_plan
from stageline.training.evaluation import evaluate
from stageline.training.loss_part import LossPart
from stageline.training.optimizers import optimizer_groups
from stageline.training.precision import MasterWeights
from stageline.training.step import TrainStep
from tests.helpers.few_bit import write_fp8
from tests.helpers.late_queues import late_lanes
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import shake, tiny_whole
from tests.helpers.tiny_models import TEXT, VISION_LANGUAGE, tiny_config, tiny_processor
from tests.helpers.tiny_vision_batches import vision_micro_batches

NUM_STAGES = 4
LORA = {"llm_lora_num": 1, "lora_rank": 2, "lora_dropout": 0.3, "frozen_lm_head": True}


@pytest.fixture(autouse=True)
def alone():
    """Open a process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@functools.cache
def processor_of(family):
    try:
        return tiny_processor(family)
    except ImportError as error:
        pytest.skip(str(error))


def save_whole(family, folder, **overrides):
    if family == "gpt_oss":
        sizes = TEXT | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
        torch.manual_seed(3)
        config = transformers.GptOssConfig(**sizes | overrides)
        shake([transformers.AutoModelForCausalLM.from_config(config)])[0].save_pretrained(folder)
        return
    if family in VISION_LANGUAGE:
        vocab_size = len(processor_of(family).tokenizer)
        overrides |= {"vocab_size": vocab_size, "max_position_embeddings": 256}
    tiny_whole(family, folder, **overrides)


def stages_of(
    family,
    folder,
    *,
    recomputes=False,
    chunk=0,
    quantization=None,
    experts=None,
    device="cpu",
    **options,
):
    config = transformers.AutoConfig.from_pretrained(folder)
    config._experts_implementation = experts
    kind = stage_class_of(family) if family in VISION_LANGUAGE else CausalLMStage
    stages = []
    for stage in range(NUM_STAGES):
        model = kind(config, stage=stage, num_stages=NUM_STAGES, **options)
        if device == "cpu":
            load_split_model(model, folder, device=device, dtype=torch.float32)
        model.frozen()
        model.logits_chunk = chunk
        if quantization is not None:
            layers = [layer for _, layer in model.layer_list()]
            quantise_layers(layers, quantization, dtype=torch.float32, device=device)
        if recomputes:  # puts functions in the place of the layers' forward
            model.enable_gradient_checkpointing()
        stages.append(model.train())
    return stages


def micro_batches_of(family):
    if family in VISION_LANGUAGE:
        return vision_micro_batches(processor_of(family), prompt_fn=fill, image_token=auto)
    return tiny_micro_batches(family)


def make_optimizer(parameters):
    return torch.optim.AdamW(optimizer_groups(parameters, weight_decay=0.1), lr=1e-2, eps=1e-6)


def train(runner, family, num_steps=2):
    """Train; return the records of each step and of an evaluation, and all weights."""
    last = runner.local.models[-1]
    loss_fn = sft
    if last.logits_chunk:
        loss_fn = LossPart(LossByToken(sft, whole=last.whole, chunk=last.logits_chunk))
    train_step = TrainStep(
        runner,
        make_optimizer=make_optimizer,
        loss_fn=loss_fn,
        learning_rate=lambda step: 1e-2 / (1 + step),
        max_grad_norm=0.5,
        make_weights=getattr(runner, "make_weights", MasterWeights),
    )
    batches = micro_batches_of(family)
    told = []
    for step in range(num_steps):
        result = train_step(batches, step=step)
        told.append((result.loss, result.extra_loss, result.grad_norm))
    found = evaluate(runner, [batches], loss_fn=loss_fn, keep=4)
    assert runner.local.models[0].training, "an evaluation leaves dropout as it was"
    weights = {name: p.detach().clone() for name, p in runner.local.named_parameters().items()}
    return told, (found.loss, found.predicted), weights


def pipeline(stages):
    # micro-batches go backward in their order, as in a stream: sums are the same to the bit
    schedule = make_schedule("interleaved_1f1b", num_ranks=1, stages_per_rank=NUM_STAGES)
    return PipelineRunner(stages, device=torch.device("cpu"), schedule=schedule, seed=5)


def streamed(stages, **options):
    options = {"lanes": [Lane.cpu()], "plan": even_plan(NUM_STAGES, 1), **options}
    return StreamingRunner(stages, seed=5, **options)


CASES = {
    "recomputed": ("llama", {}, {"recomputes": True, "chunk": 3}),
    "lora": ("llama", {}, {**LORA, "quantization": Quantization("nf4", double=True)}),
    "experts": ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}, {}),
    "deepstack": ("qwen3_vl", {}, {}),
    "images": ("llava", {}, {"frozen_vit": True}),
}


EXPERT_LORA = {**LORA, "lora_dropout": 0.0, "chunk": 3}
EXPERT_LORA["lora_target"] = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
KINDS = {
    "nf4": Quantization("nf4"),
    "nf4 double": Quantization("nf4", double=True),
    "int8": Quantization("int8"),
}
# bitsandbytes is wrong on a CPU below 64 columns
SIZES = {"hidden_size": 64, "intermediate_size": 64}
FAMILIES = {"mixtral": SIZES, "gpt_oss": SIZES, "qwen3_moe": {**SIZES, "moe_intermediate_size": 64}}
CASES |= {  # each family, type of values and product once
    f"{family} {kind} {experts}": (
        family,
        FAMILIES[family],
        {**EXPERT_LORA, "quantization": KINDS[kind], "experts": experts, "recomputes": recomputes},
    )
    for family, kind, experts, recomputes in (
        ("mixtral", "int8", "grouped_mm", False),
        ("gpt_oss", "nf4", "grouped_mm", True),
        ("qwen3_moe", "nf4 double", "eager", False),
    )
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_pipeline_to_the_bit(case, tmp_path):
    family, overrides, options = CASES[case]
    save_whole(family, tmp_path, **overrides)
    expected = train(pipeline(stages_of(family, tmp_path, **options)), family)
    made = train(streamed(stages_of(family, tmp_path, **options)), family)
    assert made[:2] == expected[:2]
    assert made[2].keys() == expected[2].keys()
    for name, weight in expected[2].items():
        assert torch.equal(made[2][name], weight), name
    losses = [loss for loss, *_ in made[0]]
    assert len(set(losses)) == len(losses), "nothing was learnt"


@pytest.mark.parametrize(("kind", "family"), [("int8", "llama"), ("nf4", "qwen3_moe")])
def test_a_few_bit_layer_takes_its_packed_bytes(kind, family, tmp_path):
    sizes = {**FAMILIES["qwen3_moe"], "vocab_size": 512}
    save_whole(family, tmp_path, **(sizes if family == "qwen3_moe" else {}))
    lora = EXPERT_LORA if family == "qwen3_moe" else LORA
    models = stages_of(family, tmp_path, **lora, quantization=KINDS[kind])
    packed = [base_bytes([layer for _, layer in model.layer_list()]) for model in models]
    outlines = stages_of(family, tmp_path, **lora, quantization=KINDS[kind], device="meta")
    planned = [base_bytes([layer for _, layer in model.layer_list()]) for model in outlines]
    assert packed == planned
    expected = costs_of(streamed(outlines).pipe._hosted_layers)
    runner = streamed(models)
    costs = costs_of(runner.pipe._hosted_layers)
    plain = costs_of(streamed(stages_of(family, tmp_path, **lora)).pipe._hosted_layers)
    for stage in (1, 2):  # the others have embeddings or a head
        hosted = runner.pipe._hosted_layers[stage]
        values = [home.parameter.detach() for home in hosted.homes]
        own = models[stage].parameters()
        others = sum(value.nbytes for value in own if not hasattr(value, "plain_shape"))
        held = sum(value.nbytes for value in values) - others
        assert packed[stage] <= held <= packed[stage] + 64, "a book of 16 codes"
        assert costs[stage].weight_bytes < plain[stage].weight_bytes

        copies = {id(home.parameter): home.parameter.detach().clone() for home in hosted.homes}
        shell = shell_of(hosted.layer, copies)
        there = {value.data_ptr() for module in shell.modules() for value in _stored(module)}
        assert there and there.isdisjoint(value.data_ptr() for value in values)
    if family == "qwen3_moe":  # a layer runs while the next one comes: what the plan counts
        pairs = zip(expected, expected[1:], strict=False)
        most = max(one.backward_bytes + other.backward_bytes for one, other in pairs)
        train(streamed(models, lanes=[Lane.cpu(budget=int(1.05 * most))]), family, num_steps=1)
        host = host_bytes(streamed(outlines).pipe._hosted_layers, torch.float32)
        assert host_bytes(runner.pipe._hosted_layers, torch.float32) == pytest.approx(
            host, rel=0.05
        )


def test_kept_bits_stream_to_the_bits_of_a_dequantized_run(tmp_path):
    save_whole("qwen3_moe", tmp_path, **FAMILIES["qwen3_moe"])
    write_fp8(tmp_path)
    plain = stages_of("qwen3_moe", tmp_path, **EXPERT_LORA)
    full = base_bytes([layer for _, layer in plain[1].layer_list()])
    expected = train(pipeline(plain), "qwen3_moe")
    methods = Methods(quantization=released(tmp_path))
    models = stages_of("qwen3_moe", tmp_path, **EXPERT_LORA, methods=methods)
    packed = base_bytes([layer for _, layer in models[1].layer_list()])
    runner = streamed(models)
    hosted = runner.pipe._hosted_layers[1]
    others = [p for p in models[1].parameters() if not hasattr(p, "plain_shape")]
    held = sum(home.parameter.nbytes for home in hosted.homes)
    assert held == packed + sum(p.nbytes for p in others) and packed < 0.35 * full
    made = train(runner, "qwen3_moe")
    assert made[:2] == expected[:2]
    adapters = {name for name in expected[2] if is_lora_name(name)}
    assert adapters and all(torch.equal(made[2][name], expected[2][name]) for name in adapters)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a folder with weights."""
    folder = tmp_path_factory.mktemp("llama")
    save_whole("llama", folder)
    return folder


@functools.cache
def on_a_pipeline(folder):
    return train(pipeline(stages_of("llama", folder, **LORA)), "llama")


WAYS = {
    "layer by layer": {"plan": even_plan(NUM_STAGES, 3), "by_layer": True},
    "three late lanes": {"lanes": late_lanes(3), "plan": None},
    "other cuts": {"plan": Plan((range(3),), (range(3, 4), range(2, 3), range(2)))},
    "budget": {"lanes": [Lane.cpu(budget=80_000)], "plan": None},
}


@pytest.mark.parametrize("way", WAYS)
def test_neither_plan_nor_devices_change_a_bit(way, llama):
    expected = on_a_pipeline(llama)
    runner = streamed(stages_of("llama", llama, **LORA), **WAYS[way])
    made = train(runner, "llama")
    assert made[:2] == expected[:2]
    assert all(torch.equal(made[2][name], expected[2][name]) for name in expected[2])
    if way == "budget":
        runner.check_plan(len(micro_batches_of("llama")))
        (lane,) = runner.pipe._lanes
        assert 0 < lane.pool.peak_bytes <= 80_000


def test_tied_weights_are_one_parameter(tmp_path):
    save_whole("llama", tmp_path, tied=True)
    stages = stages_of("llama", tmp_path)
    runner = streamed(stages)
    first, last = stages[0].state_dict(), stages[-1].state_dict()
    assert first["model.embed_tokens.weight"].data_ptr() == last["lm_head.weight"].data_ptr()
    made = train(runner, "llama")
    expected = train(pipeline(stages_of("llama", tmp_path)), "llama")
    # the shares of embedding and head are added up in another order
    for ours, theirs in zip(made[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(list(runner.pipe.optim_parameters())) == len(expected[2])


def test_a_stale_step_is_that_of_the_written_rule(llama):
    """V_(t+1) = W_t: steps 0 and 1 compute with the first weights."""
    batches = micro_batches_of("llama")
    whole = transformers.AutoModelForCausalLM.from_pretrained(llama)
    seen = [{name: p.detach().clone() for name, p in whole.named_parameters()}] * 2
    newest = {name: torch.nn.Parameter(p.clone()) for name, p in seen[0].items()}
    optimizer = make_optimizer(newest)
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    expected = []
    for step in range(3):
        whole.load_state_dict(seen[step])
        whole.zero_grad()
        for batch in batches:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            logits = whole(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
            labels = batch["labels"][:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / count
            loss.backward()
            expected.append(loss.item())
        for name, parameter in whole.named_parameters():
            newest[name].grad = parameter.grad.clone()
        torch.nn.utils.clip_grad_norm_(newest.values(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        seen.append({name: p.detach().clone() for name, p in newest.items()})
    told, _, weights = train(streamed(stages_of("llama", llama), stale=True), "llama", num_steps=3)
    sums = [sum(expected[at : at + len(batches)]) for at in range(0, len(expected), len(batches))]
    assert [loss for loss, *_ in told] == pytest.approx(sums, rel=1e-5)
    assert sums[0] == sums[1] != sums[2]
    for name, value in newest.items():  # the evaluation behind the last step has settled it
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stale", [False, True])
def test_a_skipped_step_leaves_nothing_behind(stale, llama):
    factor = [1.0]

    def poisoned(logits, batch, *, num_targets):
        return sft(logits, batch, num_targets=num_targets) * factor[0]

    results = []
    for factors in ((1.0, 1.0), (1.0, float("nan"), 1.0)):
        runner = streamed(stages_of("llama", llama), stale=stale)
        train_step = TrainStep(
            runner,
            make_optimizer=make_optimizer,
            loss_fn=poisoned,
            learning_rate=lambda step: 1e-2,
            make_weights=runner.make_weights,
        )
        for step, factor[0] in enumerate(factors):
            told = train_step(micro_batches_of("llama"), step=step)
            assert told.is_skipped == (factor[0] != 1.0)
        train_step.weights.settle()
        results.append(runner.local.named_parameters())
    for name, parameter in results[0].items():
        assert torch.equal(results[1][name], parameter), name


def test_a_budget_that_just_fits_is_taken(llama):
    costs = costs_of(streamed(stages_of("llama", llama)).pipe._hosted_layers)
    needed = sum(cost.backward_bytes for cost in costs)
    with pytest.raises(ValueError, match="layer 0 needs"):
        lanes = [Lane.cpu(budget=40_000)]
        streamed(stages_of("llama", llama), lanes=lanes, plan=None).check_plan(2)
    for budget, is_enough in ((needed, True), (needed - 1, False)):
        plan = even_plan(NUM_STAGES, NUM_STAGES)
        runner = streamed(stages_of("llama", llama), lanes=[Lane.cpu(budget=budget)], plan=plan)
        refused = pytest.raises(ValueError, match="stages 0 to 3.*are allowed")
        with contextlib.nullcontext() if is_enough else refused:
            runner.check_plan(2)


@pytest.mark.parametrize("kind", [pipeline, streamed])
def test_the_passes_settle_what_an_update_draws(kind, llama):
    """Whatever was drawn in them; and their sum is that of the shares of the loss."""
    batches, drawn = micro_batches_of("llama"), []
    for draws in (0, 3):
        runner, losses = kind(stages_of("llama", llama)), []
        getattr(runner, "make_weights", MasterWeights)(runner.local.named_parameters())

        def loss_fn(logits, batch, draws=draws, losses=losses):
            torch.rand(draws)
            losses.append(sft(logits, batch, num_targets=torch.tensor(50.0)))
            return losses[-1]

        runner.seeds.begin(7)
        loss = runner.step(batches, loss_fn=loss_fn)
        drawn.append(torch.rand(2).tolist())
        assert loss.item() == pytest.approx(sum(losses).item(), rel=1e-6)
    seed_host(derive_seed(5, "update", 7))  # the host draws by seed and step only
    assert drawn == [torch.rand(2).tolist()] * 2


@pytest.mark.parametrize("trusted", [False, True])
def test_layers_are_counted_without_the_code_of_a_folder_unless_the_user_says_so(
    trusted, monkeypatch
):
    asked = []

    def load_config(path, *, trust_remote_code):
        asked.append((path, trust_remote_code))
        return tiny_config("llama")

    monkeypatch.setattr("stageline.model_folder.load_config", load_config)
    run = RunConfig(model_path="folder", trust_remote_code=trusted)
    topology = streaming_topology(SimpleNamespace(run=run))
    assert asked == [("folder", trusted)]
    assert topology.num_stages == tiny_config("llama").num_hidden_layers

"""DPO and KTO over stages against trl's trainers on the same ids: loss, figures, gradients."""

import functools
import warnings
import zlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import dataset as parts
from pp_models import CausalLMStage
from prompt_fn import chat
from prompt_fn import none as no_image
from stageline.checkpoint.init import init_split_model
from stageline.data.batches.preference import WithOthers
from stageline.modules.lora import LoRAWrapper, adapters_off
from stageline.modules.losses import row_log_probs
from stageline.pipeline.runner import PipelineRunner
from stageline.training.evaluation import evaluate
from stageline.training.reference import Reference, mixed_batch, reference_table
from stageline.training.step import TrainStep
from tests.helpers.chain import evaluate_chain, run_chain
from tests.helpers.ranks import run_ranks
from tests.helpers.shelf_losses import shelf_loss
from tests.helpers.tiny_batches import join_micro_batches
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

warnings.filterwarnings("ignore", category=FutureWarning)
CPU, F64 = torch.device("cpu"), torch.float64
TOKENIZER = tiny_tokenizer()
CONFIG = tiny_config("llama", vocab_size=len(TOKENIZER))
LORA = {"llm_lora_num": 1, "lora_rank": 2, "frozen_lm_head": True}
GROUPS = ((0, 1), (2,), (3, 4))  # samples of each micro-batch
TEXTS = ("yes", "no it is not", "what?", "7", "the cat is left of the dog")


def question(index):
    return {"role": "user", "content": f"Which digit {'is ' * index}this?"}


def answer(text):
    return [{"role": "assistant", "content": text}]


class Rows:
    """Preferences of both kinds."""

    def __init__(self, labels=(True, False, False, True, True)):
        self.labels = labels

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, row):
        if row >= len(self):
            raise IndexError(row)
        sample = {"id": str(row), "label": self.labels[row]}
        chosen, rejected = answer(TEXTS[row]), answer(TEXTS[row - 2])
        return None, {**sample, "messages": [question(row)], "chosen": chosen, "rejected": rejected}


class Answers(Rows):
    def __getitem__(self, row):
        _, sample = super().__getitem__(row)
        return None, {**sample, "messages": [question(row), *sample["chosen"]]}


def make_batches(part, dataset):
    common = {"prompt": "[QUESTION] [ANSWER]", "prompt_fn": chat, "image_token": no_image}
    common |= {"processor": TOKENIZER, "pad_token_id": 0, "max_token_num": 64}
    return [
        part([dataset[row] for row in rows], **common, stage=0, num_stages=1)
        | {"loss_rows": torch.tensor(rows).repeat_interleave(2 if part is parts.dpo else 1)}
        for rows in GROUPS
    ]


# -- stages and transformers' whole model, with the same weights ------------------------------


def build(stage=0, num_stages=1, *, moved=0.0, **options):
    """Build a stage; `moved` is the distance of the policy from the start."""
    model = CausalLMStage(CONFIG, stage=stage, num_stages=num_stages, dtype=F64, **options)
    init_split_model(model, seed=1, device="cpu", dtype=F64)
    model.frozen()
    move(model, moved)
    return model.train()


@torch.no_grad()
def move(model, by):
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.add_(by * torch.randn(parameter.shape, generator=generator, dtype=F64))


def library_model(stage, merged=None):
    """Return transformers' whole model with the weights of a stage that has all layers."""
    model = AutoModelForCausalLM.from_config(CONFIG).double()
    weights = {n.replace(".lora_module", ""): v for n, v in stage.state_dict().items()}
    for name, delta in (merged or {}).items():
        weights[name] = weights[name] + delta
    model.load_state_dict({n: v for n, v in weights.items() if ".lora." not in n})
    return model


def deltas(stage):
    """Return the change of each weight by the adapters."""
    return {
        f"{name}.weight": module.lora.scale
        * (module.lora.lora_B.weight @ module.lora.lora_A.weight)
        for name, module in stage.named_modules()
        if isinstance(module, LoRAWrapper)
    }


# -- trl --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    """Makes trainers of trl; its own data is not used."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    folder = str(tmp_path_factory.mktemp("trl"))

    def make(kind, model, reference):
        config, trainer = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
        rows = [{"prompt": "a", "completion": c, "label": c == "b"} for c in "bc"]
        if kind == "DPO":
            rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2
        args = {"output_dir": folder, "use_cpu": True, "report_to": [], "bf16": False}
        return trainer(
            model=model,
            ref_model=reference,
            args=config(**args, per_device_train_batch_size=2),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=TOKENIZER,
        )

    return make


def plain(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


def trl_inputs(batches):
    """Return the ids of all micro-batches in the layout of trl's collators."""
    joined = join_micro_batches([plain(batch) for batch in batches])
    if "loss_pairs" in batches[0]:  # all chosen rows, then all rejected ones
        joined = {n: torch.cat([v[::2], v[1::2]]) for n, v in joined.items()}
    told = {"completion_mask": (joined.pop("labels") != -100).long(), **joined}
    if "loss_is_wanted" in batches[0]:
        mixed = join_micro_batches([plain(mixed_batch(batch)) for batch in batches])
        mixed["completion_mask"] = (mixed.pop("labels") != -100).long()
        told |= {f"KL_{name}": value for name, value in mixed.items()}
        told["label"] = torch.cat([batch["loss_is_wanted"] for batch in batches])
    return told


def trl_step(trainer, batches):
    """Loss, figures and gradients by name."""
    model = trainer.model.train()
    model.zero_grad()
    trainer._metrics["train"].clear()
    loss = trainer.compute_loss(model, trl_inputs(batches))
    loss.backward()
    figures = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), figures, {n: p.grad.clone() for n, p in model.named_parameters()}


# -- Stageline, all stages in one process -----------------------------------------------------


def with_reference(stages, references, batches):
    """Do the same as `Reference`, over a chain of stages."""
    log_probs = functools.partial(
        evaluate_chain, loss_fn=lambda output, batch: row_log_probs(output, batch["labels"])
    )
    own = log_probs(references, batches)
    added = [{"loss_reference": value} for value in own]
    if "loss_is_wanted" in batches[0]:
        mixed = [mixed_batch(batch) for batch in batches]
        ratios = torch.cat(log_probs(stages, mixed)) - torch.cat(log_probs(references, mixed))
        added = [{**one, "loss_kl": ratios.mean().clamp(min=0)} for one in added]
    return [{**batch, **one} for batch, one in zip(batches, added, strict=True)]


def our_step(stages, batches, part):
    figures = {}
    totals = {name: torch.tensor(float(n)) for name, n in part.count(batches).items()}

    def loss_of(output, batch):
        loss, told = part(output, batch, totals=totals, step=0)
        for name, value in told.items():
            figures[name] = figures.get(name, 0.0) + value.item()
        return loss

    loss = sum(run_chain(stages, batches, loss_fn=loss_of)).item()
    named = {n: p for model in stages for n, p in model.named_parameters()}
    return loss, figures, {n: p.grad for n, p in named.items() if p.grad is not None}


def check_same(ours, theirs, *, gradients):
    loss, figures, grads = ours
    their_loss, told, _ = theirs
    assert loss == pytest.approx(their_loss, rel=2e-6)
    for name, own in (("chosen", "rewards_chosen"), ("rejected", "rewards_rejected")):
        if f"rewards/{name}" in told:
            # differences of two log-probabilities in float32, at trl
            assert figures[own] == pytest.approx(told[f"rewards/{name}"], abs=2e-6)
    if "rewards/accuracies" in told:
        assert figures["reward_accuracy"] == pytest.approx(told["rewards/accuracies"])
    if "kl" in told and "kl" in figures:
        assert figures["kl"] == pytest.approx(told["kl"], abs=1e-5)
    assert grads.keys() == gradients.keys()
    for name, grad in grads.items():
        largest = gradients[name].abs().max().clamp(min=1e-6).item()
        torch.testing.assert_close(grad, gradients[name], rtol=0, atol=2e-5 * largest, msg=name)


def lora_gradients(stage, whole):
    """Return the adapters' gradients, from those of the weights that they are added to."""
    found = {}
    for name, module in stage.named_modules():
        if isinstance(module, LoRAWrapper):
            grad, lora = whole[f"{name}.weight"], module.lora
            found[f"{name}.lora.lora_A.weight"] = lora.scale * lora.lora_B.weight.T @ grad
            found[f"{name}.lora.lora_B.weight"] = lora.scale * grad @ lora.lora_A.weight.T
    return {name: grad.detach() for name, grad in found.items()}


PLAIN = ("sigmoid", "ipo", "apo_zero", "apo_down", "sppo_hard", "nca_pair")
PAIR_CASES = {"hinge": {"beta": 0.5}, "robust": {"label_smoothing": 0.2}}
PAIR_CASES |= {loss_type: {} for loss_type in PLAIN}


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_dpo_of_all_weights_is_trl(trl_trainer, num_stages):
    batches = make_batches(parts.dpo, Rows())
    reference = build()
    trainer = trl_trainer("DPO", library_model(build(moved=0.05)), library_model(reference))
    for loss_type, own in PAIR_CASES.items() if num_stages == 2 else [("sigmoid", {})]:
        trainer.loss_types, trainer.loss_weights = [loss_type, "sft"], [1.0, 0.5]
        for name, value in {"beta": 0.1, "label_smoothing": 0.0, **own}.items():
            setattr(trainer, name, value)
        wanted = trl_step(trainer, batches)
        stages = [build(stage, num_stages, moved=0.05) for stage in range(num_stages)]
        told = with_reference(stages, [reference], batches)
        loss = shelf_loss("dpo", loss_type=loss_type, sft_weight=0.5, **own)
        check_same(our_step(stages, told, loss), wanted, gradients=wanted[2])


@pytest.mark.parametrize("num_stages", [1, 4])
def test_dpo_of_adapters_is_trl(trl_trainer, num_stages):
    batches = make_batches(parts.dpo, Rows())
    whole = build(moved=0.2, **LORA)
    trainer = trl_trainer("DPO", library_model(whole, merged=deltas(whole)), library_model(whole))
    wanted = trl_step(trainer, batches)
    stages = [build(stage, num_stages, moved=0.2, **LORA) for stage in range(num_stages)]
    with adapters_off(stages):
        without = with_reference(stages, stages, batches)
    told = [{**batch, "loss_reference": batch["loss_reference"].clone()} for batch in without]
    gradients = lora_gradients(whole, wanted[2])
    check_same(our_step(stages, told, shelf_loss("dpo")), wanted, gradients=gradients)


@pytest.mark.parametrize("labels", [(True, False, False, True, True), (True,) * 5, (False,) * 5])
def test_kto_is_trl(trl_trainer, labels):
    batches = make_batches(parts.kto, WithOthers(Answers(labels)))
    reference = build()
    trainer = trl_trainer("KTO", library_model(build(moved=-0.05)), library_model(reference))
    trainer.desirable_weight, trainer.undesirable_weight = 1.5, 0.7
    for use_kl in (True, False):
        trainer.calculate_KL = use_kl
        trainer.loss_type = "kto" if use_kl else "apo_zero_unpaired"
        wanted = trl_step(trainer, batches)
        assert not use_kl or wanted[1]["kl"] > 0, "the baseline has to count"
        stages = [build(stage, 2, moved=-0.05) for stage in range(2)]
        told = with_reference(stages, [reference], batches)
        weights = {"desirable_weight": 1.5, "undesirable_weight": 0.7, "use_kl": use_kl}
        ours = our_step(stages, told, shelf_loss("kto", **weights))
        check_same(ours, wanted, gradients=wanted[2])


# -- ranks ------------------------------------------------------------------------------------


KINDS = {
    "dpo": lambda: (shelf_loss("dpo"), make_batches(parts.dpo, Rows())),
    "kto": lambda: (shelf_loss("kto"), make_batches(parts.kto, WithOthers(Answers()))),
}
MOVED = {  # (kind, all weights): so far that the policy comes to like answers of other rows
    ("dpo", False): 0.3,
    ("kto", False): 0.3,
    ("dpo", True): 0.05,
    ("kto", True): -0.05,
}


def train(rank, num_ranks, schedule, kind, folder=None):
    """One step of a moved policy on real ranks, then the held-out figures of the same rows."""
    loss_fn, batches = KINDS[kind]()
    options = {} if folder else LORA
    mine = [rank] if schedule == "1f1b" else [rank, 3 - rank]
    num_stages = num_ranks if schedule == "1f1b" else 4
    models = [build(stage, num_stages, **options) for stage in mine]
    runner = PipelineRunner(models, device=CPU, schedule=schedule)
    source = None
    if folder:
        made = {"path": folder / "t.safetensors", "key": "k", "needs_kl": kind == "kto"}
        made |= {"num_samples": 5}
        source = reference_table(runner, [batches], **made, is_start=True)
        again = reference_table(runner, [], **made, is_start=False)
        assert (source.values is None) == (again.values is None)
        assert source.values is None or torch.equal(source.values, again.values)
    for model in models:
        move(model, MOVED[kind, bool(folder)])
    prepare = Reference(runner, loss=loss_fn, source=source)
    step = TrainStep(
        runner,
        make_optimizer=lambda named: torch.optim.SGD(named.values(), lr=0.0) if named else None,
        loss_fn=loss_fn,
        learning_rate=lambda step: 0.0,
        prepare=prepare,
    )
    result = step(batches, step=0)
    held_out = evaluate(runner, [batches], loss_fn=loss_fn, prepare=prepare, keep=5)
    return {
        "loss": result.loss,
        "norm": result.grad_norm,
        "figures": result.figures,
        "samples": result.num_samples,
        "held out": (held_out.loss, held_out.figures, len(held_out.predicted)),
    }


@pytest.mark.parametrize(
    ("schedule", "kind", "is_full"),
    [("1f1b", "dpo", False), ("zbv", "kto", False), ("1f1b", "kto", True), ("zbv", "dpo", True)],
)
def test_two_ranks_are_one_process(tmp_path, schedule, kind, is_full):
    options = {} if is_full else LORA
    loss_fn, batches = KINDS[kind]()
    policy, start = build(moved=MOVED[kind, is_full], **options), build(**options)
    told = with_reference([policy], [start], batches)
    loss, figures, grads = our_step([policy], told, loss_fn)
    norm = sum(float(grad.square().sum()) for grad in grads.values()) ** 0.5
    assert kind == "dpo" or figures["kl"] > 0, "the baseline has to count"
    folder = tmp_path if is_full else None
    for found in run_ranks(train, 2, 2, schedule, kind, folder):
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        assert found["norm"] == pytest.approx(norm, rel=1e-6)
        assert found["figures"] == pytest.approx(figures, abs=1e-6)
        assert found["samples"] == 5
        held_out, held_out_figures, num_predicted = found["held out"]
        assert held_out == pytest.approx(loss, rel=1e-6) and num_predicted == 5
        assert held_out_figures == pytest.approx(figures, abs=1e-6)

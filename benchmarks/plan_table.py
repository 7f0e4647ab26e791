"""Which model trains on which cards, by the planner: writes docs/plan_table.md.

Needs the config.json files of data/configs alone: no weights, no GPU. Bytes are counted on passes
without numbers; seconds come from data sheets.
Usage: plan_table.py [--counts FOLDER] [--only MODEL]   # counts are kept there and taken again
"""

import argparse
import datetime
import json
import math
import sys
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from loss_fn import sft
from pp_models import CausalLMStage, VisionLanguageStage
from stageline.modules.expert_weight import DENSE_BYTES, num_experts
from stageline.modules.methods import Methods
from stageline.modules.quantised import Quantization
from stageline.pipeline.schedules import make_schedule
from stageline.planner import estimate
from stageline.planner.estimate import (
    KEPT_FREE,
    Cost,
    ItemRun,
    MemoryRules,
    ModelCosts,
    Workload,
    hand_over_seconds,
    measure,
    outline_of,
)
from stageline.planner.partition import AS_GOOD, Placement

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "data/configs"
PAGE = ROOT / "docs/plan_table.md"
TOKENS, SAMPLES, PATCHES = 2048, 32, 1024  # of a row; of a step; of its image
RULES = MemoryRules(optimizer_bytes=8.0)  # AdamW: two float32 moments; fused, so nothing beside it
NUM_CARDS = (1, 2, 4, 8)
SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2))  # and stages a card
ADAPTER = {"llm_lora_num": 1, "lora_rank": 16, "frozen_lm_head": True}
NF4 = {"methods": Methods(quantization=Quantization("nf4", double=True))}
ON_EXPERTS = ADAPTER | {"lora_target": ["all-linear", r".*experts\.[a-z_]*proj"]}
WAYS = {"full": {}, "LoRA": ADAPTER, "QLoRA": ADAPTER | NF4}
# of mixtures of experts: adapters on the experts, too
WAYS |= {"LoRA on experts": ON_EXPERTS, "QLoRA on experts": ON_EXPERTS | NF4}
# model -> the text model whose layers it has; its tower is counted by hand
TEXT_TWINS = {"Qwen2.5-VL-7B": "Qwen2.5-7B", "InternVL3-8B": "Qwen2.5-7B"}
ORDER = (
    *("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-VL-7B", "Mistral-7B-v0.3", "InternVL3-8B"),
    *("Llama-3.1-8B", "gemma-2-9b", "phi-4", "gpt-oss-20b", "Gemma-4-26B-A4B"),
    *("GLM-4.7-Flash", "Qwen3-30B-A3B", "Qwen2.5-32B", "Qwen3.5-35B-A3B"),
    *("Llama-3.1-70B", "Qwen2.5-72B"),
)


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: MiB, and dense bf16 products with float32 sums."""

    name: str
    gigabytes: int
    mebibytes: int
    flops_per_second: float

    @property
    def capacity(self):
        """Bytes that the planner fills."""
        return int(self.mebibytes * 2**20 * (1 - KEPT_FREE))


CARDS = (
    Card("RTX 4090", 24, 24564, 165e12),
    Card("L40S", 48, 46068, 362e12),
    Card("H100 SXM", 80, 81559, 989e12),
)


def count(outline, workload, *, flops_per_second):
    """The costs on a GPU that is not there: exact bytes, and the seconds of its data sheet.

    Tensors have shapes and no numbers, so a model of any size is counted on any machine. No real
    pass is as fast. The workload is on the CPU, whose attention saves what that of a GPU does. A
    model that looks at numbers in its forward pass, as most vision towers do, cannot be counted.
    """

    class Counted(ItemRun):
        def time(self):
            found = {}
            for kind in (kind for kinds in self.sequences() for kind in kinds):
                with FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS) as counter:
                    self.run_pass(kind)
                found[kind] = counter.get_total_flops() / flops_per_second
            return found

    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = {name: torch.zeros_like(value) for name, value in workload.batch.items()}
        filled = replace(outline, make_piece=_filled(outline.make_piece))
        with mock.patch.object(estimate, "ItemRun", Counted):
            costs = measure(filled, replace(workload, batch=batch))
    return replace(costs, hand_over=hand_over_seconds(costs.border, on_cpu=False))


def _filled(make_piece):
    """Builds pieces on meta, then gives them tensors of the mode around; tied ones stay tied."""

    def make(*, device, **others):
        piece = make_piece(device=torch.device("meta"), **others)
        made = {}
        for store in (s for m in piece.modules() for s in (m._parameters, m._buffers)):
            for name, old in store.items():
                if old is None:
                    continue
                new = torch.empty(old.shape, dtype=old.dtype, device=device)
                if isinstance(old, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                store[name] = made.setdefault(id(old), new)
        return piece

    return make


# what torch's counter leaves out, by the shapes of the arguments: attention of a CPU, and experts,
# of which each row meets one
_ATEN = torch.ops.aten
_MORE_FLOPS = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda *qkv, **_: sdpa_flop_count(*qkv[:3]),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda *gqkv, **_: (
        sdpa_backward_flop_count(*gqkv[:4])
    ),
    _ATEN._grouped_mm: lambda rows, weights, *_, **__: 2 * rows[0] * rows[1] * weights[-1],
}


def make_piece(name, way):
    """Builds pieces of a model from its config alone."""
    is_visual = name in TEXT_TWINS
    kind = VisionLanguageStage if is_visual else CausalLMStage
    options = WAYS[way] | ({"frozen_vit": True} if is_visual else {})
    paths = {"config_path": str(CONFIGS / name), "processor_path": None, "checkpoint_path": None}

    def make(**given):
        options_of_all = {"is_piece": True, "dtype": torch.bfloat16, "gradient_checkpointing": True}
        return kind.build(**paths, **options_of_all, **options, **given)[0]

    return make


def count_model(name, way, folder):
    """The costs of a model at 1e12 products a second, counted once."""
    file = folder / f"{name}-{way}.json"
    if not file.exists():
        costs = _count(name, way, folder)
        plain = ModelCosts(**{one.name: getattr(costs, one.name) for one in fields(ModelCosts)})
        file.write_text(json.dumps(asdict(plain)))
    found = json.loads(file.read_text())
    found |= {key: Cost(**found[key]) for key in ("overhead", "first", "last", "tied")}
    found["layers"] = tuple(Cost(**layer) for layer in found["layers"])
    return ModelCosts(**found | {"shape": tuple(found["shape"])})


def _count(name, way, folder):
    if name not in TEXT_TWINS and not way.startswith("Q"):
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        workload = Workload({"input_ids": ids, "labels": ids}, _loss_for, torch.device("cpu"))
        return count(outline_of(make_piece(name, way)), workload, flops_per_second=1e12)
    outline = outline_of(make_piece(name, way))
    if way.startswith("Q"):  # passes as LoRA's, above other weights, of which some are unpacked
        costs = count_model(name, way[1:], folder)
        unpacked = 2 * largest_matrix(name)
        if num_experts_of(name):  # as many as a GPU's grouped products take at a time
            unpacked *= max(1, DENSE_BYTES // unpacked)
        layers = (
            replace(old, weights=new.weights, transient=old.transient + unpacked)
            for old, new in zip(costs.layers, outline.layers, strict=True)
        )
        return replace(costs, layers=tuple(layers))
    costs = count_model(TEXT_TWINS[name], way, folder)
    text = outline_of(make_piece(TEXT_TWINS[name], way))
    tower = outline.first.num_parameters - text.first.num_parameters
    first = replace(_with_facts(costs.first, outline.first), forward=2 * tower * PATCHES / 1e12)
    layers = map(_with_facts, costs.layers, outline.layers)
    last = _with_facts(costs.last, outline.last)
    return replace(costs, first=first, layers=tuple(layers), last=last, front=outline.front)


def largest_matrix(name):
    """The numbers of the largest matrix in a layer; each expert has its own."""
    whole = make_piece(name, "full")(stage=0, num_stages=1, partition=None, device="meta")
    weights = (p for _, layer in whole.layer_list() for p in layer.parameters() if p.ndim > 1)
    return max(math.prod(weight.shape[-2:]) for weight in weights)


def num_experts_of(name):
    """The number of experts of a layer; 0: it has none."""
    whole = make_piece(name, "full")(stage=0, num_stages=1, partition=None, device="meta")
    return max(map(num_experts, whole.modules()))


def ways_of(name):
    """The ways to train that a table has a column for."""
    ways = ["full", "LoRA", "QLoRA"]
    return [*ways, "QLoRA on experts"] if num_experts_of(name) else ways


def _with_facts(cost, facts):
    names = ("num_parameters", "num_trainable", "weights", "gradients", "masters", "trains")
    return replace(cost, **{name: getattr(facts, name) for name in names})


def _loss_for(model):
    return lambda output, batch: sft(output, batch, num_targets=torch.tensor(1.0))


def at_speed(costs, flops_per_second):
    """The same costs with the seconds of a card."""
    share = 1e12 / flops_per_second
    names = ("forward", "backward", "input_grad", "weight_grad")

    def scaled(cost):
        return replace(cost, **{name: getattr(cost, name) * share for name in names})

    ends = {name: scaled(getattr(costs, name)) for name in ("overhead", "first", "last")}
    return replace(costs, layers=tuple(map(scaled, costs.layers)), **ends)


def plan(costs, num_cards, card):
    """The way to run a step on these cards: (what to expect, bytes that are too much)."""
    found = []
    for name, each in SCHEDULES if num_cards > 1 else SCHEDULES[:1]:
        if num_cards * each > costs.num_layers:
            continue
        schedule = make_schedule(name, num_ranks=num_cards, stages_per_rank=each)
        capacities = (card.capacity,) * num_cards
        placement = Placement(costs, schedule, SAMPLES, RULES, capacities, most_steps=8)
        expectation = placement.expect(placement.by_seconds())
        found.append((placement.overshoot(expectation.memory), expectation))
    excess = min(found, key=lambda one: one[0])[0]
    fitting = [one for one in found if one[0] == excess]
    best = min(expectation.seconds for _, expectation in fitting)
    # of ways that are as fast the simplest, which comes first
    chosen = next(e for _, e in fitting if e.seconds <= best * AS_GOOD)
    return chosen, excess


def cell(expectation, excess):
    """The words of a cell."""
    peak = max(rank.peak for rank in expectation.memory) / 2**30
    if excess:
        return f"no: {peak:.0f} GiB"
    schedule = expectation.schedule
    words = f"{peak:.0f} GiB, {expectation.seconds:.2g} s"
    if schedule.num_ranks == 1:
        return words
    split = ",".join(map(str, expectation.partition))
    return f"{words}, {schedule.name} {split}"


def tables(folder, names):
    """Lines of a table for each model, and of the summary of all."""
    lines, summary = [], []
    for name in names:
        counted = {way: count_model(name, way, folder) for way in ways_of(name)}
        total = sum((c for c in counted["full"].layers), Cost()).num_parameters
        total += counted["full"].first.num_parameters + counted["full"].last.num_parameters
        total -= counted["full"].tied.num_parameters
        lines += [
            "",
            f"## {name}",
            "",
            f"{total:,} parameters, {counted['full'].num_layers} layers",
        ]
        lines += ["", f"| cards | {' | '.join(counted)} |", "|---" * (len(counted) + 1) + "|"]
        fewest = {way: [] for way in counted}
        for card in CARDS:
            speedy = {way: at_speed(costs, card.flops_per_second) for way, costs in counted.items()}
            is_known = dict.fromkeys(counted, False)
            for num_cards in NUM_CARDS:
                cells = []
                for way, costs in speedy.items():
                    expectation, excess = plan(costs, num_cards, card)
                    cells.append(cell(expectation, excess))
                    if not excess and not is_known[way]:
                        is_known[way] = True
                        fewest[way].append(f"{num_cards} x {card.gigabytes}")
                lines.append(f"| {num_cards} x {card.gigabytes} GB | {' | '.join(cells)} |")
                print(name, lines[-1], flush=True)
        told = [", ".join(found) or "more than 8" for found in fewest.values()]
        summary.append(f"| {name} | {' | '.join([*told, '-'][:4])} |")
    return lines, summary


HEAD = """# Which model trains on which GPUs

After this page you know how many GPUs of 24, 48 or 80 GB sixteen well-known models need. For your
model, data and GPUs:

```bash
stageline plan examples/sft_lora_qwen2_5_7b.yaml --device-memory 24
```

Made on {date} by `python benchmarks/plan_table.py` from the `config.json` files in `data/configs`.
**Computed, not measured on a GPU.** Bytes are counted by the planner of `stageline plan` on meta
tensors. Seconds are those of the data sheet ({cards}; dense bf16 products). Real steps usually
reach a third to a half of that speed; use them to compare schedules, splits and GPUs.

A step has {samples} sequences of {tokens} tokens, one per micro-batch, with `--bf16
--gradient-checkpointing`, and AdamW with float32 moments and master weights (18 bytes per trained
parameter with its gradient). LoRA has rank 16 on every linear layer of the language model; QLoRA
adds `--quantization nf4 --double-quantization`, which leaves embeddings, LM head and routers in
bf16. Experts are quantized one by one, and get adapters only in the column "QLoRA on experts"
(`--lora.target 'all-linear,.*experts\\.[a-z_]*proj'`). Vision towers are frozen and see one
image of 448 x 448 pixels; their activations are not counted. Of Gemma 4 and Qwen3.5 it is the text
model, and GLM-4.7-Flash is without its layer for drafts.
Every GPU is a rank of one pipeline, and is full at 95 % of the memory that its driver
shows.

A cell has the peak of the fullest GPU, the seconds of a step's forward and backward passes, the
schedule, and the layers of each stage: with two stages per GPU, `interleaved_1f1b` deals them out
in turn and `zbv` folds them. "no" has the peak that would be needed; shorter sequences,
`--logits-chunk`, `--optimizer adamw_8bit` or [streaming](streaming.md) may help. Where a few GPUs
are enough, more are better used as [replicas](choosing.md).

Five rows by hand. A matrix of n numbers in nf4 has n/2 bytes, a scale of one byte for each 64, and
4 bytes for each 256 scales and 4 for their mean. In a layer of Qwen3-30B-A3B, 128 experts of
1,536 x 2,048 and 2,048 x 768 are 603,979,776 numbers in 311,575,552 bytes; attention has 9,736,720
bytes, router and norms in bf16 532,992, and 278,528 numbers of LoRA 557,056. That is 322,402,320
bytes, and 15,475,311,360 for 48 layers; in bf16 the experts take 57,982,058,496. In a layer of
gpt-oss-20b, 32 experts of 2,880 x 5,760 and 2,880 x 2,880 are 410,767,616 bytes, attention
13,692,256, biases, router and norms 764,992, LoRA 663,552: 10,221,321,984 for 24 layers. In one of
GLM-4.7-Flash 64 experts of 3,072 x 2,048 and 2,048 x 1,536 are 311,575,040 bytes, latent attention
11,224,276, the shared expert 4,868,364, router and norms 272,896, LoRA 1,239,040: 329,179,616 in
each of 46, and 45,765,344 in the first, which is dense. In one of Qwen3.5-35B-A3B 256 experts of
1,024 x 2,048 and 2,048 x 512 are 415,434,752, linear attention 17,377,332, the shared expert
1,622,796, the rest in bf16 1,126,784, LoRA 1,165,344: 436,727,008 in each of 30; full attention
takes 14,064,144, the rest 1,061,888, LoRA 999,456: 433,183,036 in each of 10. In one of
Gemma-4-26B-A4B 128 experts of 1,408 x 2,816 and 2,816 x 704 are 392,714,752, sliding attention
17,850,640, the MLP 9,204,240, the rest 767,232, LoRA 1,320,960: 421,857,824 in each of 25, and
429,370,332 in each of 5 with full attention. Adapters on experts add 32 bytes for each row and each
column of an expert's matrices: 26,214,400 in a layer of Qwen3-30B-A3B, 14,745,600 of gpt-oss-20b,
17,825,792 of GLM-4.7-Flash, 46,137,344 of Qwen3.5 and 31,719,424 of Gemma 4. All equal
the planner's weights to the byte. Embedding and LM head are in bf16: 1.2 GiB for
Qwen3-30B-A3B and GLM-4.7-Flash, 2.2 for gpt-oss, 1.9 for Qwen3.5, 1.4 for Gemma 4.

The fewest GPUs of each size (number x GB; more than eight of a size that is missing):

| model | full | LoRA | QLoRA | QLoRA on experts |
|---|---|---|---|---|"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--counts", type=Path, default=ROOT / ".cache/plan_table")
    parser.add_argument("--only", choices=ORDER)
    arguments = parser.parse_args()
    arguments.counts.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    names = [arguments.only] if arguments.only else ORDER
    lines, summary = tables(arguments.counts, names)
    if arguments.only:
        return
    cards = ", ".join(
        f"{card.gigabytes} GB: {card.name}, {card.flops_per_second / 1e12:.0f} TFLOPS"
        for card in CARDS
    )
    head = HEAD.format(
        date=datetime.date.today(), cards=cards, samples=SAMPLES, tokens=f"{TOKENS:,}"
    )
    PAGE.write_text("\n".join([head, *summary, *lines]) + "\n")


if __name__ == "__main__":
    main()

"""Mllama without a pipeline: its processor's output, random starts, export, recomputation."""

import numpy
import pytest
import torch
import transformers
from PIL import Image

import pp_models  # noqa: F401 - puts the parts on the shelf
from commands.export import make_stages
from pp_models import CrossAttentionStage
from register import train_model_register
from stageline.checkpoint.init import init_split_model
from stageline.checkpoint.save import save_split_model
from stageline.data.batches.batch import add_image_inputs, encode_sample, pad_rows
from stageline.data.text.processor import load_processor, save_processor
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import UserError
from stageline.stages.packing import check_packing
from stageline.verify.export import ExportError
from tests.helpers.exports import export_folder
from tests.helpers.tiny_mllama import mllama_micro_batch
from tests.helpers.tiny_models import tiny_mllama_config, tiny_mllama_processor

# width, height of each row's images: one to four tiles, two behind each other, none
SIZES = (((20, 30),), (), ((64, 16), (16, 16), (16, 64)), ((40, 90), (10, 10)))
ORDERS = ("i t", "t", "i t i i t", "t i i t")
TOKEN = "<|image|>"


def picture(size):
    generator = numpy.random.default_rng(size[0])
    return Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8))


def rows():
    return [[picture(size) for size in row] for row in SIZES]


def texts():
    return [["<s>", *(TOKEN if p == "i" else "Which digit?" for p in o.split())] for o in ORDERS]


def our_batch(processor, images, *, side, with_pixels=True):
    encoded = []
    for pieces, row in zip(texts(), images, strict=True):
        rendered = Rendered(tuple(Piece(p, is_image=p == TOKEN) for p in pieces), is_chat=True)
        encoded.append(encode_sample(rendered, row, processor=processor, name="row"))
    batch = pad_rows(encoded, pad_token_id=0, side=side, with_labels=False)
    names = ["row"] * len(images)
    add_image_inputs(batch, images, processor=processor, names=names, with_pixels=with_pixels)
    return batch


def test_everything_equals_the_librarys_processor(tmp_path):
    side = "left"
    save_processor(tiny_mllama_processor(), tmp_path)
    processor = load_processor(tmp_path)
    options = {"padding": True, "padding_side": side, "add_special_tokens": False}
    try:
        expected = processor(
            text=["".join(pieces) for pieces in texts()],
            images=rows(),
            return_tensors="pt",
            **options,
        )
    # older releases refuse a batch that mixes rows with and without images
    except ValueError as error:
        pytest.skip(str(error))
    batch = our_batch(processor, rows(), side=side)
    assert set(batch) == set(expected)
    for name, value in expected.items():
        assert torch.equal(batch[name], value), name
    later = our_batch(processor, rows(), side=side, with_pixels=False)
    assert set(expected) - set(later) == {"pixel_values"}
    for name, value in later.items():
        assert torch.equal(value, expected[name]), name


def make_stage(*, stage=0, num_stages=1, dtype=torch.float32, **options):
    model = CrossAttentionStage(
        tiny_mllama_config(), stage=stage, num_stages=num_stages, dtype=dtype, **options
    )
    init_split_model(model, seed=3, device="cpu", dtype=dtype)
    model.frozen()
    return model.train()


def test_a_random_start_is_independent_of_the_number_of_stages():
    one, seen = make_stage().state_dict(), {}
    for stage in range(3):
        state = make_stage(stage=stage, num_stages=3).state_dict()
        assert not seen.keys() & state.keys()
        seen |= state
    assert seen.keys() == one.keys()
    assert all(torch.equal(seen[name], tensor) for name, tensor in one.items())
    whole = transformers.AutoModelForImageTextToText.from_config(tiny_mllama_config())
    assert {name for name, _ in whole.named_parameters()} == seen.keys()


def test_packing_is_refused_before_training():
    for stage in range(2):
        with pytest.raises(UserError, match="attends to all images of its row"):
            check_packing(make_stage(stage=stage, num_stages=2), rows=1)


@pytest.mark.parametrize("stage", [0, 1])
def test_recomputed_layers_give_equal_gradients(stage):
    """On the second stage the states come as an input, which has a gradient too."""
    results = []
    for recomputes in (False, True):
        model = make_stage(stage=stage, num_stages=2, partition=[2, 3], dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "gate" in name and parameter.numel() == 1:
                    parameter.fill_(0.7)
        if recomputes:
            model.enable_gradient_checkpointing()
        batch = mllama_micro_batch((2, 1))
        generator = torch.Generator().manual_seed(1)
        inputs = (batch["input_ids"],)
        if stage:
            inputs = tuple(
                torch.randn(m.shape, generator=generator, dtype=m.dtype).requires_grad_()
                for m in model.get_batch_input(batch)
            )
        output = model(*inputs, **{n: v for n, v in batch.items() if n != "labels"})
        outputs = output if isinstance(output, tuple) else (output,)
        assert len(outputs) == 2 - stage
        sum(value.square().sum() for value in outputs).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        grads |= {str(i): v.grad for i, v in enumerate(inputs) if v.requires_grad}
        results.append(grads)
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(grad, results[1][name]) for name, grad in results[0].items())
    assert stage == 0 or results[0]["1"].abs().max() > 1e-6


def save_whole(folder):
    """Save a model with open gates, and its processor."""
    processor = tiny_mllama_processor()
    torch.manual_seed(3)
    config = tiny_mllama_config(vocab_size=len(processor.tokenizer))
    whole = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    whole.save_pretrained(folder)
    save_processor(processor, folder)
    return folder


def build(folder, **kwargs):
    part = train_model_register["mllama"]
    paths = {"config_path": str(folder), "processor_path": None, "checkpoint_path": str(folder)}
    return [part(**paths, stage=i, num_stages=2, is_piece=True, **kwargs)[0] for i in range(2)]


def change(stages, *, part=None):
    with torch.no_grad():
        for model in stages:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and part in (None, model.part_of(name)):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return stages


def test_an_export_equals_its_stages_with_and_without_an_image(tmp_path):
    base = save_whole(tmp_path / "base")
    run = save_split_model(change(build(base)), load_processor(base), tmp_path / "run", step=1)
    report = export_folder(run, tmp_path / "out", make_stages=make_stages)
    assert report.verdict.reference == "its 2 stages"
    assert report.verdict.probes == ("text", "image")
    assert report.verdict.difference <= 1e-5
    assert report.notes == ()
    with pytest.raises(ExportError, match=r"\(image, compared with"):
        export_folder(
            run, tmp_path / "no", make_stages=lambda folder: change(make_stages(folder), part="mlp")
        )


def test_an_adapter_is_exported(tmp_path):
    base = save_whole(tmp_path / "base")
    lora = {"vit_lora_num": 1, "mlp_lora_num": 1, "llm_lora_num": 1, "lora_rank": 2}
    stages = change(build(base, frozen_lm_head=True, **lora))
    run = save_split_model(stages, load_processor(base), tmp_path / "run", step=1)
    report = export_folder(run, tmp_path / "out", merge=True, make_stages=make_stages)
    assert report.verdict.reference == "its 2 stages"
    assert report.verdict.difference <= 1e-5


def test_without_images_the_tower_sees_a_placeholder_without_effect():
    model, runs = make_stage(), []
    model.model.vision_model.register_forward_hook(lambda *_: runs.append(1))
    batch = {n: v for n, v in mllama_micro_batch((0, 0)).items() if n != "labels"}
    model(batch["input_ids"], **batch).sum().backward()
    assert runs == [1]
    for name, parameter in model.named_parameters():
        if model.part_of(name) in ("vit", "mlp"):
            assert parameter.grad is None or not parameter.grad.any(), name
        elif ".layers.1." in name or ".layers.3." in name:
            assert parameter.grad is None, name
        else:
            assert parameter.grad.any(), name


def test_layers_that_may_be_passed_by_are_not_gathered_alone():
    model = make_stage(stage=0, num_stages=2, partition=[3, 2])
    layers = model.model.language_model.layers
    assert model.modules_to_shard() == [layers[0], layers[2]]

"""Split load: every tensor of every stage is the whole model's, and nothing is missing unseen."""

import dataclasses
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from pp_models import CausalLMStage, StageModel, VisionLanguageStage
from stageline import folder_loader
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.save import save_split_model
from stageline.checkpoint.shards import disk_state
from stageline.errors import NonFiniteError, UserError
from stageline.modules.stage_names import names_on_disk
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import TYPICAL


def build(folder, *, stage=0, num_stages=1, dtype=torch.float32, **kwargs):
    config = AutoConfig.from_pretrained(folder)
    is_vlm = hasattr(config, "vision_config")
    stage_class = VisionLanguageStage if is_vlm else CausalLMStage
    return stage_class(config, stage=stage, num_stages=num_stages, dtype=dtype, **kwargs)


def load(folder, path=None, *, dtype=torch.float32, **kwargs):
    model = build(folder, dtype=dtype, **kwargs)
    load_split_model(model, path or folder, device="cpu", dtype=dtype)
    return model


@pytest.mark.parametrize(
    ("family", "tied"),
    [*((family, False) for family in TYPICAL), ("gpt2", True), ("gemma3_vl", True)],
)
def test_every_tensor_is_the_whole_models(family, tied, tmp_path):
    whole = tiny_whole(family, tmp_path, tied=tied)
    expected = whole.state_dict()
    buffers = dict(whole.named_buffers())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for num_stages in (1, 4):
        seen = []
        for stage in range(num_stages):
            model = load(tmp_path, stage=stage, num_stages=num_stages)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, expected[name]), name
            for name, buffer in model.named_buffers():
                assert torch.equal(buffer, buffers[name]), name
                assert buffer.dtype == buffers[name].dtype
            seen += [name for name, _ in model.named_parameters()]
        assert set(seen) == {name for name, _ in whole.named_parameters()}
        repeated = {name for name in seen if seen.count(name) > 1}
        assert len(repeated) == (tied and num_stages > 1)


def test_build_reads_by_the_loader_that_it_is_given(tmp_path):
    tiny_whole("llama", tmp_path)
    asked, usual = [], folder_loader()

    def fill(model, checkpoint_path, **options):
        asked.append(checkpoint_path)
        usual.fill(model, None, **options)  # random weights in place of the folder's

    loader = dataclasses.replace(
        usual, fill=fill, processor=lambda path, **options: "mine", pad_token_id=lambda one: 7
    )
    paths = {"config_path": str(tmp_path), "checkpoint_path": str(tmp_path)}
    place = {"processor_path": None, "stage": 0, "num_stages": 2}
    model, processor, pad_token_id = CausalLMStage.build(**paths, **place, loader=loader)
    assert (asked, processor, pad_token_id) == ([str(tmp_path)], "mine", 7)
    random, _, _ = CausalLMStage.build(**{**paths, "checkpoint_path": None}, **place, loader=loader)
    for name, weight in random.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_tied_weight_stays_one_tensor(tmp_path):
    tiny_whole("llama", tmp_path, tied=True)
    one = load(tmp_path)
    assert one.lm_head.weight is one.model.embed_tokens.weight
    last = load(tmp_path, stage=2, num_stages=3)
    assert last.lm_head.weight is last.model.embed_tokens.weight


def test_bfloat16_weights_keep_float32_frequencies_and_are_cast_exactly(tmp_path):
    whole = tiny_whole("llama", tmp_path, dtype=torch.bfloat16)
    model = load(tmp_path, stage=1, num_stages=2, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, whole.model.rotary_emb.inv_freq)
    for name, tensor in load(tmp_path, dtype=torch.float32).state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, whole.state_dict()[name].float())


def test_a_single_file_and_weights_that_outlive_it(tmp_path):
    whole = tiny_whole("qwen3", tmp_path, max_shard_size="1GB")
    model = load(tmp_path, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"")  # a mapped weight would be gone now
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])


def rewrite(folder, change):
    """Applies `change` to the state of a single-file checkpoint."""
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


def test_missing_and_unexpected_names_are_listed(tmp_path):
    tiny_whole("internvl", tmp_path, max_shard_size="1GB")

    def change(state):
        gone = [name for name in state if name.endswith("layers.3.input_layernorm.weight")]
        del state[gone[0]]
        state["adapter_of_mine.weight"] = torch.zeros(2)

    rewrite(tmp_path, change)
    with pytest.raises(UserError) as caught:
        load(tmp_path, stage=1, num_stages=2)
    assert "1 names are missing: model." in str(caught.value)
    assert "layers.3.input_layernorm.weight" in str(caught.value)
    assert "1 names belong to no stage: adapter_of_mine.weight" in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_full_device_is_no_fault_of_the_checkpoint(tmp_path, monkeypatch):
    tiny_whole("llama", tmp_path)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load(tmp_path)


def test_a_missing_expert_is_refused(tmp_path):
    tiny_whole("mixtral", tmp_path, max_shard_size="1GB")

    def change(state):
        del state["model.layers.0.block_sparse_moe.experts.2.w1.weight"]

    rewrite(tmp_path, change)
    with pytest.raises(UserError, match="does not fit stage 0"):
        load(tmp_path)


def test_other_shapes_are_listed(tmp_path):
    tiny_whole("llama", tmp_path, max_shard_size="1GB")
    rewrite(tmp_path, lambda state: state.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(UserError, match=r"model.norm.weight \(file \[3\], model \[16\]\)"):
        load(tmp_path)


def test_nan_is_refused(tmp_path):
    tiny_whole("llama", tmp_path, max_shard_size="1GB")
    rewrite(tmp_path, lambda state: state["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(NonFiniteError, match="model.norm.weight .*model.safetensors: 16 nan"):
        load(tmp_path)


def test_weights_without_the_models_prefix(tmp_path):
    """Load a checkpoint of the base model without a head, as older tools write it."""
    whole = tiny_whole("gpt2", tmp_path, tied=True, max_shard_size="1GB")
    whole.transformer.save_pretrained(tmp_path / "base")
    for stage in range(2):
        model = load(tmp_path, tmp_path / "base", stage=stage, num_stages=2)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, whole.state_dict()[name]), name


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: shutil.rmtree(f), "does not exist"),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "holds neither"),
        (lambda f: next(iter(f.glob("model-*2-of-*"))).unlink(), "is missing"),
        (
            lambda f: (one := next(f.glob("model-*2-of-*"))).write_bytes(one.read_bytes()[:-1]),
            "model-.*2-of-.* cannot be read",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "cannot be read"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"lm_head.weight": "../x.safetensors"}})
            ),
            "plain file name",
        ),
    ],
    ids=["no_folder", "no_weights", "shard_missing", "no_safetensors", "bad_index", "path_outside"],
)
def test_broken_checkpoints_are_named(spoil, message, tmp_path):
    tiny_whole("llama", tmp_path / "whole")
    model = build(tmp_path / "whole")
    spoil(tmp_path / "whole")
    with pytest.raises(UserError, match=message):
        load_split_model(model, tmp_path / "whole", device="cpu", dtype=torch.float32)


def test_fresh_lora_beside_loaded_weights(tmp_path):
    whole = tiny_whole("llama", tmp_path)
    for stage in range(2):
        model = load(tmp_path, stage=stage, num_stages=2, llm_lora_num=1, lora_rank=2)
        key_map = names_on_disk(model)
        for name, tensor in model.state_dict().items():
            if name in key_map:
                assert torch.equal(tensor, whole.state_dict()[key_map[name]])
            elif name.endswith("lora_B.weight"):
                assert torch.count_nonzero(tensor) == 0
            else:
                assert torch.count_nonzero(tensor) == tensor.numel()


def test_a_checkpoint_with_lora_names_is_read_by_the_key_map(tmp_path):
    tiny_whole("llama", tmp_path)
    once = load(tmp_path, llm_lora_num=1)
    with torch.no_grad():
        for name, parameter in once.named_parameters():
            if ".lora." in name:
                parameter.add_(torch.randn_like(parameter))
    folder = tmp_path / "wrapped"
    folder.mkdir()
    save_file(once.state_dict(), folder / "model.safetensors")
    for stage in range(2):
        twice = load(tmp_path, folder, stage=stage, num_stages=2, llm_lora_num=2)
        key_map = names_on_disk(twice)
        assert any(".lora_module.lora.lora_A" in name for name in key_map)
        for name, there in key_map.items():
            assert torch.equal(twice.state_dict()[name], once.state_dict()[there]), name
        expected = once.model.rotary_emb.inv_freq
        assert torch.equal(twice.model.rotary_emb.inv_freq, expected)


def test_two_loras_need_the_earlier_one(tmp_path):
    tiny_whole("llama", tmp_path)
    with pytest.raises(UserError, match="holds no LoRA"):
        load(tmp_path, llm_lora_num=2)


class OwnStage(StageModel):
    """A user's model without transformers."""

    def __init__(self, config, **kwargs):
        super().__init__(config, partition=None, **kwargs)
        with torch.device("meta"):
            self.layers = nn.ModuleList(
                nn.Linear(4, 4) if index in self.layers else nn.Identity() for index in range(4)
            )

    def num_layers(self):
        return 4

    def parts(self):
        return {"llm": ["layers"]}


def test_own_modules_are_read_by_name(tmp_path):
    state = {f"layers.{i}.{n}": torch.randn(4, 4)[0 if n == "bias" else ...].clone()
             for i in range(4) for n in ("weight", "bias")}  # fmt: skip
    save_file(state, tmp_path / "model.safetensors")
    for stage in range(2):
        model = OwnStage(None, stage=stage, num_stages=2)
        load_split_model(model, tmp_path, device="cpu", dtype=torch.float32)
        assert len(model.state_dict()) == 4
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name])
    del state["layers.3.bias"]
    save_file(state, tmp_path / "model.safetensors")
    model = OwnStage(None, stage=1, num_stages=2)
    with pytest.raises(UserError, match="1 names are missing: layers.3.bias"):
        load_split_model(model, tmp_path, device="cpu", dtype=torch.float32)


class Renamed(OwnStage):
    """A user's model with LoRA; its files have other names than its parameters."""

    is_reversed = False

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.wrap_lora()

    def get_key_map_without_last_lora(self):
        key_map = super().get_key_map_without_last_lora()
        key_map = {there.replace("layers", "blocks"): name for there, name in key_map.items()}
        return {name: there for there, name in key_map.items()} if self.is_reversed else key_map


@pytest.mark.parametrize("is_reversed", [False, True], ids=["theirs", "reversed"])
def test_a_key_map_of_either_direction_is_read_and_written(is_reversed, tmp_path, monkeypatch):
    monkeypatch.setattr(Renamed, "is_reversed", is_reversed)
    state = {f"blocks.{i}.{n}": torch.randn(4, 4)[0 if n == "bias" else ...].clone()
             for i in range(4) for n in ("weight", "bias")}  # fmt: skip
    save_file(state, tmp_path / "model.safetensors")
    model = Renamed(None, stage=0, num_stages=1, llm_lora_num=1)
    load_split_model(model, tmp_path, device="cpu", dtype=torch.float32)
    for index in range(4):
        weight = model.layers[index].lora_module.weight
        assert torch.equal(weight, state[f"blocks.{index}.weight"])
    saved = disk_state(model, claimed=set())
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)
    # the notes' direction: the original name leads to the name with LoRA
    theirs = OwnStage(None, stage=0, num_stages=1)
    assert theirs.get_key_map_without_last_lora()["layers.0.weight"] == "layers.0.weight"
    theirs = OneLinearPart(None, stage=0, num_stages=1, mlp_lora_num=1)
    key_map = theirs.get_key_map_without_last_lora()
    assert key_map["layers.0.weight"] == "layers.0.lora_module.weight"


class OneLinearPart(OwnStage):
    def parts(self):
        return {"llm": [], "mlp": ["layers.0"]}

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.wrap_lora()


def test_a_part_that_is_a_linear_layer_itself_is_wrapped():
    model = OneLinearPart(None, stage=0, num_stages=1, mlp_lora_num=2)
    names = set(model.state_dict())
    assert "layers.0.lora_module.lora_module.weight" in names
    assert "layers.1.weight" in names


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_a_head_of_its_own_beside_a_config_that_says_tied(family, tmp_path):
    """transformers reads both weights where they differ, and so do the stages.

    Files of qwen2_5_vl have other names than the model.
    """
    tiny_whole(family, tmp_path / "base", tied=False)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part["tie_word_embeddings"] = True
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    is_vlm = "vision_config" in config
    whole_class = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
    expected = whole_class.from_pretrained(tmp_path / "base").state_dict()
    stages = [load(tmp_path / "base", stage=stage, num_stages=2) for stage in (0, 1)]
    folder = save_split_model(stages, None, tmp_path / "run")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    found = whole_class.from_pretrained(folder).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())

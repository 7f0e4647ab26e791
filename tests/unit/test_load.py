"""Split load: every tensor of every stage is the whole model's, and nothing is missing unseen."""

import functools
import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from stageline.checkpoint.files import weight_files
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.save import save_split_model
from stageline.checkpoint.shards import disk_state
from stageline.errors import NonFiniteError, UserError
from stageline.modules.stage_names import names_on_disk
from tests.helpers import faulty_files
from tests.helpers.faulty_files import rewrite
from tests.helpers.tiny_checkpoints import OwnStage, tiny_whole
from tests.helpers.tiny_models import DECODERS, VISION_LANGUAGE

WEIGHTS = "model.safetensors"
load = functools.partial(faulty_files.load, stage=0, num_stages=1)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", DECODERS + VISION_LANGUAGE)
def test_every_tensor_is_the_whole_models(family, tied, tmp_path):
    whole = tiny_whole(family, tmp_path, tied=tied)
    expected = whole.state_dict()
    buffers = dict(whole.named_buffers())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for num_stages in (1, 2, 3, 4):
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


@pytest.mark.parametrize("shard", ["20KB", "1GB"], ids=["sharded", "single"])
def test_bfloat16_weights_keep_float32_frequencies(shard, tmp_path):
    whole = tiny_whole("llama", tmp_path, dtype=torch.bfloat16, max_shard_size=shard)
    model = load(tmp_path, stage=1, num_stages=2, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, whole.model.rotary_emb.inv_freq)


def test_dtype_is_cast_exactly(tmp_path):
    whole = tiny_whole("mixtral", tmp_path, dtype=torch.bfloat16)
    model = load(tmp_path, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, whole.state_dict()[name].float())


def test_a_single_file_and_weights_that_outlive_it(tmp_path):
    whole = tiny_whole("qwen3", tmp_path, max_shard_size="1GB")
    model = load(tmp_path, tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).write_bytes(b"")  # a mapped weight would be gone now
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])


@pytest.mark.parametrize("family", ["llama", "internvl"])
def test_missing_and_unexpected_names_are_listed(family, tmp_path):
    tiny_whole(family, tmp_path, max_shard_size="1GB")

    def change(state):
        gone = [name for name in state if name.endswith("layers.3.input_layernorm.weight")]
        del state[gone[0]]
        state["adapter_of_mine.weight"] = torch.zeros(2)

    rewrite(tmp_path / WEIGHTS, change)
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

    rewrite(tmp_path / WEIGHTS, change)
    with pytest.raises(UserError, match="does not fit stage 0"):
        load(tmp_path)


def test_other_shapes_are_listed(tmp_path):
    tiny_whole("llama", tmp_path, max_shard_size="1GB")
    rewrite(tmp_path / WEIGHTS, lambda state: state.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(UserError, match=r"model.norm.weight \(file \[3\], model \[16\]\)"):
        load(tmp_path)


def test_nan_is_refused(tmp_path):
    tiny_whole("llama", tmp_path, max_shard_size="1GB")
    rewrite(tmp_path / WEIGHTS, lambda state: state["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(NonFiniteError, match="model.norm.weight .*model.safetensors: 16 nan"):
        load(tmp_path)


def test_weights_without_the_models_prefix(tmp_path):
    """A checkpoint of the base model alone, as older tools write it: the head is missing."""
    whole = tiny_whole("gpt2", tmp_path, tied=True, max_shard_size="1GB")
    whole.transformer.save_pretrained(tmp_path / "base")
    for stage in range(2):
        model = load(tmp_path, tmp_path / "base", stage=stage, num_stages=2)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, whole.state_dict()[name]), name


def test_a_folder_without_weights_is_refused(tmp_path):
    tiny_whole("llama", tmp_path / "whole", max_shard_size="1GB")
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "whole", tmp_path / "none")
    (tmp_path / "whole" / WEIGHTS).unlink()
    with pytest.raises(UserError, match="holds neither"):
        load(tmp_path / "whole")


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
    with pytest.raises(UserError, match="holds no LoRA, and of several LoRAs"):
        load(tmp_path, llm_lora_num=2)


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


def test_own_modules_are_read_and_saved_under_their_names(tmp_path):
    state = {f"layers.{i}.{n}": torch.randn(4, 4)[0 if n == "bias" else ...].clone()
             for i in range(4) for n in ("weight", "bias")}  # fmt: skip
    save_file(state, tmp_path / WEIGHTS)
    stages = [OwnStage(None, stage=stage, num_stages=2) for stage in range(2)]
    for model in stages:
        load_split_model(model, tmp_path, device="cpu", dtype=torch.float32)
        assert len(model.state_dict()) == 4
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    folder = save_split_model(stages, None, tmp_path / "after")
    assert set(weight_files(folder)) == set(state)
    again = OwnStage(None, stage=0, num_stages=1)
    load_split_model(again, folder, device="cpu", dtype=torch.float32)
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    del state["layers.3.bias"]
    save_file(state, tmp_path / WEIGHTS)
    model = OwnStage(None, stage=1, num_stages=2)
    with pytest.raises(UserError, match="missing: layers.3.bias"):
        load_split_model(model, tmp_path, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("is_reversed", [False, True], ids=["theirs", "reversed"])
def test_a_key_map_of_either_direction_is_read_and_written(is_reversed, tmp_path, monkeypatch):
    monkeypatch.setattr(Renamed, "is_reversed", is_reversed)
    state = {f"blocks.{i}.{n}": torch.randn(4, 4)[0 if n == "bias" else ...].clone()
             for i in range(4) for n in ("weight", "bias")}  # fmt: skip
    save_file(state, tmp_path / WEIGHTS)
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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_head_of_its_own_beside_a_config_that_says_tied(family, tmp_path):
    """transformers reads both weights where they differ, and so do the stages."""
    tiny_whole(family, tmp_path / "base", tied=False)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    text = json.dumps({**config, "tie_word_embeddings": True})
    (tmp_path / "base" / "config.json").write_text(text)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    stages = [load(tmp_path / "base", stage=stage, num_stages=2) for stage in (0, 1)]
    folder = save_split_model(stages, None, tmp_path / "run")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())

"""Conversion of InternVL2's remote-code checkpoints, against a model of the old class's structure.

The reference is written here after the published class: fused projections, an `nn.Sequential`
projector, tokens of a tower without its first, the pixel shuffle of version 2.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from stageline.checkpoint.plain_model import load_plain
from stageline.data.text.processor import load_processor
from stageline.errors import CheckpointError, UserError
from stageline.model_folder import load_config
from tests.helpers.tiny_models import SPECIAL_TOKENS, tiny_tokenizer
from tools.convert_internvl import convert_internvl

IMAGE_TOKENS = ("<IMG_CONTEXT>", "<img>", "</img>", "<|end|>")
VISION = {
    "architectures": ["InternVisionModel"],
    "model_type": "intern_vit_6b",
    "attention_dropout": 0.0,
    "drop_path_rate": 0.1,
    "dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_size": 16,
    "image_size": 16,
    "initializer_factor": 1.0,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "qk_normalization": False,
    "qkv_bias": True,
    "use_flash_attn": True,
}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "temperature": 1.0,
    "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
}


class OldTower(nn.Module):
    def __init__(self, *, rms=False):
        super().__init__()
        width = 16
        self.rms = rms
        self.embeddings = nn.Module()
        self.embeddings.class_embedding = nn.Parameter(torch.empty(1, 1, width))
        self.embeddings.position_embedding = nn.Parameter(torch.empty(1, 17, width))
        self.embeddings.patch_embedding = nn.Conv2d(3, width, 4, 4)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList([self._layer(width) for _ in range(2)])

    def _layer(self, width):
        layer = nn.Module()
        layer.attn = nn.Module()
        layer.attn.qkv = nn.Linear(width, 3 * width, bias=not self.rms)
        layer.attn.proj = nn.Linear(width, width)
        layer.mlp = nn.Module()
        layer.mlp.fc1, layer.mlp.fc2 = nn.Linear(width, 24), nn.Linear(24, width)
        make = nn.RMSNorm if self.rms else nn.LayerNorm
        layer.norm1, layer.norm2 = make(width, eps=1e-6), make(width, eps=1e-6)
        if self.rms:
            layer.attn.q_norm, layer.attn.k_norm = make(width, eps=1e-6), make(width, eps=1e-6)
        layer.ls1, layer.ls2 = (nn.Parameter(torch.empty(width)) for _ in range(2))
        return layer

    def forward(self, pixels):
        patches = self.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = self.embeddings.class_embedding.expand(len(pixels), -1, -1)
        hidden = torch.cat([first, patches], dim=1) + self.embeddings.position_embedding
        for layer in self.encoder.layers:
            normed = layer.norm1(hidden)
            batch, length, width = normed.shape
            q, k, v = layer.attn.qkv(normed).view(batch, length, 3, width).unbind(2)
            if self.rms:
                q, k = layer.attn.q_norm(q), layer.attn.k_norm(k)
            q, k, v = (x.view(batch, length, 2, width // 2).transpose(1, 2) for x in (q, k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v)
            mixed = layer.attn.proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + mixed * layer.ls1
            inner = functional.gelu(layer.mlp.fc1(layer.norm2(hidden)))
            hidden = hidden + layer.mlp.fc2(inner) * layer.ls2
        return hidden


class OldInternLM2(nn.Module):
    """The old text model, with the rows of wqkv by key-value head: queries, key, value."""

    def __init__(self, vocab_size):
        super().__init__()
        width = 16
        self.model = nn.Module()
        self.model.tok_embeddings = nn.Embedding(vocab_size, width)
        self.model.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.attention = nn.Module()
            layer.attention.wqkv = nn.Linear(width, 2 * 4 * 4, bias=False)
            layer.attention.wo = nn.Linear(width, width, bias=False)
            layer.feed_forward = nn.Module()
            layer.feed_forward.w1 = nn.Linear(width, 24, bias=False)
            layer.feed_forward.w3 = nn.Linear(width, 24, bias=False)
            layer.feed_forward.w2 = nn.Linear(24, width, bias=False)
            layer.attention_norm = nn.RMSNorm(width, eps=1e-5)
            layer.ffn_norm = nn.RMSNorm(width, eps=1e-5)
            self.model.layers.append(layer)
        self.model.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, vocab_size, bias=False)

    def get_input_embeddings(self):
        return self.model.tok_embeddings

    def forward(self, inputs_embeds):
        hidden = inputs_embeds
        batch, length, _ = hidden.shape
        angles = torch.arange(length)[:, None] * 1e6 ** (-torch.arange(0, 4, 2) / 4)
        angles = torch.cat([angles, angles], dim=-1)

        def rotate(x):
            half = torch.cat([-x[..., 2:], x[..., :2]], dim=-1)
            return x * angles.cos() + half * angles.sin()

        for layer in self.model.layers:
            fused = layer.attention.wqkv(layer.attention_norm(hidden))
            by_head = fused.view(batch, length, 2, 4, 4)
            q = by_head[:, :, :, :2].reshape(batch, length, 4, 4).transpose(1, 2)
            k = by_head[:, :, :, 2].transpose(1, 2).repeat_interleave(2, dim=1)
            v = by_head[:, :, :, 3].transpose(1, 2).repeat_interleave(2, dim=1)
            mixed = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            hidden = hidden + layer.attention.wo(mixed.transpose(1, 2).flatten(2))
            normed = layer.ffn_norm(hidden)
            gate = functional.silu(layer.feed_forward.w1(normed)) * layer.feed_forward.w3(normed)
            hidden = hidden + layer.feed_forward.w2(gate)
        return self.output(self.model.norm(hidden))


class OldModel(nn.Module):
    def __init__(self, language_model, *, rms=False):
        super().__init__()
        self.vision_model = OldTower(rms=rms)
        self.mlp1 = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 16))
        self.language_model = language_model

    def forward(self, ids, pixels, image_token_id):
        tokens = self.vision_model(pixels)[:, 1:]
        grid = tokens.view(len(pixels), 2, 2, 2, 2, 16)  # rows of 2, columns of 2
        shuffled = grid.permute(0, 1, 3, 2, 4, 5).reshape(len(pixels), 4, 64)
        images = self.mlp1(shuffled)
        embeds = self.language_model.get_input_embeddings()(ids).clone()
        embeds[ids == image_token_id] = images.flatten(0, 1)
        output = self.language_model(inputs_embeds=embeds)
        return output if isinstance(output, torch.Tensor) else output.logits


def old_tokenizer():
    return tiny_tokenizer(special_tokens=(*SPECIAL_TOKENS, *IMAGE_TOKENS))


def make_old(folder, kind, *, tied=False, rms=False, num_files=2, changes=()):
    """Write a folder in the old format; return the model with the same weights."""
    torch.manual_seed(1)
    folder.mkdir()
    tokenizer = old_tokenizer()
    tokenizer.save_pretrained(folder)
    vocab_size = len(tokenizer)
    text = {**TEXT, "model_type": kind, "vocab_size": vocab_size, "tie_word_embeddings": tied}
    if kind == "internlm2":
        language_model = OldInternLM2(vocab_size)
    else:
        config = transformers.AutoConfig.for_model(
            kind, **{k: v for k, v in text.items() if k not in ("auto_map", "model_type")}
        )
        language_model = transformers.AutoModelForCausalLM.from_config(config)
    model = OldModel(language_model, rms=rms).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1.0)
    vision = {**VISION, "qkv_bias": not rms, "qk_normalization": rms}
    vision["norm_type"] = "rms_norm" if rms else "layer_norm"
    settings = {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 16,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 3,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internlm2-chat",
        "vision_config": vision,
        "llm_config": text,
        **dict(changes),
    }
    (folder / "config.json").write_text(json.dumps(settings))
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if tied:
        state.pop("language_model.lm_head.weight")
    write_files(folder, state, num_files)
    return model


def write_files(folder, state, num_files):
    if num_files == 1:
        save_file(state, folder / "model.safetensors")
        return
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(state.items())[number::num_files])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "kind, options",
    [
        ("internlm2", {"rms": True, "num_files": 1}),
        ("qwen2", {"tied": True}),
        ("phi3", {"changes": {"template": "phi3-chat"}.items()}),
    ],
)
def test_the_native_model_computes_what_the_old_one_does(kind, options, tmp_path):
    old = make_old(tmp_path / "old", kind, **options)
    folder = convert_internvl(tmp_path / "old", tmp_path / "new")
    new = load_plain(folder, dtype=torch.float32)
    image_token_id = new.config.image_token_id
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(12, new.config.text_config.vocab_size, (2, 9), generator=generator)
    ids[:, 2:6] = image_token_id
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    with torch.no_grad():
        expected = old(ids, pixels, image_token_id)
        found = new(input_ids=ids, pixel_values=pixels).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_processor_and_end_of_answer(tmp_path):
    make_old(tmp_path / "old", "internlm2")
    folder = convert_internvl(tmp_path / "old", tmp_path / "new")
    assert load_config(folder).model_type == "internvl"  # no code is named any more
    processor = load_processor(folder)
    assert processor.image_processor.max_patches == 3
    assert processor.image_seq_length == 4
    # the tokenizer has as many tokens as the embedding has rows
    assert len(processor.tokenizer) == len(old_tokenizer())
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert "<IMG_CONTEXT>\nWhat?<|im_end|>\n<|im_start|>assistant\n" in text
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = generation["eos_token_id"]
    old = old_tokenizer()
    assert old.convert_tokens_to_ids("<|im_end|>") in (ends if isinstance(ends, list) else [ends])
    assert not list(tmp_path.glob("new.tmp-*"))


def test_weights_keep_their_type_and_bits(tmp_path):
    make_old(tmp_path / "old", "qwen2", num_files=1)
    path = tmp_path / "old" / "model.safetensors"
    state = {name: value.bfloat16() for name, value in load_file(path).items()}
    save_file(state, path)
    folder = convert_internvl(tmp_path / "old", tmp_path / "new")
    new = load_plain(folder)
    assert new.dtype == torch.bfloat16
    fused = state["vision_model.encoder.layers.1.attn.qkv.weight"]
    parts = new.model.vision_tower.encoder.layer[1].attention
    found = torch.cat([parts.q_proj.weight, parts.k_proj.weight, parts.v_proj.weight])
    assert torch.equal(found, fused)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"ps_version": "v1"}, "ps_version 'v1'"),
        ({"model_type": "qwen2"}, "of type 'qwen2'"),
        ({"llm_config": {**TEXT, "model_type": "nobody"}}, "'nobody'"),
    ],
)
def test_variants_are_refused(changes, words, tmp_path):
    make_old(tmp_path / "old", "internlm2", changes=changes.items())
    with pytest.raises(UserError, match=words):
        convert_internvl(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_wrong_sizes_and_names_are_named(tmp_path):
    text = {**TEXT, "model_type": "internlm2", "vocab_size": 40, "intermediate_size": 32}
    make_old(tmp_path / "old", "internlm2", changes={"llm_config": text}.items(), num_files=1)
    with pytest.raises(CheckpointError, match="another shape.*gate_proj"):
        convert_internvl(tmp_path / "old", tmp_path / "new")
    path = tmp_path / "old" / "model.safetensors"
    save_file({**load_file(path), "base_model.lora": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="base_model.lora"):
        convert_internvl(tmp_path / "old", tmp_path / "new")
    assert [item.name for item in tmp_path.iterdir()] == ["old"]


def test_a_sentencepiece_tokenizer_reads_as_before(tmp_path):
    """InternLM2's folders have no tokenizer.json, and name code for their tokenizer."""
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("The cat is left of the dog, 2 dogs are behind it.\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    old = tmp_path / "old"
    make_old(old, "internlm2")
    for path in [*old.glob("tok*"), *old.glob("special*")]:
        path.unlink()
    (tmp_path / "tokenizer.model").rename(old / "tokenizer.model")
    added = {str(300 + i): {"content": token} for i, token in enumerate(IMAGE_TOKENS)}
    own = {
        "tokenizer_class": "InternLM2Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "added_tokens_decoder": added,
    }
    (old / "tokenizer_config.json").write_text(json.dumps(own))
    tokenizer = load_processor(convert_internvl(old, tmp_path / "new")).tokenizer
    reference = sentencepiece.SentencePieceProcessor(str(old / "tokenizer.model"))
    for probe in ("the dogs are", "2  cats\nleft", "中文 dog"):
        found = tokenizer(probe, add_special_tokens=False)["input_ids"]
        assert found == reference.encode(probe), probe
    assert tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)) == [300, 301, 302, 303]

"""tools/tiny_model.py: a folder whose parts fit each other, with images or without."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from stageline.data.text.processor import get_tokenizer, load_processor
from tests.helpers.forked_entry import run_entry

ROOT = Path(__file__).resolve().parents[2]


def tiny(family, folder):
    return run_entry([ROOT / "tools/tiny_model.py", family, folder])


@pytest.mark.parametrize("family", ["qwen3", "granite", "internvl"])
def test_a_model_of_the_folder_reads_what_its_processor_makes(family, tmp_path):
    done = tiny(family, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    config = AutoConfig.from_pretrained(tmp_path / "model")
    processor = load_processor(tmp_path / "model")
    text = config.get_text_config(decoder=True)
    assert len(get_tokenizer(processor)) <= text.vocab_size
    if getattr(config, "vision_config", None) is None:
        model = AutoModelForCausalLM.from_config(config).eval()
        inputs = processor("A question?", return_tensors="pt")
    else:
        model = AutoModelForImageTextToText.from_config(config).eval()
        image = Image.new("RGB", (32, 16), "red")
        content = [{"type": "image"}, {"type": "text", "text": "What colour?"}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}])
        inputs = processor(text=prompt, images=[image], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape[-1] == text.vocab_size and logits.isfinite().all()

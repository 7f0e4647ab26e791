"""The worked example of docs/add_a_model.md, from a folder outside of the repository."""

import json
import re
from pathlib import Path

from safetensors.torch import load_file

from stageline.testing.forked_entry import run_entry
from stageline.testing.tiny_tokenizers import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = (
    "--train-model gru_lm --dataset counting --loss-fn smoothed --prompt text --prompt-fn fill "
    "--image-token none --collate-fn sft --config-path my_model --batch-size 8 "
    "--micro-batch-size 2 --total-steps 3 --device cpu --dataset.longest 5"
)


def run(folder, *options):
    command = [str(ROOT / "train_pp.py"), "--import", "my_parts.py"]
    return run_entry(
        [*command, *OPTIONS.split(), *options],
        cwd=folder,
        timeout=240,
    )


def losses(folder):
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records]


def test_parts_of_a_user_train_the_same_on_one_and_two_stages(tmp_path):
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "add_a_model.md").read_text(), re.DOTALL
    )
    (tmp_path / "my_parts.py").write_text(blocks[0])
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "my_model")
    config = {"model_type": "gru_lm", "vocab_size": len(tokenizer)}
    (tmp_path / "my_model" / "config.json").write_text(json.dumps(config))
    for stages in (1, 2):
        done = run(tmp_path, "--num-stages", str(stages), "--output-dir", f"run{stages}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "run1")) == 5  # before, three steps, after
    assert losses(tmp_path / "run1") == losses(tmp_path / "run2")
    saved = [
        {
            name: tensor
            for file in (tmp_path / f"run{stages}").glob("checkpoints/*3/*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for stages in (1, 2)
    ]
    assert saved[0].keys() == saved[1].keys() and "blocks.3.gru.weight_hh_l0" in saved[0]
    assert all((saved[0][name] == saved[1][name]).all() for name in saved[0])
    again = run(tmp_path, "--config", "run2/config.yaml", "--output-dir", "run3")
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "run3") == losses(tmp_path / "run2")

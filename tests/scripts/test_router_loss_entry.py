"""A mixture of experts through the entry file: the log shows the router loss, as asked."""

import json
from pathlib import Path

import pytest

from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = (
    "--train-model qwen3_moe --dataset jsonl --dataset-path rows --loss-fn sft --prompt text "
    "--prompt-fn fill --image-token none --collate-fn sft --config-path model --batch-size 8 "
    "--micro-batch-size 2 --total-steps 3 --eval-samples 2 --device cpu"
)


@pytest.fixture
def folder(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    config = tiny_config("qwen3_moe", vocab_size=len(tokenizer))
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        rows = [{"id": str(i), "text": f"{i} and {i * i}"} for i in range(16)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rows" / f"{split}.jsonl").write_text(lines)
    return tmp_path


def train(folder, *options):
    done = run_entry(
        [str(ROOT / "train_pp.py"), *OPTIONS.split(), *options],
        cwd=folder,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / options[options.index("--output-dir") + 1]
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return done.stdout, [record for record in records if record["kind"] == "train"]


def test_the_option_shows_in_the_log(folder):
    out, plain = train(folder, "--num-stages", "1", "--output-dir", "plain")
    assert len(plain) == 3 and "router" not in out
    assert not any("router_loss" in record for record in plain)
    asked = "--train-model.output_router_logits true --train-model.router_aux_loss_coef 0.25"
    out, routed = train(folder, "--num-stages", "2", "--output-dir", "routed", *asked.split())
    assert "router loss 0." in out
    # two of four experts per token: about 2, times the weight
    assert all(0.4 < record["router_loss"] < 0.8 for record in routed)
    assert routed[0]["loss"] == plain[0]["loss"]  # the token loss alone
    assert routed[2]["loss"] != plain[2]["loss"]  # and yet it is trained on

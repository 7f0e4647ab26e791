"""The peers of preprocessing.py: each makes ids and labels of a whole file when it is told to.

Run as `python preprocessing_workers.py NAME SETTINGS`; a line on its input is one pass. Imports the
standard library alone before it knows which peer it is: LLaMA-Factory has a Python of its own.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# SmolLM2's template, with the marks that TRL needs to know the assistant's tokens
MARKED_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Rows = list[tuple[list[int], list[int]]]  # ids and labels
_IGNORE = -100


def ours(settings: dict[str, Any]) -> Callable[[], Any]:
    """The jsonl dataset, the chat template and the encoder; in workers as the loader has them."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import functools
    import gc

    from torch.utils.data import DataLoader

    from prompt_fn import auto, chat
    from stageline.data.batches.collate import encode_for_training
    from stageline.data.rows.json_lines import JsonLines
    from stageline.data.text.processor import load_processor

    texts = {"prompt": "", "prompt_fn": chat, "image_token": auto}
    encode = functools.partial(
        encode_for_training, processor=load_processor(settings["tokenizer"]), **texts
    )
    num_workers = settings["processes"] if settings["processes"] > 1 else 0
    gc.freeze()  # as `run_training` does

    def collate(items: list[Any]) -> Rows:
        rows = [encode(images, sample) for images, sample in items]
        return [(row.input_ids, _labels(row.input_ids, row.is_target)) for row in rows]

    def run() -> Rows:
        dataset = JsonLines(dataset_path=settings["file"], test_size=0)
        loader = DataLoader(dataset, batch_size=256, num_workers=num_workers, collate_fn=collate)
        return [row for batch in loader for row in batch]

    return run


def _labels(ids: list[int], is_target: list[bool]) -> list[int]:
    return [token if learnt else _IGNORE for token, learnt in zip(ids, is_target, strict=True)]


def llamafactory(settings: dict[str, Any]) -> Callable[[], Any]:
    """What LLaMA-Factory's sft workflow calls before it makes a trainer."""
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    file = Path(settings["file"])
    info = {
        "rows": {
            "file_name": file.name,
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
            },
        }
    }
    (file.parent / "dataset_info.json").write_text(json.dumps(info))
    model_args, data_args, training_args, _, _ = get_train_args(
        {
            "model_name_or_path": settings["tokenizer"],
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "dataset": "rows",
            "dataset_dir": str(file.parent),
            "template": "smollm2",
            "cutoff_len": 2048,
            "overwrite_cache": True,
            "preprocessing_num_workers": settings["processes"],
            "output_dir": str(file.parent / "out"),
            "report_to": "none",
        }
    )
    tokenizer = load_tokenizer(model_args)["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    arguments = (template, model_args, data_args, training_args, "sft")
    return lambda: get_dataset(*arguments, tokenizer=tokenizer)["train_dataset"]


def trl(settings: dict[str, Any]) -> Callable[[], Any]:
    """What TRL's SFTTrainer does with its dataset when it is made."""
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    datasets.disable_caching()
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    config = SFTConfig(
        output_dir=str(Path(settings["file"]).parent / "out"),
        assistant_only_loss=True,
        max_length=2048,
        dataset_num_proc=settings["processes"] if settings["processes"] > 1 else None,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=MARKED_TEMPLATE, completion_only_loss=False
    )

    def run() -> Any:
        rows = datasets.load_dataset("json", data_files=settings["file"], split="train")
        return SFTTrainer._prepare_dataset(trainer, rows, tokenizer, config, False, None, "train")

    return run


def _counts(rows: Any) -> dict[str, float]:
    """Outside of what is timed."""
    labels = [row[1] for row in rows] if isinstance(rows, list) else list(rows["labels"])
    return {
        "rows": len(labels),
        "tokens": sum(map(len, labels)),
        "targets": sum(label != _IGNORE for row in labels for label in row),
    }


def main() -> None:
    """A pass for each line of the input."""
    run = {"ours": ours, "llamafactory": llamafactory, "trl": trl}[sys.argv[1]](
        json.loads(sys.argv[2])
    )
    for _ in sys.stdin:
        start, used = time.perf_counter(), _cpu_seconds()
        rows = run()
        figures = {"seconds": time.perf_counter() - start, "cpu": _cpu_seconds() - used}
        print("RESULT " + json.dumps({**figures, **_counts(rows)}), flush=True)


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()

"""Kept token ids: the same batches, never old ones, never damaged ones."""

import functools
import hashlib
import json
import multiprocessing
import os

import pytest
import torch
from PIL import Image

from commands.train import SHELF, pipeline
from commands.train_data import check_data
from dataset import sft
from parse_args import parse_train_args
from prompt_fn import auto, chat, fill, none
from register import import_shelf
from stageline.data.batches import token_cache
from stageline.data.batches.check_batch import CheckedCollate
from stageline.data.batches.collate import encode_for_training
from stageline.data.batches.collate_part import as_collate_part
from stageline.data.batches.prompts import encode_prompt, prompt_of
from stageline.data.batches.token_cache import (
    DamagedTokens,
    TokenCache,
    TokenFile,
    fill_token_cache,
    token_cache_of,
    token_key,
    use_token_cache,
)
from stageline.data.rows.readers import data_fingerprint
from stageline.data.rows.sets import Sets
from stageline.errors import StorageError, UserError
from tests.helpers.small_run import Job
from tests.helpers.tiny_models import tiny_processor, tiny_tokenizer
from tests.helpers.tiny_sets import chat_row, write_chat

import_shelf(*SHELF)
assert pipeline  # importing it registered the engine


@pytest.fixture
def dataset(tmp_path):
    path = write_chat(tmp_path / "rows.jsonl", [f"{'very ' * (i % 5)}{i}?" for i in range(40)])
    return Sets(dataset_path=str(path), cache=str(tmp_path / "cache"))


class Run:
    """What a run has: texts, a processor, a collate part; and the cache it fills."""

    def __init__(self, folder, dataset, *, processor=None, prompt="", prompt_fn=chat, **options):
        self.processor = processor or tiny_tokenizer()
        self.texts = {"prompt": prompt, "prompt_fn": prompt_fn, "image_token": none}
        self.collate = functools.partial(
            sft, **self.texts, processor=self.processor, pad_token_id=0, num_stages=1,
            **{"max_token_num": 99, **options},
        )  # fmt: skip
        self.folder, self.dataset = folder, dataset
        self.said = []

    def key(self):
        part = functools.partial(sft, overlong="error")
        return token_key(
            **self.texts, processor=self.processor, collate=part,
            fingerprint=data_fingerprint(self.dataset),
        )  # fmt: skip

    def fill(self, num_workers=0):
        cache = TokenCache(**self.texts)
        use_token_cache(self.processor, cache)
        encode = as_collate_part(functools.partial(self.collate, stage=1)).encode
        fill_token_cache(
            self.folder, cache, self.dataset, encode=encode, key=self.key(),
            num_workers=num_workers, say=self.said.append,
        )  # fmt: skip
        return cache

    def batch(self, rows=range(40)):
        return self.collate([self.dataset[row] for row in rows], stage=0)


def _is_equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_a_hit_gives_the_same_batch_and_encodes_nothing(dataset, tmp_path, monkeypatch):
    expected = Run(tmp_path / "tokens", dataset).batch()
    for said in ("encoded", "found"):
        run = Run(tmp_path / "tokens", dataset)
        cache = run.fill()
        assert run.said[-1].endswith(f"40 rows {said}")
        with monkeypatch.context() as patch:
            patch.setattr("stageline.data.batches.collate.render_sample", None)
            assert _is_equal(run.batch(), expected)
        assert cache.num_hits == 40
    images, sample = dataset[3]
    options = {**run.texts, "processor": run.processor}
    kept = encode_for_training(images, sample, **options)
    use_token_cache(run.processor, None)
    assert kept == encode_for_training(images, sample, **options), "marks are other ones"


def test_prompts_are_kept_beside_rows_with_their_answers(dataset, tmp_path, monkeypatch):
    run = Run(tmp_path / "tokens", dataset)
    options = {**run.texts, "processor": run.processor, "pad_token_id": 0, "stage": 1}
    encode = functools.partial(encode_prompt, max_token_num=99, max_completion_length=9, **options)
    expected = [encode(*dataset[row]) for row in range(40)]
    use_token_cache(run.processor, cache := TokenCache(**run.texts))
    folder, said = tmp_path / "prompts", run.said.append
    fill_token_cache(folder, cache, dataset, encode=encode, key=run.key(), num_workers=0, say=said)
    learnt = encode_for_training(*dataset[3], **run.texts, processor=run.processor)
    assert cache.num_hits == 0 and run.said[-1].endswith("40 rows encoded")
    with monkeypatch.context() as patch:
        patch.setattr("stageline.data.batches.prompts.render_sample", None)
        found = [encode(*dataset[row]) for row in range(40)]
    assert cache.num_hits == 40 and [one.rows for one in found] == [one.rows for one in expected]
    assert len(learnt.input_ids) != len(prompt_of(found[3]).input_ids)


def test_each_part_of_the_key_makes_other_entries(dataset, tmp_path):
    first = Run(tmp_path / "tokens", dataset)
    options = {"cache": str(tmp_path / "cache")}
    chatml = tiny_tokenizer().chat_template
    other = write_chat(tmp_path / "other.jsonl", ["0?"])
    runs = {
        "rows": Run(None, Sets(dataset_path=str(other), **options)),
        "draw": Run(
            None, Sets(dataset_path=str(tmp_path / "rows.jsonl"), max_samples=9, **options)
        ),
        "vocabulary": Run(None, dataset, processor=tiny_tokenizer(vocab_size=270)),
        "eos": Run(None, dataset, processor=tiny_tokenizer(eos_token="<|im_end|>")),
        "template": Run(None, dataset, processor=tiny_tokenizer(chat_template=chatml + " ")),
        "prompt": Run(None, dataset, prompt="[QUESTION] [ANSWER]"),
        "prompt_fn": Run(None, dataset, prompt_fn=fill),
        "options": Run(None, dataset, prompt_fn=functools.partial(chat, system="Be kind.")),
        "processor": Run(None, dataset, processor=tiny_processor("internvl")),
    }
    added = tiny_tokenizer()
    added.add_tokens(["very"])
    runs["added token"] = Run(None, dataset, processor=added)
    image = Run(None, dataset)
    image.texts["image_token"] = functools.partial(none)
    keys = {name: json.dumps(run.key(), sort_keys=True) for name, run in runs.items()}
    plain = json.dumps(first.key(), sort_keys=True)
    assert len({plain, *keys.values()}) == 1 + len(keys)
    assert plain == json.dumps(Run(None, dataset).key(), sort_keys=True)
    assert json.dumps(image.key(), sort_keys=True) == plain, "the same part, bound again"


def test_image_settings_versions_and_format_are_in_the_key(dataset, monkeypatch):
    runs = [Run(None, dataset, processor=tiny_processor("qwen2_vl")) for _ in range(2)]
    assert runs[0].key() == runs[1].key()
    runs[1].processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    assert runs[0].key()["images"] != runs[1].key()["images"]
    run = Run(None, dataset)
    before = run.key()
    monkeypatch.setattr("stageline.data.batches.token_cache.FORMAT", 0)
    assert run.key() != before
    clock = Run(None, dataset, processor=tiny_tokenizer(chat_template="{{ strftime_now('%d') }}"))
    assert "date" in clock.key() and "date" not in before


def test_what_a_format_means_does_not_change(tmp_path):
    """A change of rendering or marking that fails here needs another FORMAT and its digest."""
    assistant = {"role": "assistant", "content": "<|im_end|> 7"}
    turns = [{"role": "user", "content": "7 + 0?"}, assistant]
    unlearnt = {"role": "assistant", "content": "ja", "weight": 0}
    rows = [
        {"messages": turns},
        {"messages": [{"role": "system", "content": "Be kind."}, turns[0], unlearnt, *turns]},
        {"messages": [{"role": "user", "content": " left </s>?"}, assistant]},
    ]
    digest = hashlib.sha256()
    for row in rows:
        run = Run(tmp_path, None)
        encoded = encode_for_training(None, row, **run.texts, processor=run.processor)
        digest.update(repr(encoded).encode())
    filled = {"prompt": "[IMAGE]\n[QUESTION] [ANSWER].", "prompt_fn": fill, "image_token": auto}
    sample = {"question": "Which?", "answer": "the left one"}
    for family in ("qwen2_vl", "llava"):
        processor = tiny_processor(family)
        images = [Image.new("RGB", (40, 32))]
        encoded = encode_for_training(images, sample, **filled, processor=processor)
        digest.update(repr(encoded).encode())
    assert (token_cache.FORMAT, digest.hexdigest()[:16]) == (1, "7009306e20438307")


def test_a_part_of_the_user_is_known_by_its_file(dataset, tmp_path):
    code = "def mine(sample, prompt, *, processor=None, for_generation=False):\n    return {}\n"
    keys = []
    for number in range(2):
        path = tmp_path / "mine.py"
        path.write_text(code.format(number))
        scope = {"__name__": "mine"}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        keys.append(Run(None, dataset, prompt_fn=scope["mine"]).key()["prompt_fn"])
    assert keys[0]["name"] == keys[1]["name"] == "mine.mine" and keys[0] != keys[1]


def test_other_texts_and_other_rows_are_not_looked_up(dataset, tmp_path):
    run = Run(tmp_path / "tokens", dataset)
    cache = run.fill()
    images, sample = dataset[0]
    options = {**run.texts, "processor": run.processor}
    kind = functools.partial(chat, system="Be kind.")
    with_system = encode_for_training(images, sample, **{**options, "prompt_fn": kind})
    changed = {
        **sample,
        "messages": [*sample["messages"][:1], {"role": "assistant", "content": "7"}],
    }
    other = encode_for_training(images, changed, **options)
    assert cache.num_hits == 0
    use_token_cache(run.processor, None)
    assert with_system == encode_for_training(images, sample, **{**options, "prompt_fn": kind})
    assert other == encode_for_training(images, changed, **options)
    texts = dict(run.texts)
    names = [
        cache.name_of(None, row, **texts)
        for row in ({"tools": [{"a": 1, "b": 2}]}, {"tools": [{"b": 2, "a": 1}]}, {"x": object()})
    ]
    assert names[0] != names[1], "a tool's keys are written in their order"
    assert names[2] is None


def test_files_of_another_name_are_encoded_again(dataset, tmp_path):
    """Rows are called by their file, and a template may write what they are called."""
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((tmp_path / "rows.jsonl").read_bytes())
    dataset.fingerprint = lambda: "the same"
    other = Sets(dataset_path=str(copy), cache=str(tmp_path / "cache"))
    other.fingerprint = dataset.fingerprint
    for rows in (dataset, other):
        run = Run(tmp_path / "tokens", rows)
        cache = run.fill()
        run.batch()
        assert run.said[-1].endswith("encoded") and cache.num_hits == 40


@pytest.mark.parametrize("name", ["tokens.bin", "names.npy", "places.npy", "facts.json"])
@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_what_is_damaged_is_made_anew(name, how, dataset, tmp_path):
    if how != "changed" and name == "names.npy":
        pytest.skip("as the others")
    Run(tmp_path / "tokens", dataset).fill()
    folder = next(path for path in (tmp_path / "tokens").iterdir() if path.is_dir())
    file = folder / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(content if how == "changed" else content[:-1])
    if (name, how) != ("facts.json", "changed"):  # there it may be in the key's own words
        with pytest.raises(DamagedTokens):
            TokenFile(folder)
    run = Run(tmp_path / "tokens", dataset)
    cache = run.fill()
    assert _is_equal(run.batch(), Run(None, dataset).batch())
    assert cache.num_hits == 40
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["tokens.bin", "names.npy", "places.npy", "facts.json"]
    )


def test_a_half_written_one_is_not_found(dataset, tmp_path, monkeypatch):
    run = Run(tmp_path / "tokens", dataset)
    monkeypatch.setattr("stageline.data.batches.token_cache.numpy.save", lambda *a, **b: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.fill()
    monkeypatch.undo()
    assert not [path for path in (tmp_path / "tokens").iterdir() if path.is_dir()]
    run.fill()
    assert run.said == [run.said[-1]] and run.said[0].endswith("40 rows encoded")


def test_processes_fill_it_once(dataset, tmp_path):
    def fill(number):
        run = Run(tmp_path / "tokens", dataset)
        cache = run.fill()
        run.batch()
        (tmp_path / f"{number}.txt").write_text(f"{run.said[-1].split()[-1]} {cache.num_hits}")

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    said = sorted((tmp_path / f"{number}.txt").read_text() for number in range(3))
    assert said == ["encoded 40", "found 40", "found 40"]


def test_workers_encode_what_one_process_encodes(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "_CHUNK", 7)
    for name, workers in (("one", 0), ("two", 2)):
        Run(tmp_path / name, dataset).fill(num_workers=workers)
    folders = [next(p for p in (tmp_path / n).iterdir() if p.is_dir()) for n in ("one", "two")]
    for name in os.listdir(folders[0]):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_rows_that_are_bad_or_too_long_are_left_to_training(tmp_path):
    path = write_chat(tmp_path / "rows.jsonl", ["short", "long " * 50, "two"])
    unlearnt = chat_row("nothing to learn")
    unlearnt["messages"][1]["weight"] = 0
    path.write_text(path.read_text() + json.dumps(unlearnt) + "\n")
    dataset = Sets(dataset_path=str(path), cache=str(tmp_path / "cache"))
    run = Run(tmp_path / "tokens", dataset, max_token_num=60)
    run.fill()
    assert run.said == [f"{run.said[0].rpartition(': ')[0]}: 3 rows encoded"]
    with pytest.raises(UserError, match=r"rows.jsonl:2: .*tokens"):
        run.batch([1])
    with pytest.raises(UserError, match=r"rows.jsonl:4"):
        run.batch([3])


def test_a_stream_and_a_folder_that_is_none_are_refused(dataset, tmp_path):
    stream = Sets(dataset_path=str(tmp_path / "rows.jsonl"), streaming=True)
    with pytest.raises(UserError, match="dataset that is streamed"):
        Run(tmp_path / "tokens", stream).fill()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written to"):
        Run(tmp_path / "file/tokens", dataset).fill()


def test_the_checked_collate_part_looks_rows_up(dataset, tmp_path):
    run = Run(tmp_path / "tokens", dataset)
    cache = run.fill()
    checked = CheckedCollate(run.collate, 400)
    assert _is_equal(checked([dataset[0]], stage=0), run.batch([0]))
    assert cache.num_hits == 2


def test_a_stream_has_no_last_rows_to_pad(tmp_path):
    job = Job(tmp_path)
    write_chat(job.rows, [f"{i}?" for i in range(40)])
    words = job.command("a", "--dataset", "sets", "--dataset.cache", tmp_path / "cache")
    words += ["--prompt-fn", "chat", "--dataset.streaming", "--eval-samples", "0"]
    words = words[words.index("--train-model") :]
    with pytest.raises(UserError, match="--last-rows pad has no effect on --dataset sets"):
        check_data(parse_train_args([*words, "--last-rows", "pad"]))


def test_a_run_fills_the_cache_of_both_sides_and_looks_rows_up(tmp_path, capsys):
    job = Job(tmp_path)
    write_chat(job.rows, [f"{i}?" + "!" * (i % 7) for i in range(40)])
    words = job.command("a", "--dataset", "sets", "--dataset.cache", tmp_path / "cache")
    words += ["--prompt-fn", "chat", "--eval-samples", "all", "--dataset.val_size", "4"]
    words = words[words.index("--train-model") :]
    plain = check_data(parse_train_args(words))
    for said in ("encoded", "found"):
        data = check_data(parse_train_args([*words, "--token-cache", str(tmp_path / "tokens")]))
        out = capsys.readouterr().out
        assert f"36 rows {said}" in out and f"4 rows {said}" in out
        for side in ("train", "test"):
            rows = [getattr(data, side)[row] for row in range(4)]
            assert _is_equal(data.collate(rows, stage=0), plain.collate(rows, stage=0))
        assert token_cache_of(data.processor).num_misses == (40 if said == "encoded" else 0)
    with pytest.raises(ValueError, match="came without --token-cache"):
        parse_train_args([*words, "--token-cache-workers", "2"])

"""--plan of entry files that generate; devices are given, faked, or missing."""

import pytest
import torch

import dataset  # noqa: F401 - fills the registers
import metric  # noqa: F401
import prompt  # noqa: F401
import prompt_fn  # noqa: F401
from models import builders
from models.devices import make_device_map, plan
from options.answer import device_memory
from options.fields import OptionError
from parse_args import parse_chat_args, parse_infer_args
from stageline.errors import UserError
from stageline.inference.model_cutter import Wanted
from stageline.planner.estimate import Load
from tests.helpers.fake_devices import fake_accelerators
from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

GIB = 1024**3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder whose weights cannot be read: a plan does not open them."""
    path = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(path)
    tiny_config("internvl").save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"no weights")
    return path


def entry(name, folder, *options):
    command = ["-m", "stageline", name, "--model-path", str(folder), "--plan", *options]
    return run_entry(command, timeout=200)


@pytest.mark.parametrize(
    ("name", "options", "rows"),
    [
        (
            "eval",
            ("--model", "generate", "--builder", "auto", "--dataset", "jsonl", "--prompt", "chat",
             "--prompt-fn", "chat", "--image-token", "auto", "--metric", "exact_match"),
            "8 rows of 2048 tokens and 1 images",
        ),
    ],
)  # fmt: skip
def test_a_plan_needs_neither_devices_nor_weights(name, options, rows, folder):
    done = entry(name, folder, "--device-memory", "1GiB", "--num-devices", "3", *options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()[-6:]
    assert rows in lines[0] and lines[1].split()[0] == "device"
    assert [line.split()[:2] for line in lines[2:5]] == [["0", "0,3"], ["1", "1"], ["2", "2"]]
    assert lines[5].split()[:2] == ["all", "4"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the devices are asked")
def test_without_devices_their_memory_has_to_be_said(folder):
    with pytest.raises(UserError, match="--device-memory 24GiB"):
        plan(
            str(folder), dtype=torch.float32, placement=Wanted(), visual_gpu_ratio=None,
            num_devices=2, device="auto",
        )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_more_devices_than_the_cpu_is_are_refused(device, monkeypatch):
    fake_accelerators(monkeypatch, "cuda", 0)
    asked = {"device": device, "visual_gpu_ratio": None}
    with pytest.raises(UserError, match=rf"--num-devices 2 requires.*--device {device}.*Leave"):
        make_device_map(None, num_devices=2, **asked)
    assert make_device_map(None, num_devices=1, **asked) == {"": "cpu"}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), None),
        (("--device-memory", "24GiB"), (24 * GIB,)),
        (("--device-memory", "24GiB,48"), (24 * GIB, 48 * GIB)),
        (("--device-memory", "80GB", "--num-devices", "2"), (80 * 10**9,) * 2),
    ],
)
def test_sizes_are_read(options, wanted):
    run = parse_infer_args(["--text", "a", *options]).run
    assert device_memory(run) == wanted and run.visual_gpu_ratio is None
    assert device_memory(parse_chat_args(options).run) == wanted


@pytest.mark.parametrize(
    ("given", "wrong"),
    [("24XB", "cannot be read"), ("0GiB", "cannot be read"), ("1,2,3", "names 3 devices")],
)
def test_sizes_that_make_no_sense_are_refused(given, wrong):
    with pytest.raises(OptionError, match=wrong):
        parse_chat_args(["--device-memory=" + given, "--num-devices", "2"])


@pytest.fixture
def three_gpus(monkeypatch):
    """Three GPUs as torch would show them, of which the second is almost full."""
    free = [2 * GIB, GIB // 2048, 4 * GIB]
    fake_accelerators(
        monkeypatch,
        "cuda",
        3,
        mem_get_info=lambda device: (free[device.index], 8 * GIB),
        **dict.fromkeys(("memory_reserved", "memory_allocated"), lambda device: 0),
    )
    return free


def cut(ratio=None, placement=None, **fields):
    """Return the device of each layer."""
    config = tiny_config("llama", num_hidden_layers=12, hidden_size=64, **fields)
    found = make_device_map(
        config, device="auto", num_devices=None, visual_gpu_ratio=ratio, placement=placement,
        dtype=torch.float32,
    )  # fmt: skip
    return [found[f"model.layers.{index}"] for index in range(12)]


def test_devices_are_asked_what_they_have_left(three_gpus):
    load = Wanted(load=Load(1, 32))
    assert cut(placement=load).count(1) == 1, "the full one takes what it must"
    three_gpus[1] = 2 * GIB
    even = [cut(placement=load).count(device) for device in range(3)]
    assert even[1] > 2 and even[2] > even[1], "the third has twice as much"
    assert [cut(0.0).count(device) for device in range(3)] == [4, 4, 4], "a ratio counts layers"


def test_weights_that_fit_nowhere_are_refused_and_a_load_is_warned_of(three_gpus):
    with pytest.raises(UserError, match="on device 1 is missing"):
        cut(placement=Wanted(load=Load(1, 8)), intermediate_size=4000)
    with pytest.warns(UserWarning, match="memory may not suffice"):
        cut(placement=Wanted(load=Load(1, 4000)))


def test_said_sizes_choose_the_number_of_devices(three_gpus):
    assert set(cut(placement=Wanted(memory=(GIB, GIB)))) == {0, 1}
    assert set(cut(placement=Wanted(memory=(GIB,)))) == {0, 1, 2}
    with pytest.raises(UserError, match="this machine shows 3 devices of the kind cuda"):
        cut(placement=Wanted(memory=(GIB,) * 4))


@pytest.mark.parametrize("make", [plan, builders.auto])
def test_a_text_model_takes_no_share_of_a_tower(make, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    tiny_config("llama").save_pretrained(tmp_path)
    options = {"visual_gpu_ratio": 0.5, "dtype": torch.float32, "num_devices": 1, "device": "cpu"}
    with pytest.raises(UserError, match=r"--visual-gpu-ratio 0\.5 .* vision tower.* llama"):
        make(str(tmp_path), placement=Wanted(), **options)

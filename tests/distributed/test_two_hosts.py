"""A run over two machines, which are network namespaces here; then one is killed, or cut off.

The group's timeout is 600 s: a machine that waits for the other would be noticed.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer
from tests.helpers.warm_start import WarmLauncher

# a file of the same folder; tests do not form a package
sys.path.insert(0, str(Path(__file__).parent))
from two_hosts import MASTER_ADDR, ROOT, enter, torchrun, two_hosts, why_not  # noqa: E402

ENTRY = Path(__file__).with_name("failing_entry.py")
SECONDS = 60
SECONDS_TO_START = 180
REASON = why_not()

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(2 * SECONDS_TO_START + SECONDS),
]


@pytest.fixture(scope="module")
def network():
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def hosts(network):
    """Yield the two hosts, with nothing running and the cable in."""
    network.mend()
    yield network
    network.stop_all()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return options of a tiny llama on forty rows, which every machine sees."""
    folder = tmp_path_factory.mktemp("job")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_config("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    rows = [{"id": str(i), "question": f"{i}?", "answer": f"{i}!"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("--train-model", "llama", "--config-path", str(folder / "model"), "--num-stages", "2"),
        *("--dataset", "jsonl", "--dataset-path", str(folder / "rows.jsonl"), "--device", "cpu"),
        *("--prompt", "question", "--prompt-fn", "fill", "--image-token", "none"),
        *("--collate-fn", "sft", "--loss-fn", "sft", "--batch-size", "8"),
        *("--micro-batch-size", "2", "--max-token-num", "64", "--warmup-steps", "1"),
        # also what the recipe sets otherwise than the defaults: the run alone has to agree
        *("--learning-rate", "1e-3", "--min-lr", "0", "--weight-decay", "0.01"),
        *("--eval-samples", "0", "--eval-steps", "0"),
    ]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def start_recipe(hosts, job, folder, *options):
    """Start the shipped recipe on both hosts, a stage on each; return their logs, too."""
    processes = [
        hosts.start(
            number,
            ["bash", str(ROOT / "scripts" / "train_pp_multinode.sh"), *job]
            + ["--output-dir", str(folder / "run"), *options],
            folder / f"{number}.log",
            NNODES="2",
            NODE_RANK=str(number),
            MASTER_ADDR=MASTER_ADDR,
            NPROC_PER_NODE="1",
            OMP_NUM_THREADS="1",
        )
        for number in range(2)
    ]
    return processes, [folder / f"{number}.log" for number in range(2)]


def start_warm(hosts, folder, *words, num_ranks=1, **environment):
    """Start an entry file on both hosts, below torchruns that are forks of this process."""
    logs = [folder / f"{number}.log" for number in range(2)]
    for number, log in enumerate(logs):
        launcher = torchrun(number, num_ranks=num_ranks)
        fork_on(hosts, number, [*launcher, *map(str, words)], environment, output=log)
    return hosts.started[-2:], logs


def fork_on(hosts, number, words, environment, **options):
    """Fork a torchrun from this process, on a host."""
    told = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    enter_host = partial(enter, hosts.names[number], name="ab"[number])
    run = WarmLauncher(words, {**told, **environment}, enter=enter_host, **options)
    hosts.started.append(run)
    return run


def start_entry(hosts, mode, folder, *, num_ranks=1, **environment):
    """failing_entry.py on both hosts."""
    words = (ENTRY, mode, folder, 2 * num_ranks)
    return start_warm(hosts, folder, *words, num_ranks=num_ranks, **environment)


def wait_for(is_true, processes):
    deadline = time.monotonic() + SECONDS_TO_START
    while not is_true():
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.1)


def said(log):
    """Return what a host printed, without the words of set-up and plan."""
    plain = ("[setup]", "2 machines", "model configuration")
    lines = log.read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith(plain)]


def assert_lost(process, log, rank):
    """It ended, with an error, and its rank said that it lost a neighbour."""
    assert process.wait(SECONDS) == 1
    (line,) = {line for line in said(log) if line.startswith("error[crash]")}
    assert line.startswith(f"error[crash]: rank {rank} (stage {rank}) lost a neighbour that told")


@pytest.mark.skipif(not (ROOT / ".venv").is_dir(), reason="the scripts' environment is not there")
def test_a_run_on_two_hosts_has_the_losses_of_one(hosts, job, tmp_path):
    steps = ("--total-steps", "3", "--num-workers", "1")  # the script has the same number of steps
    processes, logs = start_recipe(hosts, job, tmp_path, *steps)
    codes = [process.wait(SECONDS_TO_START) for process in processes]
    assert codes == [0, 0], logs[0].read_text() + logs[1].read_text()
    alone = tmp_path / "alone"
    done = run_entry([ROOT / "train_pp.py", *job, *steps, "--output-dir", alone])
    assert done.returncode == 0, done.stderr
    assert len(losses(alone)) == 3 and losses(tmp_path / "run") == losses(alone)
    assert len(set(losses(alone))) == 3
    configs = [(folder / "config.yaml").read_text() for folder in (alone, tmp_path / "run")]
    assert configs[0] == configs[1].replace(str(tmp_path / "run"), str(alone))
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
    assert "1 pipelines of 2 ranks: pipelines 0 cross machines" in logs[0].read_text()
    assert said(logs[1]) == []  # only machine 0 writes


def test_a_host_that_is_killed_in_the_middle_ends_the_other(hosts, job, tmp_path):
    options = ("--output-dir", tmp_path / "run", "--total-steps", 100000)
    processes, logs = start_warm(hosts, tmp_path, ROOT / "train_pp.py", *job, *options)
    log = tmp_path / "run" / "log.jsonl"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 2, processes)
    hosts.kill(1)
    assert_lost(processes[0], logs[0], 0)


def test_the_first_host_may_be_the_one_that_is_killed(hosts, tmp_path):
    processes, logs = start_entry(hosts, "never_stop_in_a_wait", tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("started_*"))) == 2, processes)
    hosts.kill(0)
    assert_lost(processes[1], logs[1], 1)


def test_the_host_of_the_rank_that_failed_names_it(hosts, tmp_path):
    processes, logs = start_entry(hosts, "raise_on_1", tmp_path)
    assert [process.wait(SECONDS_TO_START) for process in processes] == [1, 1]
    line = "error[crash] rank=1 stage=1: KeyError: 'boom on purpose' at failing_"
    assert said(logs[1])[0].startswith(line)
    assert "Traceback" in said(logs[1])[1] and "failing_entry.py" in logs[1].read_text()
    assert_lost(processes[0], logs[0], 0)

"""The options of what answers: evaluate, infer, chat and lm_eval, and where their model lies."""

import functools
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from options.data import FewshotOptions, ImageOptions, ReportOptions
from options.fields import OptionError, Options, mapping, option, side_option, spelled
from options.train import DEVICE_HELP, DTYPE_HELP, DeviceKind, SharedOptions, precision_of

# options that several commands have
_adapter_paths = functools.partial(
    option,
    None,
    "LoRA adapter in peft's format, folder or hub name (owner/name[@revision]); several are merged "
    "one after the other",
    is_path=True,
    takes_name=True,
    is_common=True,
)
_adapter_weights = functools.partial(
    option, None, "how much of each adapter is added; default: all of it"
)
_num_devices = functools.partial(
    side_option,
    None,
    "devices that the model is spread over; default: all",
    at_least=1,
    is_common=True,
    to="builder",
)
_longest_answer = functools.partial(
    option, help_text="longest answer, in tokens", at_least=1, is_common=True
)
_temperature = functools.partial(
    option, 0.0, "0 takes the likeliest token, more samples", at_least=0, is_common=True
)


class DecodeOptions(Options):
    """Pipelined decoding (--engine pipeline)"""

    num_stages: int | None = side_option(
        None,
        "stages, one process and device each; default: all GPUs, 1 on the CPU",
        at_least=1,
        is_common=True,
    )
    partition: list[int] | None = side_option(
        None, "layers of each stage, 12,10; default: what evens out a decoding step"
    )
    prove_split: Literal["auto", "always", "never"] = side_option(
        "auto",
        "compare the stages with the whole model first, on a cut-down copy; auto: unless that is "
        "recorded of this model, these versions and options",
    )
    train_model: str | None = side_option(
        None, "key of the stages' train_model part; default: that of the model's architecture"
    )
    max_running: int = side_option(64, "sequences that are answered at a time", at_least=1)
    num_groups: int | None = side_option(
        None,
        "groups that these are divided into, so that all stages work; default: as many as "
        "stages, fewer below 8 sequences a group",
        at_least=1,
    )
    prefill_tokens: int | None = side_option(
        None,
        "prompt tokens of one pass; longer ones in pieces; default: 2048, on a GPU up to 16384",
        at_least=1,
    )
    max_length: int | None = option(
        None, "tokens of the longest prompt with its answer; default: the model's", at_least=2
    )
    cache_gib: float | None = side_option(
        None,
        "GiB on each device for keys and values; default: 0.8 of what is free on a GPU, 0.25 of "
        "the host's free memory",
        at_least=0,
    )
    merge_adapters: bool = side_option(
        False, "add adapters to the weights: fewer operations, rounded differently"
    )


# keys of an engine where none are given
ENGINE_KEYS = {"builder": "auto", "model": "generate"}
API_KEYS = {"builder": "remote", "model": "remote"}
WITH_REPLICAS = ("device_map", "pipeline")  # several processes of a run may have copies
# options of pipelined decoding that another engine has too
SHARED = {"max_length": ("pipeline", "vllm")}


class EngineOptions(DecodeOptions):
    """Engine"""

    engine: Literal["device_map", "pipeline", "vllm", "api"] = option(
        "device_map",
        "device_map: one process over all devices; pipeline: a process a stage, all at work; "
        "vllm: an exported folder in vLLM; api: a model behind an endpoint (--builder.name)",
        is_common=True,
    )
    num_replicas: int | None = side_option(
        None,
        "copies of the model that share the work; default: of a pipeline as many as the GPUs "
        "allow, else 1",
        at_least=1,
    )


def with_engine_keys(
    keys: Mapping[str, str | None], given: Mapping[str, Any]
) -> dict[str, str | None]:
    """The keys of a run with those that suit its --engine, where one was given."""
    item = given.get("engine")
    if item is None or not item.values:
        return dict(keys)
    return {**keys, **(API_KEYS if item.values == ["api"] else ENGINE_KEYS)}


def check_engine(run: EngineOptions) -> None:
    """Refuses numbers that the engine has no use for."""
    for item in fields(DecodeOptions):
        value = getattr(run, item.name)
        engines = SHARED.get(item.name, ("pipeline",))
        if value != item.default and run.engine not in engines:
            raise OptionError(
                f"{spelled(item.name)} {value} came with --engine {run.engine}. Choose "
                f"--engine {' or '.join(engines)}, or leave it out (--num-devices spreads a model "
                "without a pipeline)."
            )
    if (run.num_replicas or 1) > 1 and run.engine not in WITH_REPLICAS:
        raise OptionError(
            f"--num-replicas {run.num_replicas} came with --engine {run.engine}. Leave "
            f"it out: {run.engine} has many requests on their way by itself."
        )


_UNITS = {"": 1024**3, "g": 1024**3, "gib": 1024**3, "gb": 10**9, "mib": 1024**2, "mb": 10**6}


class RowSize(Options):
    """A row, for --plan and the cut"""

    length: int = side_option(2048, "tokens of the longest prompt with its answer", at_least=2)
    images: int = side_option(1, "images of it (tiles count each)", at_least=0)


class PlacementOptions(Options):
    """Devices"""

    visual_gpu_ratio: float | None = side_option(
        None,
        "share of the first device that the vision tower takes, from 1 on all of it: layers are "
        "dealt out by number; "
        "default: by measured bytes",
        at_least=0,
        to="train_model builder",
    )
    plan: bool = option(
        False, "show what would lie on which device, load nothing, and stop", is_saved=False
    )
    device_memory: list[str] | None = side_option(
        None,
        "free memory of each device, 24GiB,48GiB, or of all of them, 24GiB; default: they are "
        "asked. With --plan they need not exist",
    )
    plan_for: RowSize = mapping(RowSize)


def device_memory(run: Any) -> tuple[int, ...] | None:
    """Bytes of each device; None where the devices are to be asked."""
    if not run.device_memory:
        return None
    sizes: tuple[int, ...] = ()
    for text in run.device_memory:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
        unit = _UNITS.get(match[2]) if match else None
        if match is None or unit is None or float(match[1]) <= 0:
            raise OptionError(
                f"--device-memory {text} cannot be read. Write a size such as 24GiB, 80GB or 24 "
                "(GiB)."
            )
        sizes += (int(float(match[1]) * unit),)
    count = run.num_devices or len(sizes)
    if len(sizes) not in (1, count):
        raise OptionError(
            f"--device-memory {','.join(run.device_memory)} names {len(sizes)} devices, and "
            f"--num-devices {count} came. Give one size for all, or one for each."
        )
    return sizes if len(sizes) == count else sizes * count


class ModelOptions(Options):
    """Model and machine"""

    model_path: str | None = option(
        None,
        "folder of a model, adapter or checkpoint, or hub name (owner/name[@revision])",
        is_path=True,
        takes_name=True,
        is_common=True,
    )
    adapter_path: list[str] | None = _adapter_paths()
    device: DeviceKind = option("auto", DEVICE_HELP, to="builder")
    bf16: bool = option(False, "compute in bfloat16", is_common=True, excludes=("--fp16",))
    fp16: bool = option(False, "compute in float16")
    dtype: Literal["auto"] | None = option(None, DTYPE_HELP)
    trust_remote_code: bool = option(
        False, "run Python code that lies in the model folder", to="builder"
    )

    precision = property(precision_of)


def check_has_model(config: ModelOptions) -> None:
    """Refuses options that name no model."""
    if config.model_path is None:
        raise OptionError(
            "--model-path is missing. Give the checkpoint of a run, such as "
            "runs/digits/checkpoints/step-00000400."
        )


class AnswerOptions(Options):
    """Answers"""

    adapter_path: list[str] | None = _adapter_paths()
    adapter_weights: list[float] | None = _adapter_weights()
    batch_size: int = side_option(8, "samples generated together", at_least=1, is_common=True)
    max_new_tokens: int = _longest_answer(64, to="model")
    temperature: float = _temperature(to="model")
    num_devices: int | None = _num_devices()
    limit: int | None = side_option(
        None, "answer only the first samples", at_least=1, is_common=True
    )


class EvaluateConfig(
    FewshotOptions,
    PlacementOptions,
    ReportOptions,
    EngineOptions,
    AnswerOptions,
    ImageOptions,
    SharedOptions,
):
    """Evaluation"""

    output_dir: str = side_option(
        "runs/evaluate",
        "folder of predictions.jsonl, report.json and plots",
        is_output=True,
        is_common=True,
    )


class PromptOptions(Options):
    """What is asked; one of --prompts, --text and --dataset"""

    prompts: str | None = side_option(
        None,
        "file of prompts: a line each (.txt), or rows with question, instruction or messages, and "
        "image, which need no answer (.jsonl, .json)",
        is_path=True,
        is_common=True,
    )
    text: list[str] | None = side_option(
        None, "prompts themselves; repeat it, or give a list in a config file", is_common=True
    )
    print_answers: int = side_option(
        20, "up to so many answers are printed; more stand in the file alone", at_least=0
    )
    skip_bad_rows: int = side_option(
        0,
        "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run",
        at_least=0,
    )


class InferConfig(
    PlacementOptions, PromptOptions, EngineOptions, AnswerOptions, ImageOptions, SharedOptions
):
    """Every option of infer.py."""

    output_dir: str = side_option(
        "runs/infer", "folder of predictions.jsonl", is_output=True, is_common=True
    )
    max_new_tokens: int = _longest_answer(256, to="model")


def check_prompts(run: InferConfig, *, has_dataset: bool) -> None:
    """Refuses a run that asks nothing, or from two places."""
    asked = {"--prompts": run.prompts, "--text": run.text, "--dataset": has_dataset}
    given = [option for option, value in asked.items() if value]
    if len(given) != 1:
        raise OptionError(
            f"{' and '.join(given) or 'nothing to ask'} came. Give one of --prompts FILE, --text "
            "'...' and --dataset KEY."
        )


class ChatServerOptions(Options):
    """A server that answers"""

    server: str | None = option(
        None,
        "address of a server with OpenAI's API, such as http://127.0.0.1:8000",
        is_common=True,
        excludes=("--model-path",),
    )
    server_model: str | None = option(
        None, "the model's name there; default: the first that it names", needs=("--server URL",)
    )
    api_key_env: str = option(
        "OPENAI_API_KEY", "environment variable that holds the key, if the server wants one"
    )


class ChatSettings(Options):
    """Answers; /set changes them"""

    max_new_tokens: int = _longest_answer(512)
    temperature: float = _temperature()
    top_p: float = option(
        1.0, "with a temperature: the likeliest tokens that hold this share", at_least=0, at_most=1
    )
    top_k: int = option(50, "with a temperature: so many of the likeliest tokens", at_least=0)
    repetition_penalty: float = option(
        1.0, "above 1 makes tokens that were there before less likely", at_least=0.01
    )
    seed: int = option(0, "seed of sampling", at_least=0, at_most=10**12)


class ChatConfig(ChatSettings, ChatServerOptions, PlacementOptions, ModelOptions):
    """Chat"""

    adapter_weights: list[float] | None = _adapter_weights()
    num_devices: int | None = _num_devices()


class HarnessSettings(Options):
    """What lm_eval gets as it is"""

    include_path: str | None = option(
        None,
        "folder with tasks of your own (YAML), which come before those of lm_eval",
        is_path=True,
    )
    apply_chat_template: bool = option(False, "ask in the chat template of the model")
    system_instruction: str | None = option(None, "what the model is told first")
    fewshot_as_multiturn: bool = option(
        True, "with the chat template: examples as earlier turns, not as one text"
    )
    gen_kwargs: str | None = option(
        None, "in place of the tasks' own: do_sample=True,temperature=0.7,max_gen_toks=64"
    )
    add_bos_token: bool | None = option(
        None, "begin each text with that token; default: as the tokenizer does"
    )
    confirm_run_unsafe_code: bool = option(False, "run tasks that execute what the model wrote")
    log_samples: bool = option(
        False, "write each question with its answer there as well", needs=("--output-path FOLDER",)
    )


class TaskOptions(Options):
    """Tasks of lm_eval"""

    tasks: str | None = option(
        None, "names of tasks, groups or tags, between commas", is_common=True
    )
    num_fewshot: int | None = option(
        None, "examples before each question; default: as the task says", at_least=0, is_common=True
    )
    limit: float | None = option(
        None,
        "only so many questions of each task; below 1: such a share of them",
        at_least=0,
        is_common=True,
    )
    lm_eval: HarnessSettings = mapping(HarnessSettings)
    output_path: str | None = option(
        None, "folder of results_DATE.json, as lm_eval writes it", is_output=True, is_common=True
    )


class LmEvalConfig(TaskOptions, DecodeOptions, ModelOptions):
    """Run"""

    seed: int = option(0, "seed of sampled answers", at_least=0, at_most=10**12)
    check_only: bool = option(
        False, "check everything that can be checked, then stop", is_saved=False
    )


def check_tasks(run: LmEvalConfig) -> None:
    """Refuses options that name no model or no task."""
    if not task_names(run):
        raise OptionError(
            "--tasks is missing. Give names, --tasks arc_easy,hellaswag; `lm_eval ls tasks` lists "
            "them."
        )


def task_names(run: TaskOptions) -> list[str]:
    """What stands between the commas."""
    return [name.strip() for name in (run.tasks or "").split(",") if name.strip()]

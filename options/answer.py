"""Options of the commands that answer: evaluate, infer, chat and lm_eval."""

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from options.data import BAD_ROWS, BootstrapSettings, FewshotSettings, ImageOptions
from options.fields import OptionError, Options, mapping, num_bytes, option, side_option, spelled
from options.train import PROVE_HELP, MachineOptions, SharedOptions

# options that several commands have
_model_path = functools.partial(option, None, is_path=True, takes_name=True)
_adapter_paths = functools.partial(
    _model_path, "LoRA adapters in peft's format: folders or hub names, merged in order"
)
_adapter_weights = functools.partial(option, None, "weight of each adapter; default: 1")
_num_devices = functools.partial(
    side_option, None, "number of devices of the model; default: all", ge=1, to="builder"
)
_longest_answer = functools.partial(option, help_text="longest answer, in tokens", ge=1)
_temperature = functools.partial(option, 0.0, "sampling temperature (0 = greedy)", ge=0)


class DecodeOptions(Options):
    """Parallelism: decoding with --engine pipeline"""

    num_stages: int | None = side_option(None, "pipeline stages; default: all GPUs, or 1", ge=1)
    partition: list[int] | None = side_option(None, "layers per stage, 12,10; default: equal times")
    prove_split: Literal["auto", "always", "never"] = side_option("auto", PROVE_HELP)
    train_model: str | None = side_option(None, "train_model component; default: by architecture")
    max_running: int = side_option(64, "sequences decoded at a time", ge=1)
    num_groups: int | None = side_option(None, "groups of sequences; default: one a stage", ge=1)
    prefill_tokens: int | None = side_option(
        None, "prompt tokens per pass; default: 2048, on a GPU up to 16384", ge=1
    )
    max_length: int | None = option(None, "most tokens of a sequence; default: the model's", ge=2)
    cache_gib: float | None = side_option(
        None, "KV cache of each device, in GiB; default: 0.8 of its free memory, 0.25 on CPU", ge=0
    )
    merge_adapters: bool = side_option(False, "merge adapters into the weights (rounds otherwise)")


# default keys of an engine
ENGINE_KEYS = {"builder": "auto", "model": "generate"}
API_KEYS = {"builder": "remote", "model": "remote"}


class EngineOptions(DecodeOptions):
    """Parallelism: engine"""

    engine: Literal["device_map", "pipeline", "vllm", "api"] = option(
        "device_map",
        "device_map = one process over all devices, pipeline = one process per stage, vllm = an "
        "exported folder in vLLM, api = a model behind an endpoint (--builder.name)",
    )
    num_replicas: int | None = side_option(None, "copies of the model; default: all fit", ge=1)


def with_engine_keys(
    keys: Mapping[str, str | None], given: Mapping[str, Any]
) -> dict[str, str | None]:
    """Return the keys of a run with those that suit its --engine, where one was given."""
    item = given.get("engine")
    if item is None or not item.values:
        return dict(keys)
    return {**keys, **(API_KEYS if item.values == ["api"] else ENGINE_KEYS)}


def check_engine(run: EngineOptions) -> None:
    """Refuse options of pipelined decoding, and replicas, with an engine that has none."""
    for item in fields(DecodeOptions):
        value = getattr(run, item.name)
        engines = ("pipeline", "vllm") if item.name == "max_length" else ("pipeline",)
        if value != item.default and run.engine not in engines:
            raise OptionError(
                f"{spelled(item.name)} {value} requires --engine {' or '.join(engines)}. Add it, "
                f"or drop {spelled(item.name)} (--num-devices spreads a model without a pipeline)."
            )
    if (run.num_replicas or 1) > 1 and run.engine not in ("device_map", "pipeline"):
        raise OptionError(f"--num-replicas does not go with --engine {run.engine}. Drop it.")


class RowSize(Options):
    """Parallelism: row that --plan and the split assume"""

    length: int = side_option(2048, "longest prompt with its answer, in tokens", ge=2)
    images: int = side_option(1, "images of the row (each tile counts)", ge=0)


class PlacementOptions(Options):
    """Parallelism: devices"""

    visual_gpu_ratio: float | None = side_option(
        None,
        "share of the first device for the vision tower (1 or more = all of it), with layers "
        "split by number; default: by measured bytes",
        ge=0,
        to="train_model builder",
    )
    plan: bool = option(False, "print the device of each layer, without loading", is_saved=False)
    device_memory: list[str] | None = side_option(
        None, "free memory of each device, such as 24GiB,48GiB, or of all; default: measured"
    )
    plan_for: RowSize = mapping(RowSize)


def device_memory(run: Any) -> tuple[int, ...] | None:
    """Return the bytes of each device; None = measure the devices."""
    if not run.device_memory:
        return None
    sizes = tuple(num_bytes(text, "--device-memory", unit="gib") for text in run.device_memory)
    count = run.num_devices or len(sizes)
    if len(sizes) not in (1, count):
        raise OptionError(
            f"--device-memory {','.join(run.device_memory)} names {len(sizes)} devices, "
            f"--num-devices is {count}. Give one size for all, or one for each."
        )
    return sizes if len(sizes) == count else sizes * count


class ModelOptions(MachineOptions):
    """Model"""

    model_path: str | None = _model_path("model, adapter or checkpoint: a folder or hub name")
    adapter_path: list[str] | None = _adapter_paths()


def check_has_model(config: Any) -> None:
    """Refuse options that name no model."""
    if config.model_path is None:
        raise OptionError(
            "--model-path is missing. Give a model folder or the checkpoint of a run, such as "
            "runs/digits/checkpoints/step-00000400."
        )


class AnswerOptions(Options):
    """Answers"""

    model_path: str | None = _model_path("folder or hub name; required unless --builder needs none")
    adapter_path: list[str] | None = _adapter_paths()
    adapter_weights: list[float] | None = _adapter_weights()
    batch_size: int = side_option(8, "samples per batch", ge=1)
    max_new_tokens: int = _longest_answer(64, to="model")
    temperature: float = _temperature(to="model")
    num_devices: int | None = _num_devices()
    limit: int | None = side_option(None, "number of first samples; default: all", ge=1)


class EvaluateConfig(PlacementOptions, EngineOptions, AnswerOptions, ImageOptions, SharedOptions):
    """Data"""

    num_fewshot: int = option(0, "solved samples before each question, as turns or templates", ge=0)
    fewshot: FewshotSettings = mapping(FewshotSettings)
    compare_with: str | None = side_option(None, "predictions.jsonl of another run", is_path=True)
    bootstrap: BootstrapSettings = mapping(BootstrapSettings)
    skip_bad_rows: int = side_option(0, BAD_ROWS, ge=0)
    output_dir: str = side_option("runs/evaluate", "folder of answers and reports", is_output=True)


class InferConfig(PlacementOptions, EngineOptions, AnswerOptions, ImageOptions, SharedOptions):
    """Data: one of --prompts, --text and --dataset"""

    prompts: str | None = side_option(None, "prompts: lines (.txt) or rows (.jsonl)", is_path=True)
    text: list[str] | None = side_option(None, "prompt; repeatable, or a list in a config file")
    print_answers: int = side_option(20, "number of printed answers; all are in the file", ge=0)
    skip_bad_rows: int = side_option(0, BAD_ROWS, ge=0)
    output_dir: str = side_option("runs/infer", "folder of predictions.jsonl", is_output=True)
    max_new_tokens: int = _longest_answer(256, to="model")


class ChatSettings(Options):
    """Answers: /set changes them"""

    max_new_tokens: int = _longest_answer(512)
    temperature: float = _temperature()
    top_p: float = option(1.0, "probability mass of the sampled tokens (1 = all)", ge=0, le=1)
    top_k: int = option(50, "number of likeliest tokens to sample from (0 = all)", ge=0)
    repetition_penalty: float = option(1.0, "penalty of earlier tokens (1 = off)", ge=0.01)
    seed: int = option(0, "sampling seed", ge=0, le=10**12)


class ChatConfig(ChatSettings, PlacementOptions, ModelOptions):
    """Server"""

    server: str | None = option(
        None, "server with OpenAI's API: http://127.0.0.1:8000", excludes=("--model-path",)
    )
    server_model: str | None = option(
        None, "name of the server's model; default: the first of its list", needs=("--server URL",)
    )
    api_key_env: str = option("OPENAI_API_KEY", "environment variable with the server's API key")
    adapter_weights: list[float] | None = _adapter_weights()
    num_devices: int | None = _num_devices()


class HarnessSettings(Options):
    """Data: settings of lm_eval itself"""

    include_path: str | None = option(None, "folder of your tasks, before lm_eval's", is_path=True)
    apply_chat_template: bool = option(False, "apply the model's chat template")
    system_instruction: str | None = option(None, "system message")
    fewshot_as_multiturn: bool = option(True, "examples as earlier turns of the chat template")
    gen_kwargs: str | None = option(None, "generation settings, such as do_sample=True,top_p=0.9")
    add_bos_token: bool | None = option(None, "add BOS to each text; default: as the tokenizer")
    confirm_run_unsafe_code: bool = option(False, "run tasks that execute the model's code")
    log_samples: bool = option(False, "write question and answer", needs=("--output-path FOLDER",))


class LmEvalConfig(DecodeOptions, ModelOptions):
    """Data: tasks of lm_eval"""

    tasks: str | None = option(None, "names of tasks, groups or tags, a,b", is_needed=True)
    num_fewshot: int | None = option(None, "examples before a question; default: the task's", ge=0)
    limit: float | None = option(None, "questions per task, below 1 as a share; default: all", ge=0)
    lm_eval: HarnessSettings = mapping(HarnessSettings)
    output_path: str | None = option(None, "folder of lm_eval's results_DATE.json", is_output=True)
    seed: int = option(0, "seed of sampled answers", ge=0, le=10**12)
    check_only: bool = option(False, "check all options and files, then stop", is_saved=False)

    @property
    def task_names(self) -> list[str]:
        """Return the names of --tasks."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]

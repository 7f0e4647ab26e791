"""The options of a run that belong to no part: their names, defaults, limits and help texts.

Plain dataclasses. What they must be together is in checks.py, reading a command line in
parse_args.py. Options of one part are not here: they are the signature of that part.
"""

from dataclasses import dataclass
from typing import Literal

from options.answer_options import AnswerOptions
from options.attention_options import AttentionOptions
from options.checkpoint_options import CheckpointOptions
from options.corpus_run_options import CorpusRunOptions
from options.data_options import DataOptions
from options.engine_options import EngineOptions
from options.fault_options import FaultOptions
from options.fewshot_options import FewshotOptions
from options.fields import option
from options.image_options import ImageOptions
from options.lora_options import LoRAOptions
from options.machine_options import MachineOptions
from options.memory_options import MemoryOptions
from options.method_options import MethodOptions
from options.model_options import precision_of
from options.number_options import NumberOptions
from options.part_training_options import PartTrainingOptions
from options.placement_options import PlacementOptions
from options.plan_options import PlanOptions
from options.preview_options import PreviewOptions
from options.reference_options import ReferenceOptions
from options.report_options import ReportOptions
from options.shape_options import ShapeOptions
from options.stop_options import StopOptions
from options.streaming_options import StreamingOptions
from options.token_cache_options import TokenCacheOptions
from options.vision_options import VisionOptions


@dataclass(kw_only=True)
class SharedOptions:
    """Files and machine"""

    model_path: str | None = option(
        None, "checkpoint folder with *.safetensors; without it weights start random", is_path=True
    )
    dataset_path: str | None = option(
        None, "file or folder of the dataset, or prefix of a corpus", is_path=True, is_pattern=True
    )
    output_dir: str = option(
        "runs/train", "run folder: config, logs, plots, checkpoints", is_output=True
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes GPUs where there are any")
    bf16: bool = option(False, "compute in bfloat16")
    fp16: bool = option(False, "compute in float16")
    seed: int = option(0, "seed of initialisation, order and dropout", at_least=0)
    visual_gpu_ratio: float = option(
        0.0, "share of the first device that the vision tower takes", at_least=0, at_most=1
    )
    trust_remote_code: bool = option(False, "run Python code that lies in the model folder")
    num_workers: int = option(0, "processes that load data, per rank", at_least=0)
    check_only: bool = option(False, "check everything that can be checked, then stop")


@dataclass(kw_only=True)
class TrainPathOptions:
    """Model files"""

    config_path: str | None = option(
        None, "config.json or its folder; default: --model-path", is_path=True
    )
    processor_path: str | None = option(
        None, "tokenizer or processor folder; default: --model-path", is_path=True
    )


@dataclass(kw_only=True)
class BatchOptions:
    """Batches"""

    batch_size: int = option(16, "samples of one schedule step, per replica", at_least=1)
    micro_batch_size: int = option(
        2, "rows that travel together; of sorted ones the mean", at_least=1
    )
    accumulate_steps: int = option(1, "batches of one optimizer step", at_least=1)
    max_token_num: int = option(512, "longest sample, in tokens", at_least=1)


@dataclass(kw_only=True)
class FreezeOptions:
    """What is trained"""

    frozen_vit: bool = option(False, "keep the vision tower as it is")
    frozen_mlp: bool = option(False, "keep the projector as it is")
    frozen_llm: bool = option(False, "keep the language model as it is")
    frozen_lm_head: bool = option(False, "keep the output layer as it is")
    vit_lora_num: int = option(0, "LoRA adapters stacked on the vision tower", at_least=0)
    mlp_lora_num: int = option(0, "LoRA adapters stacked on the projector", at_least=0)
    llm_lora_num: int = option(0, "LoRA adapters stacked on the language model", at_least=0)
    lora_rank: int = option(8, "rank of an adapter", at_least=1)
    lora_alpha: float = option(16.0, "an adapter's output is scaled by alpha / rank", at_least=0)
    lora_dropout: float = option(0.0, "dropout before an adapter", at_least=0, below=1)
    lora_target: list[str] | None = option(
        None, "last names of the wrapped linear layers, q_proj,v_proj; default: all"
    )


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimization"""

    learning_rate: float = option(1e-4, "highest learning rate", at_least=0)
    min_lr: float = option(0.0, "learning rate at the last step", at_least=0)
    warmup_steps: int = option(0, "optimizer steps of warm-up", at_least=0)
    warmup_start_lr: float = option(0.0, "learning rate at the first step", at_least=0)
    total_steps: int = option(100, "optimizer steps of the run", at_least=1)
    weight_decay: float = option(0.01, "decay of matrices, not of norms and biases", at_least=0)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0: never", at_least=0)


@dataclass(kw_only=True)
class PipelineOptions:
    """Pipeline"""

    schedule: str = option(
        "1f1b",
        "order of forward and backward passes: gpipe, 1f1b, looped_bfs, interleaved_1f1b, "
        "interleaved_zero_bubble, zbv, dualpipev, or the path of a .csv file",
    )
    num_stages: int | None = option(
        None, "parts that the model is cut into; default: those of the processes", at_least=1
    )
    stages_per_rank: int | None = option(
        None, "stages that a process holds; default: 1, or 2 where --schedule needs it", at_least=1
    )
    dp_degree: int | None = option(
        None, "replicas of the pipeline; default: as many as the processes make", at_least=1
    )
    dp_shard: bool = option(False, "replicas share weights and optimizer state (FSDP2)")
    partition: Literal["uniform", "parameters", "measured"] | list[int] = option(
        "uniform",
        "layers of each stage behind --vision-stages, 8,8,7,9; uniform: equal numbers; "
        "parameters: equal bytes; measured: equal times on this device, within its memory",
    )
    prove_split: Literal["auto", "always", "never"] = option(
        "auto",
        "compare the stages with the whole model first, on a cut-down copy; auto: unless that is "
        "recorded of this model, these versions and options",
    )


@dataclass(kw_only=True)
class ProgressOptions:
    """Progress"""

    log_steps: int = option(1, "optimizer steps between log lines", at_least=1)
    eval_steps: int = option(0, "optimizer steps between evaluations; 0: at the end", at_least=0)
    eval_samples: Literal["all"] | int = option(
        "all", "held-out samples of an evaluation, spread evenly; 0: no evaluation", at_least=0
    )
    timeline_step: int = option(
        3, "optimizer step whose passes are timed and drawn (timeline.png); 0: none", at_least=0
    )


@dataclass(kw_only=True)
class RunConfig(
    CorpusRunOptions,
    TokenCacheOptions,
    PreviewOptions,
    AttentionOptions,
    DataOptions,
    ImageOptions,
    FaultOptions,
    MachineOptions,
    CheckpointOptions,
    ProgressOptions,
    StopOptions,
    MemoryOptions,
    NumberOptions,
    PlanOptions,
    StreamingOptions,
    VisionOptions,
    PipelineOptions,
    OptimizerOptions,
    MethodOptions,
    PartTrainingOptions,
    ReferenceOptions,
    LoRAOptions,
    FreezeOptions,
    ShapeOptions,
    BatchOptions,
    TrainPathOptions,
    SharedOptions,
):
    """Every option of a training run that belongs to no part."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.batch_size * self.accumulate_steps // self.micro_batch_size

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The compute type by its short name."""
        return precision_of(self)


@dataclass(kw_only=True)
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

    output_dir: str = option(
        "runs/evaluate", "folder of predictions.jsonl, report.json and plots", is_output=True
    )

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The compute type by its short name."""
        return precision_of(self)

"""Options about which weights of a training run are kept, and about going on with a run."""

from dataclasses import dataclass

from options.fields import option


@dataclass(kw_only=True)
class CheckpointOptions:
    """Checkpoints"""

    save_steps: int = option(0, "optimizer steps between checkpoints; 0: at the end", at_least=0)
    save_best: str = option(
        "none",
        "keep the weights with the best held-out figure as checkpoints/best: loss, token_accuracy, "
        "or another of the log",
    )
    keep_last: int = option(0, "how many checkpoints stay, besides the best; 0: all", at_least=0)
    sync_save: bool = option(
        False, "write checkpoints before training goes on; needs no copy in host memory"
    )
    resume: str | None = option(
        None, "auto: go on from the newest whole checkpoint of --output-dir; or the path of one"
    )
    allow_changes: bool = option(
        False, "resume although settings that decide the course of training differ"
    )


# options that leave losses and weights as they are, but for the order of sums
FREE_ON_RESUME = frozenset(
    # files: their contents are compared, not where they lie
    "import model_path config_path processor_path dataset_path output_dir trust_remote_code "
    # machine and pipeline
    "device num_workers num_stages stages_per_rank schedule dp_degree dp_shard partition "
    "visual_gpu_ratio vision_stages vision_partition prove_split "
    "device_memory lost_after hang_timeout stop_deadline "
    # the product of these is compared
    "batch_size accumulate_steps "
    # memory
    "gradient_checkpointing checkpoint_every checkpoint_mode offload_activations compile_layers "
    "logits_chunk streaming_budget streaming_stages recompute_grain pin_model "
    # what is kept of images, and what is refused
    "token_cache token_cache_workers dataset.cache "
    "image_cache image_cache_gib max_image_pixels max_images_per_sample "
    # progress and checkpoints
    "log_steps eval_steps eval_samples timeline_step save_steps save_best keep_last sync_save "
    "early_stop early_stop_metric early_stop_delta tracker "
    "resume allow_changes max_skipped_steps replay_steps preview".split()
)


def leaves_course(name: str) -> bool:
    """Whether an option, as a config file spells it, may differ between a run and its resume."""
    part = name.replace("-", "_").partition(".")[0]
    return part in FREE_ON_RESUME if part == "tracker" else name.replace("-", "_") in FREE_ON_RESUME

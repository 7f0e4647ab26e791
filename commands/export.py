"""Export a checkpoint of a run as one plain Hugging Face folder.

python export.py --model-path runs/x/checkpoints/step-100 --output-path my_model --merge

`checkpoints/best` in place of a step is the best evaluation's, of a run with --save-best.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from commands import quiet_transformers, start
from commands.stages import StageBuilder, lora_options, stage_key
from options.export import shard_bytes
from options.parts import chosen_part
from parse_args import CheckArguments, parse_export_args
from stageline.errors import UserError

if TYPE_CHECKING:
    from stageline.stage import Stage
    from stageline.verify.scaled_copy import VerifyMode

NUM_STAGES = 2  # that an export is compared with


def main() -> None:
    """Export, and print what was written."""
    run = start(parse_export_args).run
    import torch  # after the options: --help answers at once

    from stageline.checkpoint.plain_folder import export_folder

    quiet_transformers()
    assert run.model_path is not None and run.output_path is not None
    report = export_folder(
        Path(run.model_path),
        Path(run.output_path),
        merge=run.merge,
        adapter_paths=[Path(path) for path in run.adapter_path or ()],
        adapter_weights=run.adapter_weights,
        dtype=None if run.dtype == "auto" else getattr(torch, run.dtype),
        max_shard_bytes=shard_bytes(run),
        overwrites=run.overwrite,
        trust_remote_code=run.trust_remote_code,
    )
    print(f"exported the {'adapter' if report.is_adapter else 'model'} to {report.folder}")
    for note in report.notes:
        print(f"note: {note}")


def check_exported(config: CheckArguments) -> int:
    """Compare an exported folder with its checkpoint, print how, and return the exit code."""
    from stageline.checkpoint.export_files import find_source
    from stageline.verify.export import check_export

    run, part = config.run, config.parts.get("train_model")
    if run.model_path is None:
        raise UserError("--exported requires --model-path. Add --model-path CHECKPOINT.")
    assert run.exported is not None
    verdict = check_export(
        find_source(run.model_path),
        Path(run.exported),
        make_stages=functools.partial(
            make_stages,
            key=None if part is None else part.key,
            trust_remote_code=run.trust_remote_code,
            prove_split=run.prove_split,
        ),
        adapter_paths=[Path(path) for path in run.adapter_path or ()],
        adapter_weights=run.adapter_weights,
        trust_remote_code=run.trust_remote_code,
    )
    print(
        f"compared with {verdict.reference} ({' and '.join(verdict.probes)}): logits differ by "
        f"{verdict.difference:.1e} of the largest, {verdict.tolerance} is allowed"
    )
    for note in verdict.notes:
        print(f"note: {note}")
    return 0


def make_stages(
    folder: Path,
    *,
    key: str | None = None,
    trust_remote_code: bool = False,
    prove_split: "VerifyMode" = "auto",
) -> "list[Stage] | str":
    """Return the stages of a checkpoint as training builds them, or why there are none.

    They are in float32 on the CPU, in evaluation mode; `key` is of the train_model component.
    """
    import torch

    from stageline.checkpoint.adapter import config_folder
    from stageline.checkpoint.files import ADAPTER_CONFIG
    from stageline.checkpoint.layout import MANIFEST
    from stageline.checkpoint.plain_model import is_scored
    from stageline.model_folder import load_config
    from stageline.modules.stage_names import check_names, names_of_stage

    is_adapter = (folder / ADAPTER_CONFIG).exists()
    base = config_folder(folder)
    model_config = load_config(base, trust_remote_code=trust_remote_code)
    key = key or ("reward" if is_adapter and is_scored(folder) else stage_key(model_config))
    if key is None:
        return f"no train_model part is made for {(model_config.architectures or ['it'])[0]}"
    builder = StageBuilder(
        chosen_part("train_model", key),
        str(base),
        min(NUM_STAGES, model_config.get_text_config(decoder=True).num_hidden_layers),
        checkpoint_path=str(folder),
        trust_remote_code=trust_remote_code,
        options={"is_piece": True},  # needs no processor
    )
    builder.verify(prove_split, say=print)
    try:
        options = lora_options(folder, builder) if is_adapter else {}
        stages = [
            builder.build(stage, dtype=torch.float32, device="cpu", **options).eval()
            for stage in range(builder.num_stages)
        ]
    except (UserError, ValueError) as error:
        if (folder / MANIFEST).exists():
            raise
        return str(error)  # a folder from elsewhere may contain files that no run saves
    check_names([names_of_stage(stage) for stage in stages])
    return stages

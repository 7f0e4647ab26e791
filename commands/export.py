"""Entry file: make one plain Hugging Face folder of a checkpoint that a run saved.

python export.py --model-path runs/x/checkpoints/step-100 --output-path my_model --merge

`checkpoints/best` in place of a step is the best evaluation's, of a run with --save-best.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from commands import importing, quiet_transformers
from commands.stages import StageBuilder, lora_options, stage_key
from options.command_line import old_names
from options.fields import num_bytes, spelled
from options.parts import chosen_part
from register import import_parts
from stageline.errors import UserError
from stageline.hub import local_folder, read_name

if TYPE_CHECKING:
    from parse_args import CheckArguments
    from stageline.stage import Stage
    from stageline.verify.scaled_copy import VerifyMode

DTYPES = ("auto", "float32", "bfloat16", "float16")
NUM_STAGES = 2  # that an export is compared with


def folders(text: str) -> tuple[Path, ...]:
    """Parse folders between commas, all of which exist, or names on a hub."""
    found = tuple(Path(one).expanduser() for one in text.split(","))
    if missing := [path for path in found if not path.is_dir() and read_name(path) is None]:
        raise argparse.ArgumentTypeError(
            f"{missing[0]} is not a folder. Correct it, or give a hub's owner/name"
        )
    return found


def numbers(text: str) -> tuple[float, ...]:
    """Parse numbers between commas."""
    return tuple(float(one) for one in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this entry."""
    parser = argparse.ArgumentParser(
        prog="export.py",
        description="Makes one plain Hugging Face folder of a checkpoint that a run saved.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="checkpoint, model folder or hub name")
    add("--output-path", type=Path, required=True, help="new folder")
    merge = "add an adapter to its base (else: an adapter for peft)"
    add("--merge", action="store_true", help=merge)
    add("--adapter-path", type=folders, default=(), metavar="A,B", help="adapters to add in turn")
    add("--adapter-weights", type=numbers, metavar="X,Y", help="share of each adapter (default: 1)")
    add("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as they are)")
    add("--max-shard-size", type=num_bytes, default=5 * 10**9, metavar="SIZE", help="default: 5GB")
    own = "file or module with components and models of yours; repeat it for more"
    add("--import", dest="imports", action="append", default=[], metavar="FILE", help=own)
    add("--overwrite", action="store_true", help="replace a model folder at --output-path")
    code = "run and copy Python code of the model folder"
    add("--trust-remote-code", action="store_true", help=code)
    return parser


def main() -> None:
    """Export, and print what was written."""
    gone = {spelled(name): why for name, why in old_names("gone_from_export").items()}
    for word in sys.argv[1:]:
        if why := gone.get(word.partition("=")[0]):
            raise UserError(f"{word}: there is no such option any more. {why}")
    options = make_parser().parse_args()
    with importing():  # after the options: --help answers at once
        import torch

        from stageline.checkpoint.plain_folder import export_folder

    quiet_transformers()
    import_parts(dict.fromkeys(options.imports))
    if options.adapter_weights and not options.adapter_path:
        raise UserError("--adapter-weights requires --adapter-path. Add it or drop the weights.")
    report = export_folder(
        local_folder(options.model_path),
        options.output_path,
        merge=options.merge,
        adapter_paths=[local_folder(p, option="`adapter_path`") for p in options.adapter_path],
        adapter_weights=options.adapter_weights,
        dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
        max_shard_bytes=options.max_shard_size,
        overwrites=options.overwrite,
        trust_remote_code=options.trust_remote_code,
    )
    print(f"exported the {'adapter' if report.is_adapter else 'model'} to {report.folder}")
    for note in report.notes:
        print(f"note: {note}")


def check_exported(arguments: "CheckArguments") -> int:
    """Compare an exported folder with its checkpoint, print how, and return the exit code."""
    with importing():
        from stageline.checkpoint.check_export import check_export
        from stageline.checkpoint.export_files import find_source
    run, part = arguments.run, arguments.parts.get("train_model")
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
        f"{verdict.difference:.1e} of the largest, {verdict.tolerance} is allowed; generated "
        "tokens agree"
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
    from stageline.checkpoint.layout import MANIFEST, Ranks
    from stageline.checkpoint.plain_model import is_scored
    from stageline.model_folder import load_config
    from stageline.modules.stage_names import check_names, names_of_stage

    is_adapter = (folder / ADAPTER_CONFIG).exists()
    base = config_folder(folder)
    config = load_config(base, trust_remote_code=trust_remote_code)
    key = key or ("reward" if is_adapter and is_scored(folder) else stage_key(config))
    if key is None:
        return f"no train_model part is made for {(config.architectures or ['it'])[0]}"
    builder = StageBuilder(
        chosen_part("train_model", key),
        str(base),
        min(NUM_STAGES, config.get_text_config(decoder=True).num_hidden_layers),
        checkpoint_path=str(folder),
        trust_remote_code=trust_remote_code,
        options={"is_piece": True},  # needs no processor
    )
    builder.verify(prove_split, ranks=Ranks.of(None), say=print)
    try:
        options = lora_options(folder, builder) if is_adapter else {}
        stages = [
            builder.build(stage, dtype=torch.float32, device="cpu", **options).eval()
            for stage in range(builder.num_stages)
        ]
    except (UserError, ValueError) as error:
        if (folder / MANIFEST).exists():
            raise
        return str(error)  # a folder from elsewhere may hold what no run would save
    check_names([names_of_stage(stage) for stage in stages])
    return stages

"""Entry file: makes one plain Hugging Face folder of a checkpoint that a run saved.

python export.py --model-path runs/x/checkpoints/step-100 --output-path my_model --merge

`checkpoints/best` in place of a step is the best evaluation's, of a run with --save-best.
"""

import argparse
from pathlib import Path

from stageline.distributed.failure import run_entry

DTYPES = ("float32", "bfloat16", "float16")


def parse_options() -> argparse.Namespace:
    """The options of this entry; see --help."""
    parser = argparse.ArgumentParser(
        prog="export.py",
        description="Makes one plain Hugging Face folder of a checkpoint that a run saved.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--output-path", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add an adapter to its base model; else it is exported as an adapter for peft",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the exported weights (default: as they are)"
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load the result in plain transformers and compare logits (default: on)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that a model folder brings along",
    )
    return parser.parse_args()


def main() -> None:
    """Exports and says what was written."""
    options = parse_options()
    # after the options: --help answers at once
    import torch

    from stageline.checkpoint.export import export_folder

    report = export_folder(
        options.model_path,
        options.output_path,
        merge=options.merge,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        verifies=options.verify,
        trust_remote_code=options.trust_remote_code,
    )
    what = "adapter" if report.is_adapter else "model"
    print(f"exported the {what} to {report.folder}")
    if report.difference is not None:
        print(
            f"compared with the checkpoint: logits differ by {report.difference:.1e} of the largest"
        )


if __name__ == "__main__":
    run_entry(main)

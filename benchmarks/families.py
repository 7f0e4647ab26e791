"""Every family of transformers: split over stages, against the library's own whole model.

A name is a model type of the library's causal-LM or image-text-to-text classes. Its configuration
is cut down, weights are random, multipliers off one; loss, logits and every gradient are compared
on 2 and 3 stages, tied and untied, with padding and without, with several pictures in a row and
with none. Each name runs in a process of its own, with a limit of time.
Usage: families.py [NAME ...] [--all] [--kind text|vision] [--jobs N] [--json FILE]
    [--markdown FILE]
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("STAGELINE_PROVE_SPLIT", "never")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from transformers import LlamaForCausalLM  # noqa: F401, loads the library before the forks
from transformers.utils import logging

import pp_models  # noqa: F401, the shelf
from benchmarks.families_page import FamilyResult, write_page
from benchmarks.families_split import told, try_family
from commands.stages import stage_key
from register import train_model_register
from stageline.errors import UserError
from stageline.model_folder import load_config
from tests.helpers.family_configs import family_config
from tests.helpers.stand_in_tower import stand_in_for_timm

stand_in_for_timm()
LIMIT = 240  # seconds a name
KINDS = {
    "text": (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    "vision": (
        transformers.AutoModelForImageTextToText,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ),
}
BAD = ("WRONG", "crash")

# names that are not tried, with the reason: most are no decoder that one could split
_ENCODER_DECODER = "an encoder and a decoder: it makes no text without what the encoder read"
NO_DECODER: dict[str, str] = {
    **dict.fromkeys(
        (
            *("florence2", "pix2struct", "t5gemma2", "udop", "vision-encoder-decoder"),
            *("pp_formulanet",),
        ),
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "makes sounds from a text encoder's states"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "drafts for another model, whose keys and values it reads",
    ),
    "diffusion_gemma": "fills in a canvas of tokens in many steps, no next token",
    "evolla": "reads proteins, no pictures",
    **dict.fromkeys(
        ("chameleon", "emu3"),
        "its tokens of pictures are named by the map of a real vocabulary, which no "
        "configuration has by default",
    ),
    **dict.fromkeys(("fast_vlm", "perception_lm"), "its tower is made by timm, not installed here"),
    **dict.fromkeys(
        ("blip", "git", "idefics", "kosmos-2", "kosmos-2.5"),
        "images have no tokens in the text: each row has one, before or next to it",
    ),
    **dict.fromkeys(
        ("blip-2", "instructblip", "instructblipvideo"), "takes no row without a picture"
    ),
    "pi0": "makes actions of a robot, no text",
}


def build_stage(folder: Path, stage: int, num_stages: int, dtype: torch.dtype) -> torch.nn.Module:
    """A stage by the part of its architecture, filled from the folder by its own names."""
    config = load_config(str(folder))
    key = stage_key(config)
    if key is None:
        raise UserError(
            f"{config.model_type}: the library saves this model under a configuration of which its "
            "own classes know none, so that no train_model part is made for it. Use the whole "
            "model that it is a part of."
        )
    model, _, _ = train_model_register[key](
        config_path=str(folder),
        checkpoint_path=str(folder),
        processor_path=None,
        stage=stage,
        num_stages=num_stages,
        dtype=dtype,
        is_piece=True,  # it needs no processor
    )
    return model


def try_name(kind: str, name: str) -> list[FamilyResult]:
    """Verdicts on one name: untied, and tied where the model can be both."""
    if name in NO_DECODER and (kind, name) != ("text", "emu3"):
        return [FamilyResult(name, kind, 2, False, "no model", NO_DECODER[name])]
    try:
        config = family_config(name)
    except Exception as error:  # the checks of a class refuse its own defaults
        return [FamilyResult(name, kind, 2, False, "no model", told(error))]
    found: dict[tuple[bool, int], FamilyResult] = {}
    for is_tied in (False, True):
        for verdict in try_family(config, KINDS[kind][0], build_stage, name=name, is_tied=is_tied):
            if is_tied and verdict.said == "no model" and found:
                continue  # its class refuses a tied head
            found.setdefault((verdict.is_tied, verdict.num_stages), verdict)
        if len({key[0] for key in found}) == 1 and is_tied is False and next(iter(found))[0]:
            break  # tied whatever is asked
    return list(found.values())


def main() -> int:
    """Runs the names, prints a line each; exit code 1 where one is wrong or crashed."""
    arguments = read_arguments()
    chosen = list(choose(arguments))
    started, verdicts = time.time(), read_earlier(arguments.json, chosen)
    for rows in run_all(chosen, jobs=arguments.jobs):
        verdicts += rows
        for row in rows:
            print(line(row), flush=True)
        if arguments.json:
            text = [verdict.row() for verdict in verdicts]
            Path(arguments.json).write_text(json.dumps(text, indent=1), encoding="utf-8")
    print(f"{len(chosen)} names in {time.time() - started:.0f} s: {count(verdicts)}")
    if arguments.markdown:
        write_page(verdicts, Path(arguments.markdown))
    return int(any(verdict.said in BAD for verdict in verdicts))


def read_arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types")
    parser.add_argument("--all", action="store_true", help="all names")
    parser.add_argument("--kind", choices=list(KINDS), help="one of the two lists")
    parser.add_argument("--jobs", type=int, default=1, help="names at a time")
    parser.add_argument("--json", help="file for all verdicts; those of other names stay")
    parser.add_argument("--markdown", help="page with the table")
    return parser.parse_args()


def read_earlier(path: str | None, chosen: list[tuple[str, str]]) -> list[FamilyResult]:
    """Verdicts of an earlier call on other names, which go into the file and the page, too."""
    if path is None or not Path(path).exists():
        return []
    rows = [FamilyResult(**row) for row in json.loads(Path(path).read_text(encoding="utf-8"))]
    return [row for row in rows if (row.kind, row.name) not in chosen]


def choose(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(kind, name) of everything that is asked for."""
    for kind, (_, classes) in KINDS.items():
        if arguments.kind in (None, kind):
            known = sorted(classes._model_mapping)
            for name in known if arguments.all else sorted(set(arguments.names) & set(known)):
                yield kind, name


def line(row: FamilyResult) -> str:
    """A verdict as it is printed."""
    way = f"{row.num_stages} stages {'tied' if row.is_tied else 'untied'} {row.dtype}"
    gap = f" {row.largest:.0e}" if row.largest else ""
    return f"{row.kind} {row.name}: {row.said}{gap} ({way}) {row.detail}".rstrip()


def count(verdicts: list[FamilyResult]) -> str:
    """How many names have which verdict, the worst of each."""
    order = ("WRONG", "crash", "refused", "no model", "close", "equal")
    worst: dict[tuple[str, str], str] = {}
    for one in verdicts:
        key = (one.kind, one.name)
        worst[key] = min(worst.get(key, "equal"), one.said, key=order.index)
    told = list(worst.values())
    return ", ".join(f"{told.count(said)} {said}" for said in order if said in told)


# -- a process a name ---------------------------------------------------------------------------


def run_all(chosen: list[tuple[str, str]], *, jobs: int) -> Iterator[list[FamilyResult]]:
    """The verdicts on each name as it ends."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(chosen), []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                kind, name = waiting.pop(0)
                path = Path(folder) / f"{kind}.{name}.json"
                process = context.Process(target=work, args=(kind, name, path))
                process.start()
                running.append((process, time.time(), kind, name, path))
            for one in list(running):
                process, start, kind, name, path = one
                process.join(0.05)
                if process.is_alive() and time.time() - start < LIMIT:
                    continue
                if process.is_alive():
                    process.kill()
                    process.join()
                running.remove(one)
                yield read_rows(kind, name, path, process.exitcode)


def read_rows(kind: str, name: str, path: Path, code: int | None) -> list[FamilyResult]:
    """What the process of a name wrote; a crash where it wrote nothing."""
    if path.exists():
        return [FamilyResult(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    said = f"more than {LIMIT} s" if code == -9 else f"its process ended with {code}"
    return [FamilyResult(name, kind, 2, False, "crash", said)]


def work(kind: str, name: str, path: Path) -> None:
    """The process of one name."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = [verdict.row() for verdict in try_name(kind, name)]
    part = path.with_suffix(".part")
    part.write_text(json.dumps(rows), encoding="utf-8")
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main())

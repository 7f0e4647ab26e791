"""Draws scenes into a folder that --dataset rotate_qa reads: pictures and a file of questions.

Usage: draw_scenes.py FOLDER [--split test] [--num_test 50] [--image_size 160] ...
The options are those of --dataset scenes.
"""

import sys
from pathlib import Path

from jsonargparse import ArgumentParser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stageline.tasks.scenes import Scenes, export_scenes


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_class_arguments(Scenes, skip={"dataset_path"})
    options = vars(parser.parse_args())
    folder = options.pop("folder")
    scenes = Scenes(**options)
    export_scenes(scenes, folder, split=options["split"])
    print(f"{len(scenes)} samples are in {folder}")


if __name__ == "__main__":
    main()

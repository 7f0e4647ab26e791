"""Draw scenes into a folder that --dataset rotate_qa reads: pictures and a file of questions.

Usage: draw_scenes.py FOLDER [--split test] [--num_test 50] [--image_size 160] ...
The options are those of --dataset scenes.
"""

import json
import sys
from pathlib import Path

from jsonargparse import ArgumentParser

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.spatial.scenes import Scenes


def export_scenes(scenes: Scenes, folder: str | Path, *, split: str) -> None:
    """Write pictures and `split`.jsonl, as `dataset` rotate_qa reads them.

    Groups are written with `contrast_group` and `role`, a sample a line.
    """
    folder = Path(folder)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(len(scenes)):
        (image,), sample = scenes[index]
        picture = f"images/{sample['id']}.png"
        image.save(folder / picture)
        row = {name: value for name, value in sample.items() if name not in ("group", "groups")}
        row |= {"image": picture, "scene_task": sample["groups"]["task"]}
        lines.append(json.dumps(row) + "\n")
    (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


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

"""Visual Spatial Reasoning: statements about pictures that are true or false."""

from typing import Any, Literal

from stageline.data.readers import Row, check_split, dataset_folder, find_file, read_rows
from stageline.data.spatial.relations import VSR_RELATIONS
from stageline.data.spatial.rows import Named, Others, SpatialRows, image_roots


class VSR(SpatialRows):
    """Visual Spatial Reasoning: is a statement about a picture true?

    Files `{split_type}/train.jsonl`, `dev.jsonl`, `test.jsonl` in dataset_path or in `splits` or
    `data/splits` below it, with lines such as {"image": "000000372029.jpg", "caption": "The dog is
    on the surfboard.", "label": 1, "relation": "on"}. Pictures lie in `images`, `trainval2017`,
    `train2017` or `val2017`.

    Args:
        split_type: random, or zeroshot, where no concept of the test was trained.
        answers: how the label is written.
        image_path: folder of the pictures.
        other_relations: whether relations that the public set does not have are taken.
    """

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        split_type: Literal["random", "zeroshot"] = "random",
        answers: Literal["true_false", "yes_no"] = "true_false",
        image_path: str | None = None,
        other_relations: Others = "error",
    ) -> None:
        folder = dataset_folder(dataset_path, name="vsr")
        if split != "dev":
            check_split(split)
        name = f"{split_type}/{split}.jsonl"
        file = find_file(folder, (name, f"splits/{name}", f"data/splits/{name}", f"data/{name}"))
        self._words = ("false", "true") if answers == "true_false" else ("no", "yes")
        self._name = f"vsr-{split_type}-{split}"
        self._others = other_relations
        roots = image_roots(
            folder, image_path, "images", "trainval2017", "train2017", "val2017",
            "data/images", "data/trainval2017",
        )  # fmt: skip
        super().__init__(read_rows(file), image_roots=roots)

    def sample_id(self, row: Row) -> str:
        return f"{self._name}-{row.number}"

    def read(self, row: Named) -> tuple[list[str], dict[str, Any]]:
        label = row.data.get("label")
        if type(label) is not int or label not in (0, 1):
            raise row.bad(
                f"the label is {label!r}. The number 0 or 1 was expected, because a statement is "
                "false or true"
            )
        caption = row.text("caption")
        relation = row.known(
            row.data.get("relation"), VSR_RELATIONS, what="relation", others=self._others
        )
        return [row.text("image")], {
            "caption": caption,
            "question": f"Is this statement about the picture true or false? {caption}",
            "answer": self._words[label],
            "label": label,
            "relation": relation,
            "group": relation,
            "groups": {"relation": relation, "category": VSR_RELATIONS.get(relation, "other")},
        }

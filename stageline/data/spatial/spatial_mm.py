"""Spatial-MM: questions about places and directions, from the camera's side and from others'."""

import re
from dataclasses import replace
from typing import Any, Literal

from stageline.data.answers import normalize, parse_truth
from stageline.data.readers import Row, dataset_folder, find_file, read_rows, split_rows
from stageline.data.spatial.rows import Named, SpatialRows, check_options, image_roots

_OPTION = re.compile(r"^\s*\(?([A-Z])[.):]\s*(.*?)\s*$", re.MULTILINE)


class SpatialMM(SpatialRows):
    """Spatial-MM: questions about places and directions, with options in the question.

    Files `spatial_mm_one_obj.json`, `spatial_mm_two_obj.json` and `multihop_reasoning_309.json`:
    lists of {"image_name": "129d118ad0.jpg", "question": "Which direction ...?\\nA. bottom
    left\\nB. left", "answer": "B. left"}; multihop answers are words without options.

    Args:
        subset: which files.
        test_size: held-out rows, as a number or a share; a picture is on one side only. 1.0 holds
            out all, as for an evaluation of the public set.
        image_path: folder of the pictures.
    """

    _FILES = {
        "one_obj": "spatial_mm_one_obj.json",
        "two_obj": "spatial_mm_two_obj.json",
        "multihop": "multihop_reasoning_309.json",
    }

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        subset: Literal["one_obj", "two_obj", "multihop", "obj"] = "obj",
        test_size: int | float = 0.2,
        image_path: str | None = None,
    ) -> None:
        folder = dataset_folder(dataset_path, name="spatial_mm")
        rows: list[Row] = []
        for part in ("one_obj", "two_obj") if subset == "obj" else (subset,):
            name = self._FILES[part]
            for row in read_rows(find_file(folder, (name, f"data/{name}"))):
                data = {**row.data, "subset": part, "number": row.number}
                rows.append(replace(row, data=data, number=len(rows) + 1))
        chosen = split_rows(
            rows,
            split=split,
            test_size=test_size,
            key=lambda row: Named(row, self.sample_id(row)).text("image_name"),
        )
        roots = image_roots(folder, image_path, "Spatial_MM_Obj", "images", "imgs", "data/imgs")
        super().__init__(chosen, image_roots=roots)

    def sample_id(self, row: Row) -> str:
        return f"spatial_mm-{row.data['subset']}-{row.data['number']}"

    def read(self, row: Named) -> tuple[list[str], dict[str, Any]]:
        question, answer = row.text("question"), row.text("answer")
        subset, perspective = row.data["subset"], _perspective(question)
        sample: dict[str, Any] = {
            "question": question,
            "answer": answer,
            "group": f"{subset}: {perspective}",
        }
        groups = {"subset": subset, "perspective": perspective, "task": "words"}
        found = _OPTION.findall(question)
        if found:
            choices = [text for _, text in found]
            _check_letters(row, [letter for letter, _ in found])
            check_options(row, choices)
            index = _right_option(row, answer, choices)
            sample |= {"choices": choices, "answer_index": index}
            is_verdict = {parse_truth(choice) for choice in choices} == {True, False}
            groups["task"] = "yes or no" if is_verdict else "place"
            groups["relation"] = choices[index].lower()
        return [row.text("image_name")], {**sample, "groups": groups}


def _perspective(question: str) -> str:
    """Whose left and right are meant: the harder case is a person's in the picture."""
    if "camera's perspective" in question.lower():
        return "camera"
    return "in the picture" if "perspective" in question.lower() else "not said"


def _check_letters(row: Named, letters: list[str]) -> None:
    expected = [chr(ord("A") + index) for index in range(len(letters))]
    if letters != expected:
        raise row.bad(
            f"the options have the letters {', '.join(letters)}. {', '.join(expected)} was "
            "expected, because an answer is told by its letter"
        )


def _right_option(row: Named, answer: str, choices: list[str]) -> int:
    found = _OPTION.match(answer)
    index = ord(found[1]) - ord("A") if found else -1
    if found is None or not 0 <= index < len(choices):
        raise row.bad(
            f"the answer {answer[:60]!r} names none of the {len(choices)} options of the question. "
            "It was expected to begin with an option's letter ('B. right'), because that is the "
            "right one"
        )
    texts = [normalize(choice) for choice in choices]
    text = normalize(found[2])
    if text and text != texts[index] and text in texts:
        raise row.bad(
            f"the answer {answer[:60]!r} has the letter of the option {choices[index]!r} and the "
            "text of another one. Both of one option were expected, because only one is right"
        )
    return index

"""The relations of the public sets, as data.

VSR: the categories of the authors' `analysis_scripts/rel_meta_category_dict.txt` in
github.com/cambridgeltl/visual-spatial-reasoning, which are those of Liu, Emerson and Collier,
"Visual Spatial Reasoning" (TACL 2023), table 1. "among" stands there in two categories; here it is
topological.
"""

_VSR: dict[str, str] = {
    "adjacency": "adjacent to, alongside, at the side of, at the right side of, at the left side "
    "of, attached to, at the back of, ahead of, against, at the edge of",
    "directional": "off, past, toward, down, deep down, up, away from, along, around, from, into, "
    "to, across, across from, through, down from",
    "orientation": "facing, facing away from, parallel to, perpendicular to",
    "projective": "on top of, beneath, beside, behind, left of, right of, under, in front of, "
    "below, above, over, in the middle of",
    "proximity": "by, close to, near, far from, far away from",
    "topological": "connected to, detached from, has as a part, part of, contains, within, at, on, "
    "in, with, surrounding, among, consists of, out of, between, inside, outside, touching",
    "unallocated": "beyond, next to, opposite to, after, enclosed by",
}
# relation -> category
VSR_RELATIONS: dict[str, str] = {
    relation: category for category, names in _VSR.items() for relation in names.split(", ")
}

# What'sUp: the prepositions by which the authors' evaluation splits its figures
# (github.com/amitakamath/whatsup_vlms, dataset_zoo/aro_datasets.py); in this order, since "on the
# left" says left
PREPOSITIONS = (
    *("left", "right", "front", "behind", "under", "above", "below", "top", "bottom", "on"),
)
# the pair of one set of two objects that a preposition belongs to
PAIRS = {
    **{"left": "left and right", "right": "left and right", "on": "on and under"},
    **{"under": "on and under", "front": "front and behind", "behind": "front and behind"},
}

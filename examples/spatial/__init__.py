"""The left-and-right study: drawn scenes, public spatial sets, reading of answers, a report.

`bash examples/spatial/study_spatial.sh` runs all of it. A run of yours gets its datasets, metrics
and rewards by `--import examples.spatial.parts`. See docs/study_spatial.md.
"""

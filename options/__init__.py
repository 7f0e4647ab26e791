"""The helpers of parse_args.py, one step of reading options a file.

`run_options` declares and checks, `command_line` reads words and YAML, `part_options` turns a
signature into options, `values` converts by type, `help_text` prints. Nothing here knows a key.
"""

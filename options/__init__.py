"""The helpers of parse_args.py, one step of reading options a file.

`fields` says how an option is declared, `run_options` declares them, `checks` compares them,
`command_line` reads words and YAML, `part_options` turns a signature into options, `values`
converts by type, `help_text` prints. Nothing here knows a key.
"""

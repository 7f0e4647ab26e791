"""Options of all commands, as classes whose fields declare defaults, limits and help.

`fields` says how an option is declared, `command_line` reads words and YAML and converts them,
`parts` turns the signature of a part into options and prints help. Nothing here knows a key.
"""

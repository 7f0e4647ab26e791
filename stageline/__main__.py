"""`python -m stageline` is the command `stageline`."""

import sys

from stageline.command_line import main

if __name__ == "__main__":
    sys.exit(main())

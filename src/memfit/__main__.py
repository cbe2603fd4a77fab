"""`python -m memfit`: the command, where the script is not on the path."""

import sys

from memfit.cli import main

if __name__ == "__main__":
    sys.exit(main())

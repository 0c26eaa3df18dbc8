"""`python -m dflax` is the command `dflax`."""

import sys

from dflax.cli import main

if __name__ == "__main__":
    sys.exit(main())

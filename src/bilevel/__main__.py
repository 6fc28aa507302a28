"""`python -m bilevel` is the `bilevel` command."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())

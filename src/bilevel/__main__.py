"""`python -m bilevel` is the `bilevel` command."""

import sys

from bilevel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

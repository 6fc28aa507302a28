"""`python -m bilevel` is the `bilevel` command."""

from bilevel.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

"""The command line: `commands` has the options of each command, `<command>_run` does the work."""

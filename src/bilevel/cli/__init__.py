"""The command line: one small file a command, which parses, calls and writes."""

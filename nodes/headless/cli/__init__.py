"""The command line: options, commands, reports."""

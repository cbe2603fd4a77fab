"""The command line: `app.py` has the commands, the other modules what the larger ones need."""

from memfit.cli.app import commands, main

__all__ = ["commands", "main"]

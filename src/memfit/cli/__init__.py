"""The command line: `app.py` runs it, `commands.py` has the commands, the other modules what the
larger ones need."""

from memfit.cli.app import main

__all__ = ["main"]

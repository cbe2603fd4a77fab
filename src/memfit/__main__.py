"""The command `memfit`, also as `python -m memfit`. `--version` is answered without loading the
command line, so that scripts can ask for it in milliseconds."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        from memfit import __version__

        sys.stdout.write(f"memfit {__version__}\n")
        return 0
    from memfit.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

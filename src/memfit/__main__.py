"""The command `memfit`, also as `python -m memfit`. `--version` is answered without loading the
command line, so that scripts can ask for it in milliseconds; Ctrl-C while it loads is quiet."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    import _signal as signal  # type: ignore[import-not-found]  # `signal` itself takes long

    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:] in (["--version"], ["-V"]):
        from memfit import __version__

        sys.stdout.write(f"memfit {__version__}\n")
        return 0
    from memfit.cli import main as run

    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())

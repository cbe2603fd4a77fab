"""The command `memfit`, also as `python -m memfit`. `--version` is answered without loading the
command line, so that scripts can ask for it in milliseconds; Ctrl-C while it loads is quiet."""

import _thread
import gc
import sys

OBJECTS = 50_000  # new ones, before the cycle collector looks through them


def interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C within a `__del__` would be printed and lost: another thread sends it once more, as
    soon as this hook is over."""
    if unraisable.exc_type is KeyboardInterrupt:
        _thread.start_new_thread(_thread.interrupt_main, ())
    else:
        sys.__unraisablehook__(unraisable)


def main() -> int:
    """Run the command line and return its exit code."""
    gc.disable()  # what is loaded stays
    import _signal as signal  # type: ignore[import-not-found]  # `signal` itself takes long

    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:] in (["--version"], ["-V"]):
        from memfit import __version__

        sys.stdout.write(f"memfit {__version__}\n")
        return 0
    from memfit.cli import main as run

    gc.freeze()
    gc.set_threshold(OBJECTS)
    gc.enable()
    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = interrupt_again
    code = run()
    gc.freeze()  # else Python looks through all of it once more before it ends
    return code


if __name__ == "__main__":
    sys.exit(main())

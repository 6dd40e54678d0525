"""The way in: takes stop signals, calls a command, and says how it ended.

    0          the command has done what it says
    1          it could not, for no fault of the user's: one sentence, or a defect's traceback
    2          a mistake of the user's: one sentence
    128 + n    asked to stop by signal n: 130 is Ctrl-C, 143 SIGTERM

Signals are taken before anything else is loaded, so that an impatient Ctrl-C is answered with a
sentence, too. `cli_commands.py` lists the commands.
"""

import os
import sys


def main() -> None:
    """The entry point."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the next two are loaded: no traceback
    from howdah.base.output import lasting_output
    from howdah.base.signals import listen, name_of, stop_behind

    lasting_output()
    with listen(last=True) as request:
        try:
            code = run()
            sys.stdout.flush()  # while a signal still ends the wait for a reader
            request.patient = True  # it has ended; whoever asks now is too late
        except BaseException as error:
            if not (stopped := stop_behind(error)):
                raise
            code = 128 + stopped.number
            say(f"stopped by {name_of(stopped.number)}")
    if "RANK" in os.environ:  # other threads of a launcher's rank may be inside of torch
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run() -> int:
    """Calls the command that the words of the command line name; its exit code."""
    try:
        from howdah.base.errors import Unfinished, UserError
        from howdah.cli.commands import app
    except (MemoryError, ImportError, OSError) as error:  # `ulimit -v`, `ulimit -n`
        say(f"howdah cannot be loaded: {error or 'there is not enough memory'}")
        return 1
    try:
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except UserError as mistake:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # of torchrun's ranks, one for each machine
            say(str(mistake))
        return 2
    except (Unfinished, MemoryError, OSError) as reason:
        say(words_of(reason))
        return 1
    return 0


def words_of(reason: Exception) -> str:
    """What the machine does not let a command finish. A defect among errors is raised again."""
    if isinstance(reason, OSError):
        if not reason.strerror:
            raise reason
        return reason.strerror + (f": {reason.filename}" if reason.filename else "")
    return str(reason) or "there is not enough memory"


def say(sentence: str) -> None:
    """A sentence on standard error."""
    print(f"howdah: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    main()

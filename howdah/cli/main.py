"""The entry point: handles stop signals, calls a command, and returns its exit code.

    0          success
    1          failure without a mistake of the user: one sentence, or a defect's traceback
    2          a mistake of the user: one sentence
    128 + n    stopped by signal n: 130 is Ctrl-C, 143 SIGTERM

Signals are handled before anything else is loaded, so that even an early Ctrl-C ends with one
sentence. `cli/commands.py` lists the commands.
"""

import os
import sys
from contextlib import suppress
from time import sleep

ALONE = 5.0  # seconds after which a rank takes itself for the only one that met a mistake


def main() -> None:
    """Runs the command of this process, and exits with its exit code."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the next two are loaded
    from howdah.base.output import lasting_output, lost
    from howdah.base.signals import listen, name_of, stop_behind

    lasting_output()
    with listen(last=True) as request:
        try:
            code = run()
            sys.stdout.flush()  # while a signal can still end a blocked write
            request.patient = True  # the command has ended; later signals are ignored
            if not code and sys.argv[1:2] != ["train"] and (why := lost()):
                say(f"standard output could not be written: {why}")
                code = 1
        except BaseException as error:
            if not (stopped := stop_behind(error)):
                raise
            code = 128 + stopped.number
            say(f"stopped by {name_of(stopped.number)}")
    if "RANK" in os.environ:  # a launcher's rank may have threads inside torch
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run() -> int:
    """Calls the command that the command line names; returns its exit code."""
    os.umask(os.umask(0o077) & 0o077)  # a user may always use what he makes
    try:
        from howdah.base.errors import Unfinished, UserError
        from howdah.cli.commands import app
        from howdah.cli.usage import UsageError, sentence_on
    except (MemoryError, ImportError, OSError) as error:  # `ulimit -v`, `ulimit -n`
        cause = error.__cause__ or error  # numpy explains at length, on many lines
        why = str(cause).strip().partition("\n")[0]
        say(f"howdah cannot be loaded: {why or 'there is not enough memory'}")
        return 1
    try:
        if not is_there():
            raise UserError("the folder in which it was started is gone; start it in another")
        code = app(prog_name="howdah", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except UsageError as wrong:
        tell(sentence_on(wrong, sys.argv[1:]))
        return 2
    except UserError as mistake:
        tell(str(mistake))
        return 2
    except (Unfinished, MemoryError, OSError) as reason:
        say(words_of(reason))
        return 1


def is_there() -> bool:
    """Whether this process has a working folder; torch's libraries end it where it has none."""
    with suppress(OSError):
        return bool(os.getcwd())
    return False


def tell(mistake: str) -> None:
    """Prints a mistake of the user. Under torchrun every rank has met it, and one of each machine
    prints it: the others wait, because torchrun ends all when the first one has ended. A rank that
    nobody ends has met it alone, and prints it.
    """
    from howdah.base.signals import Stopped

    try:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            sleep(ALONE)
    except Stopped:
        return
    if mistake:
        say(mistake)


def words_of(reason: Exception) -> str:
    """The sentence for a failure of the machine. An OSError that is a defect is raised again."""
    if isinstance(reason, OSError):
        if not reason.strerror:
            raise reason
        return reason.strerror + (f": {reason.filename}" if reason.filename else "")
    return str(reason) or "there is not enough memory"


def say(sentence: str) -> None:
    """Prints a sentence on standard error."""
    print(f"howdah: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    main()

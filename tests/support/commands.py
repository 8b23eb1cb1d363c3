"""`rollback` commands as processes of their own, cheaply, with what they printed and the memory they took.

As a program it imports the commands once, without torch, and forks for each: a JSON list of arguments a line; the
answer, a line too, has `code`, `output` and `rss` (the most that was resident, in MB).
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """How a command ended. rss: MB."""

    code: int
    output: str
    rss: int


class Commands:
    """The program below. Use as a context manager."""

    def __init__(self, seconds: int = 60) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
        )  # fmt: skip

    def __enter__(self) -> "Commands":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, *arguments: str | Path) -> Outcome:
        """`rollback` with these arguments; it is killed (-9) when it has used its processor seconds up."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))


def _serve(seconds: int) -> None:
    # What commands will import is imported here, once.
    from rollback import cli
    from rollback.inspect.audit import compile, contents  # noqa: F401
    from rollback.inspect.ring import at_url, verify  # noqa: F401
    from rollback.inspect.ring import text as ring_text  # noqa: F401
    from rollback.inspect.status import status  # noqa: F401
    from rollback.inspect.why import why  # noqa: F401
    from rollback.report import page  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os._exit(_command(json.loads(line), cli.main))
            _, ended, usage = os.wait4(child, 0)
            output.seek(0)
            text = output.read(1 << 20).decode(errors="replace")
        told = {"code": os.waitstatus_to_exitcode(ended), "output": text, "rss": usage.ru_maxrss // 1024}
        print(json.dumps(told), flush=True)


def _command(arguments: list[str], main: object) -> int:
    sys.argv = ["rollback", *arguments]
    code: object = 0
    try:
        main()  # type: ignore[operator]
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - the forked child must not run on in its parent's loop
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(bool(code))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

"""`rollback`, and `python -m rollback`, which is the same."""

import sys


def main() -> None:
    """Exits with a code of `rollback.errors.ExitCode`; with 130 where Ctrl-C comes while the commands are imported, or
    made of their tables."""
    try:
        from rollback import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

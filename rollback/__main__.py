"""`python -m rollback` is `rollback`."""

from rollback.cli import main

main()

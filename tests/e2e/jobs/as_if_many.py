"""job.py for four ranks that do what ranks do where they are thousands: a few of them write evidence."""

from job import perform
from scenarios import perform_all

from rollback.rundir import evidence
from rollback.train.incidents import judge

MOST = 2

if __name__ == "__main__":
    for module in (evidence, judge):
        vars(module)["MOST_WITNESSES"] = MOST
    perform_all(perform)

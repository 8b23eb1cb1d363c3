"""job.py for four ranks that do what ranks do where they are thousands: two of them write evidence, and two share each
file of a checkpoint."""

from job import perform
from scenarios import perform_all

from rollback.rundir import evidence, paths
from rollback.train.incidents import judge

if __name__ == "__main__":
    for module in (evidence, judge):
        vars(module)["MOST_WITNESSES"] = 2
    vars(paths)["MOST_FILES"] = 3
    perform_all(perform)

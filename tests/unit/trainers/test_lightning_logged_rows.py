"""Rows of undone steps leave Lightning's CSV log; a new file begins with the rows up to where the job goes on."""

import resource
from pathlib import Path
from typing import Any

import pytest

from rollback.trainers.lightning.logged_rows import LoggedRows


@pytest.fixture(scope="module")
def loggers() -> Any:
    return pytest.importorskip("lightning.pytorch.loggers")  # seconds, which only this worker should spend


def log(logger: Any, *steps: int, **more: float) -> None:
    for step in steps:
        logger.log_metrics({"loss": step / 8, **more}, step)
        logger.save()


def text(logger: Any) -> str:
    return Path(logger.log_dir, "metrics.csv").read_text()


def test_rows_behind_the_kept_ones_are_taken_back_with_their_columns(loggers: Any, tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path)
    rows = LoggedRows(logger)
    rows.state_dict()
    log(logger, 1, 2)
    kept, as_it_was = rows.state_dict(), text(logger)
    log(logger, 3, evaluated=0.5)
    rows.load_state_dict(kept)
    assert text(logger) == as_it_was
    log(logger, 4)
    assert text(logger) == as_it_was + "0.5,4\n"
    assert rows.state_dict()["rows"] == 3


@pytest.mark.parametrize("version", [None, 0])
def test_a_job_that_is_started_again_has_all_rows_in_its_new_file(
    loggers: Any, tmp_path: Path, version: int | None
) -> None:
    first = loggers.CSVLogger(tmp_path, version=version)
    rows = LoggedRows(first)
    rows.state_dict()
    log(first, 1, 2)
    kept, as_it_was = rows.state_dict(), text(first)
    log(first, 3)
    again = loggers.CSVLogger(tmp_path, version=version)
    LoggedRows(again).load_state_dict(kept)
    assert text(again) == as_it_was


def test_zeros_that_a_power_cut_has_left_are_no_rows(loggers: Any, tmp_path: Path) -> None:
    first = loggers.CSVLogger(tmp_path)
    rows = LoggedRows(first)
    rows.state_dict()
    log(first, 1, 2)
    kept, as_it_was = rows.state_dict(), text(first)
    with open(Path(first.log_dir, "metrics.csv"), "ab") as file:
        file.write(bytes(200_000))
    again = loggers.CSVLogger(tmp_path)
    LoggedRows(again).load_state_dict(kept)
    assert text(again) == as_it_was


def test_rows_that_were_logged_before_the_training_stay(loggers: Any, tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path)
    rows = LoggedRows(logger)
    log(logger, 0)  # as `trainer.validate` does
    rows.state_dict()
    log(logger, 1)
    kept, as_it_was = rows.state_dict(), text(logger)
    log(logger, 2)
    rows.load_state_dict(kept)
    assert text(logger) == as_it_was


def test_a_job_that_logs_the_first_rows_again_when_it_is_started_again_has_them_once(
    loggers: Any, tmp_path: Path
) -> None:
    first = loggers.CSVLogger(tmp_path, version=0)
    log(first, 0)
    rows = LoggedRows(first)
    rows.state_dict()
    log(first, 1, 2)
    kept, as_it_was = rows.state_dict(), text(first)
    again = loggers.CSVLogger(tmp_path, version=0)
    rows = LoggedRows(again)
    log(again, 0)
    rows.load_state_dict(kept)
    assert text(again) == as_it_was


def test_rows_that_the_logger_has_not_saved_yet_stay(loggers: Any, tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path)
    rows = LoggedRows(logger)
    log(logger, 1)
    logger.log_metrics({"of my own": 0.25}, 1)
    kept = rows.state_dict()
    log(logger, 2)
    rows.load_state_dict(kept)
    assert text(logger).splitlines() == ["loss,of my own,step", "0.125,,1", ",0.25,1"]


def test_a_disk_that_takes_no_more_leaves_the_rows_as_they_were(loggers: Any, tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path)
    rows = LoggedRows(logger)
    rows.state_dict()
    log(logger, 1, 2)
    kept = rows.state_dict()
    log(logger, 3)
    as_it_was, before = text(logger), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        rows.load_state_dict(kept)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert text(logger) == as_it_was
    assert [path.name for path in Path(logger.log_dir).iterdir()] == ["metrics.csv"]


def test_with_no_row_there_is_no_file(loggers: Any, tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path)
    rows = LoggedRows(logger)
    kept = rows.state_dict()
    log(logger, 1)
    rows.load_state_dict(kept)
    assert not Path(logger.log_dir, "metrics.csv").exists()

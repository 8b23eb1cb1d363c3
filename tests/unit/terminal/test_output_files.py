"""Where a command that was asked for a file may write it."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollback.dcp.write import _require_place
from rollback.errors import UsageError
from rollback.terminal.files import replacing, require_place
from rollback.trackers.follow import require_trackers


def test_a_link_to_itself_is_no_way_into_a_run_directory(tmp_path: Path) -> None:
    """Some versions of Python raise what is no OSError where they are asked where it leads."""
    run, loop = tmp_path / "run", tmp_path / "loop"
    run.mkdir()
    loop.symlink_to("loop")
    with replacing(loop, run) as path:
        path.write_text("there")
    assert loop.read_text() == "there"
    loop.unlink()
    loop.symlink_to("loop")
    with pytest.raises(UsageError, match="is not a directory"):
        _require_place(loop, run, force=True)
    require_trackers(str(loop), None, run)


def test_a_file_is_written_below_a_link_to_a_directory_and_that_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    for content in ("first", "second"):
        with replacing(tmp_path / "scratch" / "page.html") as path:
            path.write_text(content)
        assert [(it.name, it.read_text()) for it in (tmp_path / "disk").iterdir()] == [("page.html", content)]


def test_what_a_link_leads_into_the_run_directory_is_refused(tmp_path: Path) -> None:
    run, way = tmp_path / "run", tmp_path / "way"
    run.mkdir()
    way.symlink_to("run")
    for refuse in (
        lambda: require_place(way / "x", run),
        lambda: _require_place(way / "x", run, force=True),
        lambda: require_trackers(str(way), None, run),
    ):
        with pytest.raises(UsageError, match="run directory"):
            refuse()


def test_what_a_command_prints_to_gets_the_output_and_keeps_its_place(tmp_path: Path) -> None:
    """`-o /dev/stdout >> FILE`: as root, /dev/stdout would be a file of everybody's from then on."""
    stdout, file = tmp_path / "stdout", tmp_path / "file"
    stdout.symlink_to("/proc/self/fd/1")
    file.write_text("before\n")
    script = (
        "import sys; from pathlib import Path; from rollback.terminal.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as path: path.write_text('page')"
    )
    with open(file, "a") as printed:
        subprocess.run([sys.executable, "-c", script, str(stdout)], stdout=printed, check=True, timeout=60)
    assert stdout.is_symlink()
    assert file.read_text() == "before\npage"

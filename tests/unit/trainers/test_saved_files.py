"""Files of undone steps are renamed: those that were noted, in the trainer's folders, and no others."""

import json
from pathlib import Path

import pytest

from rollback.ring.url.index import first_index
from rollback.ring.url.record import download, upload
from rollback.ring.url.store import Store
from rollback.rundir.paths import RunPaths
from rollback.trainers import saved_files
from rollback.trainers.saved_files import SavedAt, SavedFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    folder.mkdir()
    return folder


def save(files: SavedFiles, path: Path, step: int, batches: int | None = None, ended: bool = False) -> None:
    files.note(str(path), SavedAt(step, 2 * step if batches is None else batches, ended))
    path.write_text(f"of step {step}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_of_later_steps_is_renamed_and_may_be_saved_anew(tmp_path: Path, folder: Path) -> None:
    files = SavedFiles(tmp_path / "run")
    for step in (10, 20):
        save(files, folder / f"{step}.ckpt", step)
        save(files, folder / "last.ckpt", step)
    files.set_aside(SavedAt(15, 30), [str(folder)])
    assert names(folder) == ["10.ckpt", "undone-20.ckpt", "undone-last.ckpt"]
    save(files, folder / "20.ckpt", 20)
    SavedFiles(tmp_path / "run").set_aside(SavedAt(20, 40), [str(folder)])
    assert "20.ckpt" in names(folder)
    SavedFiles(tmp_path / "run").set_aside(SavedAt(12, 24), [str(folder)])
    assert names(folder) == ["10.ckpt", "undone-1-20.ckpt", "undone-20.ckpt", "undone-last.ckpt"]


def test_a_name_of_something_undone_that_is_still_there_is_not_taken_again(tmp_path: Path, folder: Path) -> None:
    files = SavedFiles(tmp_path / "run")
    for name in ("20.ckpt", "[20].ckpt"):
        for text in ("first", "second", "third"):
            files.note(str(folder / name), SavedAt(20, 40))
            (folder / name).write_text(text)
            files.set_aside(SavedAt(15, 30), [str(folder)])
            if text == "second":
                (folder / f"undone-{name}").unlink()
        assert (folder / f"undone-1-{name}").read_text() == "second"
        assert (folder / f"undone-{name}").read_text() == "third"


def test_a_link_to_what_is_undone_is_renamed_with_it(tmp_path: Path, folder: Path) -> None:
    """Else Lightning's `save_last="link"` would find its `last.ckpt` taken, and go on with a `last-v1.ckpt`."""
    files = SavedFiles(tmp_path / "run")
    for step in (10, 20):
        save(files, folder / f"{step}.ckpt", step)
        (folder / f"last at {step}.ckpt").symlink_to(f"{step}.ckpt")
    files.set_aside(SavedAt(15, 30), [str(folder)])
    assert names(folder) == ["10.ckpt", "last at 10.ckpt", "undone-20.ckpt", "undone-last at 20.ckpt"]


def test_a_link_to_what_this_run_has_saved_is_this_run_s(tmp_path: Path, folder: Path) -> None:
    """Scripts hand it over to resume from it."""
    files = SavedFiles(tmp_path / "run")
    save(files, folder / "10.ckpt", 10)
    (folder / "another.ckpt").touch()
    for name in ("10", "another"):
        (folder / f"last at {name}.ckpt").symlink_to(f"{name}.ckpt")
    assert files.has(str(folder / "last at 10.ckpt"))
    assert not files.has(str(folder / "last at another.ckpt"))


def test_what_was_saved_between_the_batches_of_an_update_is_renamed_where_that_begins_anew(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = SavedFiles(tmp_path / "run")
    save(files, folder / "at 10.ckpt", 10)
    save(files, folder / "behind 10.ckpt", 10, 21)
    files.set_aside(SavedAt(10, 20), [str(folder)])
    assert names(folder) == ["at 10.ckpt", "undone-behind 10.ckpt"]
    assert "behind 10.ckpt is of batch 20, which is undone: renamed" in capfd.readouterr().err


def test_what_was_saved_at_an_epochs_end_is_renamed_where_that_end_is_done_again(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = SavedFiles(tmp_path / "run")
    save(files, folder / "at 10.ckpt", 10)
    save(files, folder / "end.ckpt", 10, ended=True)
    save(files, folder / "next epoch.ckpt", 10, 21)
    files.set_aside(SavedAt(10, 20, ended=True), [str(folder)])
    assert names(folder) == ["at 10.ckpt", "end.ckpt", "undone-next epoch.ckpt"]
    files.set_aside(SavedAt(10, 20), [str(folder)])
    assert names(folder) == ["at 10.ckpt", "undone-end.ckpt", "undone-next epoch.ckpt"]
    assert "end.ckpt is of the end of the epoch at step 10, which is done again" in capfd.readouterr().err


def test_of_very_many_notes_the_last_ones_count(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SavedFiles(tmp_path / "run")
    for step in (20, 30, 40):
        save(files, folder / f"{step}.ckpt", step)
    monkeypatch.setattr(saved_files, "_LIMIT", (tmp_path / "run" / "saved-files.jsonl").stat().st_size * 5 // 6)
    files.set_aside(SavedAt(10, 20), [str(folder)])
    assert names(folder) == ["20.ckpt", "undone-30.ckpt", "undone-40.ckpt"]


def test_a_run_that_comes_back_from_a_url_knows_what_was_saved_of_steps_that_are_undone(
    tmp_path: Path, folder: Path
) -> None:
    paths, new, store = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "new"), Store((tmp_path / "ring").as_uri())
    save(SavedFiles(paths.root), folder / "20.ckpt", 20)
    for kept in upload(store, paths, first_index("a-run-id", "w")):
        download(store, kept, new.root)
    SavedFiles(new.root).set_aside(SavedAt(10, 20), [str(folder)])
    assert names(folder) == ["undone-20.ckpt"]


def test_each_rank_that_saves_writes_a_file_of_its_own_and_knows_what_the_others_have_saved(
    tmp_path: Path, folder: Path
) -> None:
    """A file is cut behind its last whole line where somebody opens it to write: the line may be another host's."""
    run = tmp_path / "run"
    for rank in (0, 8):
        save(SavedFiles(run, rank), folder / f"{rank}", 10)
    with open(run / "saved-files.jsonl", "a", encoding="utf-8") as being_written:
        being_written.write('{"file": "/x"')
    written = (run / "saved-files.jsonl").read_bytes()
    SavedFiles(run, 8).note(str(folder / "9"), SavedAt(20, 40))
    assert (run / "saved-files.jsonl").read_bytes() == written
    SavedFiles(run, 4).move_aside(lambda path: path.name in "08")
    assert names(folder) == []
    (folder / "8").write_text("of another run")
    SavedFiles(run).set_aside(SavedAt(5, 10), [str(folder)])
    assert names(folder) == ["undone-8"]
    paths, store = RunPaths(run), Store((tmp_path / "ring").as_uri())
    new = RunPaths(tmp_path / "new")
    for kept in upload(store, paths, first_index("a-run-id", "w")):
        download(store, kept, new.root)
    assert [path.name for path in new.all_saved_files()] == [path.name for path in paths.all_saved_files()]


def test_what_another_host_has_set_aside_on_its_own_disk_is_still_here(tmp_path: Path, folder: Path) -> None:
    first, other = SavedFiles(tmp_path / "run"), SavedFiles(tmp_path / "run", 8)
    for saved in (first, other):
        saved.note(str(folder / "30"), SavedAt(30, 30))
    (folder / "30").write_text("of the first host")
    first.set_aside(SavedAt(20, 20), [str(folder)])
    (folder / "30").write_text("of the other host, at the same path")
    other.set_aside(SavedAt(20, 20), [str(folder)])
    assert names(folder) == ["undone-1-30", "undone-30"]


def test_of_a_note_of_an_older_run_the_step_says_whether_it_is_undone(tmp_path: Path, folder: Path) -> None:
    (folder / "10").write_text("10")
    (folder / "30").write_text("30")
    (tmp_path / "run").mkdir(exist_ok=True)
    lines = [json.dumps({"file": str(folder / name), "step": int(name)}) for name in ("10", "30")]
    (tmp_path / "run" / "saved-files.jsonl").write_text("\n".join(lines) + "\n")
    SavedFiles(tmp_path / "run").set_aside(SavedAt(20, 20), [str(folder)])
    assert names(folder) == ["10", "undone-30"]


def test_a_note_of_somebody_else_renames_nothing_outside_of_the_folders(tmp_path: Path, folder: Path) -> None:
    precious = tmp_path / "precious"
    files = SavedFiles(tmp_path / "run")
    save(files, precious, 99)
    files.note(str(folder / ".." / "precious"), SavedAt(99, 198))
    files.set_aside(SavedAt(1, 2), [str(folder)])
    assert precious.exists()


def test_what_is_no_note_is_passed_over(tmp_path: Path, folder: Path) -> None:
    files = SavedFiles(tmp_path / "run")
    save(files, folder / "20.ckpt", 20)
    with open(tmp_path / "run" / "saved-files.jsonl", "a", encoding="utf-8") as notes:
        notes.write('[]\n{"file": 3}\nnonsense\n{"file": "/x", "step": Infinity}\n')
        notes.write(f'{"[" * 100_000}\n{{"file": "/nowhere", "step": 40')
    files.set_aside(SavedAt(10, 20), [str(folder)])
    assert names(folder) == ["undone-20.ckpt"]


def test_a_record_that_cannot_be_written_is_said_and_raises_nothing(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "saved-files.jsonl").symlink_to(tmp_path / "elsewhere")
    files = SavedFiles(tmp_path / "run")
    save(files, folder / "20.ckpt", 20)
    files.set_aside(SavedAt(10, 20), [str(folder)])
    assert names(folder) == ["20.ckpt"]
    assert "saved-files.jsonl" in capfd.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_moved_aside_leaves_its_folder_once_and_only_where_it_was_noted(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = SavedFiles(tmp_path / "run")
    save(files, folder / "3", 10)
    (folder / "4").write_text("of another run")
    files.move_aside(lambda path: True)
    assert names(folder) == ["4"]
    assert (tmp_path / "undone-3").read_text() == "of step 10"
    assert f"3 is of training that is undone: moved to {tmp_path}/undone-3" in capfd.readouterr().err
    (folder / "3").write_text("of another run")
    SavedFiles(tmp_path / "run").move_aside(lambda path: True)
    assert names(folder) == ["3", "4"]

"""`rollback backtest`: every kind of log, guessed columns, the documented JSON, and errors for the reader."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from curves import descent, norms, raised
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from rollback.backtest.columns import Overrides, find_columns, observations
from rollback.backtest.replay import replay, replay_all
from rollback.backtest.steps import counted_on
from rollback.backtest.table import read_table
from rollback.backtest.text import describe
from rollback.cli import main
from rollback.config import FIRST_PACE, Settings
from rollback.errors import OutputNotWritten, RollbackError, UsageError
from rollback.facts.fact import Window
from rollback.sentinel import Hint
from rollback.terminal.extras import require_extra

DATA = Path(__file__).parents[1] / "data"
LOSSES = raised(descent(200), 150, 3.0)
NORMS = norms(200)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command as a shell would: exit status, standard output, standard error."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollback", "backtest", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return command


def write_csv(path: Path, columns: dict[str, list[Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def calls(path: Path, **overrides: str) -> list[tuple[int | None, int]]:
    return [(call.onset, call.step) for call in replay(path, Overrides(**overrides), Settings()).calls]


STEPS = list(range(0, 2000, 10))
EXPECTED = [(1500, 1530)]


def test_comma_tab_and_semicolon_separated_values(tmp_path: Path) -> None:
    for delimiter in ",\t;":
        log = write_csv(tmp_path / "log", {"step": STEPS, "loss": LOSSES, "gn": NORMS}, delimiter)
        assert calls(log) == EXPECTED


def test_numbers_without_a_header_are_step_loss_and_gradient_norm(tmp_path: Path) -> None:
    rows = [f"{step},{loss},{norm}" for step, loss, norm in zip(STEPS, LOSSES, NORMS, strict=True)]
    (tmp_path / "log.csv").write_text("\n".join(rows))
    assert calls(tmp_path / "log.csv") == EXPECTED


def test_without_a_header_a_row_like_the_first_is_a_row(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("2.5\n2.25\n2.5\n")
    assert read_table(log) == {"loss": [2.5, 2.25, 2.5]}


def test_blank_lines_before_the_header_are_passed_over(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", {"step": [1, 2], "loss": [2.5, 2.25]})
    log.write_text("\n \n" + log.read_text())
    assert read_table(log) == {"step": [1.0, 2.0], "loss": [2.5, 2.25]}


@pytest.mark.parametrize("closed_later", [False, True])
def test_a_quote_that_is_not_closed_hides_no_rows(tmp_path: Path, closed_later: bool) -> None:
    """A reader of CSV takes all that follows for one cell, up to the end or the next quote."""
    log = tmp_path / "log.csv"
    notes = {3: '"cut', 7: '"again"' if closed_later else ""}
    log.write_text("step,note,loss\n" + "".join(f"{step},{notes.get(step, '')},2.5\n" for step in range(10)))
    with pytest.raises(UsageError, match=r"a quote in row 5 is not closed, and the row '4,,2\.5' would"):
        read_table(log)


def test_text_in_quotes_may_go_over_lines_and_the_last_line_may_be_torn_in_it(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text('step,loss,note\n1,2.5,"one, two,\nthree, four, five"\n2,2.4,\n3,2.3,"to')
    assert read_table(log)["loss"] == [2.5, 2.4, 2.3]


def test_columns_of_one_name_are_told_apart_and_the_first_is_guessed(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("step,loss,loss.1,loss,,\n1,2.5,9,7,,\n2,2.25,8,6,,\n" * 2)
    table = read_table(log)
    assert table == {
        "step": [1.0, 2.0] * 2, "loss": [2.5, 2.25] * 2, "loss.1": [9.0, 8.0] * 2, "loss.2": [7.0, 6.0] * 2,
    }  # fmt: skip
    assert find_columns(log, table, Overrides()).loss == "loss"


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_whole_number_beyond_all_floats_is_infinite(tmp_path: Path, digits: int) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(f'{{"step": 1, "loss": 2}}\n{{"step": 2, "loss": -{"9" * digits}}}\n')
    assert read_table(log) == {"step": [1.0, 2.0], "loss": [2.0, -math.inf]}


def test_a_column_whose_name_has_no_letter_means_nothing(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", {"#": [1, 2], "step": [1, 2], "loss": [2.5, 2.25]})
    assert [seen.loss for seen in replay(log, Overrides(), Settings()).observations] == [2.5, 2.25]


def test_only_the_end_of_a_line_ends_a_record(tmp_path: Path) -> None:
    said = ["a\u2028b", "c\x0cd\x85e"]
    rows = [{"loss": 2.5, "said": said[0]}, {"loss": 2.25, "said": said[1]}]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows), newline="")
    wanted = {"loss": [2.5, 2.25], "said": said}
    assert read_table(log) == wanted
    assert read_table(write_csv(tmp_path / "log.csv", wanted)) == wanted


def test_json_lines_with_nested_records_and_a_torn_last_line(tmp_path: Path) -> None:
    rows = [
        {"iteration": step, "train": {"loss": loss, "grad_norm": norm}, "note": "x"}
        for step, loss, norm in zip(STEPS, LOSSES, NORMS, strict=True)
    ]
    log = write_lines(tmp_path / "log.jsonl", rows)
    log.write_text(log.read_text() + '{"iteration": 2000, "tra')
    found = replay(log, Overrides(), Settings())
    assert [(call.onset, call.step) for call in found.calls] == EXPECTED
    assert (found.columns.loss, found.columns.grad_norm) == ("train/loss", "train/grad_norm")


def test_a_record_that_spells_a_column_twice_has_it_once(tmp_path: Path) -> None:
    rows = [{"loss": 2.5, "train/norm": 1.0, "train": {"norm": 2.0}}, {"loss": 2.25, "train/norm": 3.0}]
    assert read_table(write_lines(tmp_path / "log.jsonl", rows)) == {"loss": [2.5, 2.25], "train/norm": [2.0, 3.0]}


def test_metrics_of_a_run_of_ours(tmp_path: Path) -> None:
    rows = [
        {
            "step": i,
            "batch": i,
            "loss": loss if i != 50 else "NaN",
            "grad_norm": 1.0,
            "verdict": "healthy",
            "attempt": 0,
        }
        for i, loss in enumerate(LOSSES)
    ]
    assert calls(write_lines(tmp_path / "train.jsonl", rows)) == [(50, 50), (150, 154)]


def test_trainer_state_of_the_real_trainer() -> None:
    found = replay(DATA / "trainer_state.json", Overrides(), Settings())
    assert (found.columns.loss, found.columns.grad_norm, found.columns.lr) == ("loss", "grad_norm", "learning_rate")
    assert len(found.observations) == 150  # evaluations in between have no training loss
    assert [(call.onset, call.step) for call in found.calls] == [(202, 208)]


@pytest.mark.parametrize("encoding", ["simple", "tensor"])
def test_tensorboard_files_of_the_real_writer(encoding: str) -> None:
    found = replay(DATA / f"scalars-{encoding}.tfevents", Overrides(), Settings())
    assert (found.columns.loss, found.columns.grad_norm) == ("train/loss", "train/grad_norm")
    assert [observation.step for observation in found.observations] == list(range(120))
    assert [(call.onset, call.step) for call in found.calls] == [(80, 84)]


def test_a_torn_tensorboard_file_is_read_up_to_the_tear(tmp_path: Path) -> None:
    whole = (DATA / "scalars-simple.tfevents").read_bytes()
    log = tmp_path / "torn"
    log.write_bytes(whole[: len(whole) // 2])
    assert 20 < len(replay(log, Overrides(), Settings()).observations) < 100


def test_a_damaged_tensorboard_file_says_where(tmp_path: Path) -> None:
    damaged = bytearray((DATA / "scalars-simple.tfevents").read_bytes())
    length = int.from_bytes(damaged[:8], "little")
    damaged[12 + length + 4] ^= 1  # the second record's length
    (tmp_path / "log").write_bytes(damaged)
    with pytest.raises(UsageError, match="wrong checksum"):
        read_table(tmp_path / "log")


@pytest.mark.parametrize(
    "content", [b"\x0a\xff", b"\x1a\x0dbrain.Event:2\x2a\x03\x0a\x09\x0a", b"brain.Event:\xff\xff"]
)
def test_an_event_file_with_sound_checksums_and_other_content_is_refused_in_words(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "log").write_bytes(_record(b"\x1a\x0dbrain.Event:2") + _record(content))
    with pytest.raises(UsageError, match="holds a record that is no event"):
        read_table(tmp_path / "log")


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1])
def test_an_event_file_that_claims_a_huge_record_is_refused_in_words(tmp_path: Path, length: int) -> None:
    head = length.to_bytes(8, "little")
    (tmp_path / "log").write_bytes(_record(b"\x1a\x0dbrain.Event:2") + head + _checksum(head) + b"x" * 64)
    with pytest.raises(UsageError, match=r"begins at byte 31 .* no sane length"):
        read_table(tmp_path / "log")


def test_event_files_need_tensorboard_and_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(UsageError) as refused:
        read_table(DATA / "scalars-simple.tfevents")
    assert "TensorBoard, which cannot be imported" in refused.value.message
    assert refused.value.hint == "pip install 'torch-rollback[tensorboard]'"


def test_an_extra_that_what_it_needs_keeps_from_being_imported_is_told_of_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorBoard beside another version of protobuf, which raises a TypeError."""
    (tmp_path / "made_for_another.py").write_text("raise TypeError('Descriptors cannot be created directly')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"needs it, which cannot be imported \(Descriptors cannot be"):
        require_extra("made_for_another", "this needs it", "tensorboard")


def _checksum(data: bytes) -> bytes:
    return int(masked_crc32c(data)).to_bytes(4, "little")


def _record(data: bytes) -> bytes:
    head = len(data).to_bytes(8, "little")
    return head + _checksum(head) + data + _checksum(data)


def _zipped(name: str, *, encrypted: bool = False) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, "<x/>")
    whole = bytearray(content.getvalue())
    for flags in (6, whole.index(b"PK\x01\x02") + 8):
        whole[flags] |= encrypted
    return bytes(whole)


def test_numpy_archives_but_no_pickles_in_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "log.npz", step=np.array(STEPS), loss=np.array(LOSSES), gn=np.array(NORMS))
    assert calls(tmp_path / "log.npz") == EXPECTED
    np.savez(tmp_path / "evil.npz", loss=np.array([object()], dtype=object))
    with pytest.raises(UsageError, match="no NumPy archive of plain numbers"):
        read_table(tmp_path / "evil.npz")


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_a_log_in_a_pipe_is_read_whole(tmp_path: Path, kind: str) -> None:
    losses, log = [float(index) for index in range(5000)], tmp_path / "log"
    if kind == "csv":
        write_csv(log, {"loss": losses})
    else:
        with log.open("wb") as file:
            np.savez(file, loss=np.array(losses))
    with subprocess.Popen(["cat", log], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert read_table(Path(f"/dev/fd/{writer.stdout.fileno()}")) == {"loss": losses}


def test_an_event_file_in_a_pipe_is_refused_in_words() -> None:
    with subprocess.Popen(["cat", DATA / "scalars-simple.tfevents"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        with pytest.raises(UsageError, match="is an event file in a pipe"):
            read_table(Path(f"/dev/fd/{writer.stdout.fileno()}"))


@pytest.mark.parametrize(
    ("header", "loss", "step"),
    [
        (["Step", "Loss", "val_loss"], "Loss", "Step"),
        (["epoch", "global_step", "eval/loss", "train/loss"], "train/loss", "global_step"),
        (["iter", "lm loss", "loss_scale"], "lm loss", "iter"),
        (["consumed samples", "iteration", "lm loss value"], "lm loss value", "iteration"),
        (["test_loss", "mse_loss"], "mse_loss", None),
        (["_step", "train/loss_epoch", "train/loss_step"], "train/loss_step", "_step"),
    ],
)
def test_column_names_are_guessed(header: list[str], loss: str, step: str | None) -> None:
    columns = find_columns(Path("log"), {name: [1.0] for name in header}, Overrides())
    assert (columns.loss, columns.step) == (loss, step)


def test_column_names_can_be_overridden(tmp_path: Path) -> None:
    table = {"step": STEPS, "t": STEPS, "loss": descent(200), "other": LOSSES, "g": NORMS}
    log = write_csv(tmp_path / "log.csv", table)
    assert calls(log) == []
    assert calls(log, loss="other", grad_norm="g", step="t") == EXPECTED


def test_a_column_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, run: Run) -> None:
    log = write_csv(tmp_path / "log.csv", {"step": STEPS, "loss": LOSSES})
    code, out, err = run(log, "--loss", "los")
    assert (code, out) == (2, "")
    assert "no column 'los'" in err
    assert "'loss'" in err


def test_learning_rate_epoch_and_steps_that_go_back_are_hints(tmp_path: Path) -> None:
    log = write_csv(
        tmp_path / "log.csv",
        {
            "step": [0, 1, 2, 3, 4, 5, 4, 5],
            "loss": [1.0] * 8,
            "lr": [1.0, 1.0, 0.1, 0.9, 3.0, 3.0, 3.0, 3.0],
            "epoch": [0.0, 0.3, 0.6, 0.9, 1.0, 1.2, 1.2, 2.0],
            "hints": ["", "scaler_skipped|ANNOUNCED", "", "", "", "", "", ""],
        },
    )
    table = read_table(log)
    seen, assumed = observations(log, table, find_columns(log, table, Overrides()))
    none = Hint.NONE
    named = Hint.SCALER_SKIPPED | Hint.ANNOUNCED
    assert [o.hints for o in seen] == [none, named, none, Hint.LR_CHANGED, Hint.EPOCH, none, Hint.RESUMED, Hint.EPOCH]
    assert assumed == ["column 'step' goes back: taken as a resume once, so a step may stand for several rows"]


def test_a_step_column_that_starts_again_with_each_epoch_is_counted_on_and_the_text_says_so(
    tmp_path: Path, run: Run
) -> None:
    losses = raised(descent(600), 370, 1.6)  # ten steps behind an epoch's end; all that is excused has gone by then
    log = write_csv(tmp_path / "log.csv", {"batch": [i % 60 for i in range(600)], "loss": losses})
    code, out, _ = run(log, "--json")
    result = json.loads(out)
    assert code == 0
    assert [(call["onset"], call["detected"]) for call in result["calls"]] == [(370, 374)]
    assert result["last_step"] == 599
    assert "starts again 9 times" in result["assumed"][0]
    assert "assumed: column 'batch' starts again" in run(log)[1]


@pytest.mark.parametrize("lengths", [[150, 249, 90, 111], [320, 280]])
def test_epochs_of_uneven_length_are_told_from_resumes_by_the_epoch_column(
    tmp_path: Path, run: Run, lengths: list[int]
) -> None:
    rows = [(epoch + 1, batch) for epoch, length in enumerate(lengths) for batch in range(length)]
    table = {"batch": [batch for _, batch in rows], "loss": raised(descent(600), 520, 1.6)}
    alone = write_csv(tmp_path / "alone.csv", table)
    told = write_csv(tmp_path / "told.csv", {"epoch": [epoch for epoch, _ in rows], **table})
    result = json.loads(run(told, "--json")[1])
    assert [(call["onset"], call["detected"]) for call in result["calls"]] == [(520, 524)]
    assert result["last_step"] == 599
    times = "once" if len(lengths) == 2 else "3 times"
    assert result["assumed"] == [
        f"column 'batch' starts again {times} where the epoch goes up: taken as the batch of an epoch, and counted on"
    ]
    assert f"column 'batch' goes back: taken as a resume {times}" in " ".join(run(alone)[1].split())


def test_what_goes_back_within_an_epoch_is_a_resume_also_where_epochs_are_told() -> None:
    column = counted_on([0, 1, 2, 0, 1, 2, 3, 2, 3, 0], begun=frozenset({3, 9}))
    assert column.steps == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert (column.epochs, column.resumes) == ({3, 9}, {7})


def test_every_fourth_batch_of_an_epoch_and_a_first_epoch_that_was_resumed_are_counted_on_too() -> None:
    column = counted_on([40, 44, 48, *range(0, 50, 4), *range(0, 52, 4), 0, 4])
    assert column.steps == list(range(40, 40 + 4 * len(column.steps), 4))
    assert (len(column.epochs), column.resumes) == (3, frozenset())


@pytest.mark.parametrize(
    "steps",
    [
        [*range(100), *range(60, 200)],  # one resume
        [*range(100), *range(100)],  # a new run in an old file
        [*range(100), *range(40, 130), *range(80, 200)],  # resumes, each from a checkpoint
        [*range(100), *range(30), *range(190)],  # runs that crashed
    ],
)
def test_a_step_column_that_goes_back_otherwise_is_a_resume(steps: list[int]) -> None:
    column = counted_on(steps)
    assert column.steps == steps
    assert not column.epochs
    assert len(column.resumes) in (1, 2)


def test_another_run_in_the_same_log_is_asked_about(tmp_path: Path, run: Run) -> None:
    log = write_csv(tmp_path / "log.csv", {"step": [*range(200)] * 2, "loss": [*descent(200)] * 2})
    told = " ".join(run(log)[1].split())
    assert "column 'step' goes back to its start once, and no epochs were seen in that: if another run begins" in told


@pytest.mark.parametrize("order", ["newest first", "some rows late"])
def test_rows_in_another_order_than_that_of_their_steps_are_refused(tmp_path: Path, run: Run, order: str) -> None:
    """Each would be a resume, and all would be excused."""
    steps = list(range(199, -1, -1)) if order == "newest first" else [step ^ (step % 8 < 2) for step in range(200)]
    losses = raised(descent(200), 150, 1.6)
    log = write_csv(tmp_path / "log.csv", {"step": steps, "loss": [losses[step] for step in steps]})
    code, _, told = run(log)
    assert code == 2
    times = 197 if order == "newest first" else 24  # but for the one that goes back to the start
    assert f"the rows of {log} are not in the order of column 'step': it goes back {times} times in 200 rows" in told


def test_a_number_that_is_no_step_is_refused_in_words(tmp_path: Path, run: Run) -> None:
    times = [1_764_000_000_000_000_000 + 10**9 * row for row in range(200)]
    log = write_csv(tmp_path / "log.csv", {"step": times, "loss": LOSSES})
    code, _, told = run(log)
    assert code == 2
    assert told.startswith(f"rollback: error: column 'step' of {log} holds 1.764e+18 in record 1, which is no step\n")


def test_several_rows_of_one_step_are_no_resume() -> None:
    assert counted_on([0, 0, 1, 1, 2, 2]).resumes == frozenset()


def test_a_learning_rate_column_excuses_a_warm_restart(tmp_path: Path) -> None:
    bump = raised(descent(300), 200, 1.6, decay=25.0)
    rates = [1e-3 * (1 - (i % 200) / 220) for i in range(300)]
    table = {"step": list(range(300)), "loss": bump, "gn": norms(300), "learning_rate": rates}
    assert calls(write_csv(tmp_path / "with.csv", table)) == []
    del table["learning_rate"]
    assert len(calls(write_csv(tmp_path / "without.csv", table))) == 1


def test_json_has_the_documented_keys(tmp_path: Path, run: Run) -> None:
    losses = [*LOSSES, float("nan"), float("nan")]
    log = write_csv(tmp_path / "log.csv", {"step": range(202), "loss": losses})
    code, out, _ = run(log, "--json")
    result = json.loads(out)
    assert code == 0
    assert out.count("\n") == 1
    assert result["schema"] == 1
    spike, broken = result["calls"]
    assert (spike["onset"], spike["detected"], spike["verdict"], spike["rule"]) == (150, 154, "spike", "loss-high")
    assert spike["value"] > spike["threshold"]
    assert (broken["detected"], broken["verdict"], broken["value"], broken["threshold"]) == (
        200,
        "nonfinite",
        "NaN",
        None,
    )
    assert [answer["call"] for answer in result["plan"]] == [0, 1]
    assert result["plan"][0]["action"] == "rollback"
    assert result["plan"][0]["restore"] == 100
    assert result["plan"][0]["skip"] == [100, 174]


def test_what_is_advice_of_a_loss_without_progress_is_called_if_it_is_said_to_be_supervised(
    tmp_path: Path, run: Run
) -> None:
    log = write_csv(tmp_path / "log.csv", {"loss": [1 + 0.4 * math.sin(i / 42) + 0.03 * (i % 3) for i in range(900)]})
    result, told = (json.loads(run(log, "--json", "--objective", each)[1]) for each in ("auto", "supervised"))
    assert result["calls"] == []
    assert told["calls"]
    assert told["advice"] == []
    assert set(result["advice"][0]) == {"onset", "step", "rule", "text"}
    text = run(log)[1]
    assert "say so: --objective supervised" in " ".join(text.split())


def test_where_a_job_would_have_asked_its_model_is_told_and_that_a_log_has_none(tmp_path: Path, run: Run) -> None:
    losses = raised(descent(600), 300, 0.4)
    log = write_csv(tmp_path / "log.csv", {"step": range(600), "loss": losses})
    result = json.loads(run(log, "--json")[1])
    assert result["calls"] == []
    first, *later = result["probes"]
    assert set(first) == {"step", "onset", "level", "now"}
    assert 300 < first["step"] < 400
    assert abs(first["onset"] - 300) <= 16
    assert all(probe["step"] >= first["step"] + 200 for probe in later)
    text = " ".join(run(log)[1].split())
    assert f"a probe at step {first['step']} the loss is up since about step {first['onset']}" in text
    assert "a log has no model to ask" in text


def test_blips_are_reported_apart(tmp_path: Path, run: Run) -> None:
    log = write_csv(tmp_path / "log.csv", {"step": STEPS, "loss": raised(descent(200), 150, 3.0, length=2)})
    result = json.loads(run(log, "--json")[1])
    assert result["calls"] == []
    (blip,) = [blip for blip in result["blips"] if blip["peak"] > 5]
    assert (blip["first_step"], blip["last_step"], blip["fate"]) == (1500, 1510, "recovered")


def test_the_plan_uses_only_checkpoints_that_were_good_by_then(tmp_path: Path) -> None:
    early = raised(descent(200), 60, 9.0)
    log = write_csv(tmp_path / "log.csv", {"step": range(200), "loss": early})
    (answer,) = replay(log, Overrides(), Settings()).plan
    assert (answer.step, answer.action) == (0, "rollback")  # the one of step 50 was still on probation
    late = write_csv(tmp_path / "late.csv", {"step": range(30, 200), "loss": early[30:]})
    (answer,) = replay(late, Overrides(), Settings()).plan
    assert answer.action == "stop"
    assert "no good checkpoint" in answer.reason


@pytest.mark.parametrize("first", [0, 1])
def test_the_plan_goes_back_to_the_state_before_the_first_step_which_is_good_as_it_is(
    tmp_path: Path, first: int
) -> None:
    losses = [*LOSSES[:10], float("nan"), *LOSSES[11:40], float("nan"), *LOSSES[41:60]]
    log = write_csv(tmp_path / "log.csv", {"step": range(first, first + 60), "loss": losses})
    plan = replay(log, Overrides(), Settings()).plan
    at = [10 + first, 40 + first]
    assert [(each.action, each.step, each.skip) for each in plan] == [
        ("rollback", 0, Window(first=step, last=step)) for step in at
    ]
    seldom = [*LOSSES[:4], float("nan"), *LOSSES[5:60]]
    log = write_csv(tmp_path / "seldom.csv", {"step": range(10, 610, 10), "loss": seldom})
    assert [each.step for each in replay(log, Overrides(), Settings()).plan] == [0]


def test_the_plan_skips_a_batch_that_did_it_alone_as_a_run_would(tmp_path: Path) -> None:
    losses = [*LOSSES[:90], float("nan"), *LOSSES[91:]]

    def plan(every: int, settings: Settings) -> list[tuple[int | None, tuple[int, int] | None, int]]:
        table = {"step": range(0, 200 * every, every), "loss": losses}
        found = replay(write_csv(tmp_path / "log.csv", table), Overrides(), settings)
        return [(each.step, each.skip and (each.skip.first, each.skip.last), each.escalation) for each in found.plan]

    assert plan(1, Settings()) == [(50, (90, 90), 0), (100, (100, 174), 0)]  # so the spike is another occasion
    assert plan(1, Settings(rewind=20))[0] == (50, (50, 110), 0)  # a reach set by hand does not trust a single batch
    assert plan(10, Settings())[0] == (850, (850, 920), 0)  # nine losses before it are in no log


def test_the_plan_knows_how_a_full_ring_is_thinned(tmp_path: Path) -> None:
    """What is far back is still there, at wider distances: the ring does not hold the newest few alone."""
    log = write_csv(tmp_path / "log.csv", {"step": range(3000), "loss": raised(descent(3000), 2200, 9.0)})
    found = replay(log, Overrides(), Settings(snapshot_every=10, keep=8, rewind=400))
    assert found.plan[0].step == 1640


def test_a_column_that_counts_tokens_has_a_plan_at_once(tmp_path: Path) -> None:
    with_nan = [loss if row != 150 else math.nan for row, loss in enumerate(descent(200))]
    log = write_csv(tmp_path / "log.csv", {"tokens": [10**9 * n for n in range(200)], "loss": with_nan})
    (planned,) = replay(log, Overrides(step="tokens"), Settings(max_skipped="100%")).plan
    assert planned.step is not None
    assert 150 * 10**9 - 2 * FIRST_PACE <= planned.step < 150 * 10**9


def test_text_names_every_call_and_fits_the_terminal(tmp_path: Path, run: Run) -> None:
    log = write_csv(tmp_path / "log.csv", {"step": STEPS, "loss": LOSSES})
    code, out, err = run(log)
    assert (code, err) == (0, "")
    assert "spike at step 1530, since step 1500 (loss-high)" in out
    assert "restore step" in out
    for width in (60, 100):
        account = describe(replay(log, Overrides(), Settings()), width).splitlines()[1:]
        assert max(map(len, account)) <= width


def test_a_log_that_is_constant_or_all_nan_or_of_all_magnitudes_can_be_drawn(tmp_path: Path) -> None:
    for value, sign in ((1.0, 1), (float("nan"), 1), (1.7e308, -1)):
        log = write_csv(tmp_path / "log.csv", {"loss": [value, value, sign * value] * 10})
        assert describe(replay(log, Overrides(), Settings()), 80)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"  \n\n", "is empty"),
        (b",,,\n", "is empty"),
        (b"step,acc\n1,0.5\n2,0.6\n", "no column that looks like a loss"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a binary file"),
        (b"PK\x03\x04 but no archive", "no NumPy archive"),
        (_zipped("[Content_Types].xml"), "no NumPy archive of plain numbers: [Content_Types].xml in it is no array"),
        (_zipped("a.npy", encrypted=True), "no NumPy archive"),
        (b"\xff\xfe\xfd step", "is not text"),
        (b"step,loss\n1,2.5\n2,high\n", "holds 'high' in record 2"),
        (b"step,loss\n1,2.5,7\n", "row 2 has 3 cells"),
        (b'{"loss": 1}\nnonsense\n{"loss": 2}\n', "line 2 is no JSON"),
        (b'{"loss": 1}\n[2]\n', "line 2 is JSON, but no record"),
        (b"[1, 2]", "no list of records"),
        (b"step,loss\n1,\n2,\n", "is empty"),
        (b"1,2,3,4\n5,6,7,8\n", "no header"),
    ],
)
def test_a_file_that_cannot_be_used_gets_one_clear_message_and_exit_2(
    tmp_path: Path, run: Run, content: bytes, says: str
) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    code, out, err = run(log, "--json")
    assert (code, out) == (2, "")
    assert err.count("error:") == 1
    assert says in err
    assert str(log) in err
    assert "hint:" in err


def test_missing_files_and_directories_are_refused(tmp_path: Path, run: Run) -> None:
    assert run(tmp_path / "none.csv")[0] == 2
    code, _, err = run(tmp_path)
    assert code == 2
    assert "is a directory" in err
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/train.jsonl").touch()
    assert f"name the log of this run: {tmp_path}/metrics/train.jsonl" in run(tmp_path)[2].replace("\n", "")


def test_of_a_directory_of_tensorboard_the_event_files_are_named(tmp_path: Path, run: Run) -> None:
    events = [tmp_path / name / f"events.out.tfevents.17{i}.host" for i, name in enumerate("abcd")]
    for event in events:
        event.parent.mkdir()
        event.touch()
    assert f"name the event file: {events[0]}" in run(events[0].parent)[2].replace("\n", "")
    err = run(tmp_path)[2]
    assert all(str(event) in err for event in events[:3])
    assert "and 1 more" in err


def test_many_logs_give_one_line_each_in_order_and_a_bad_one_spoils_none(tmp_path: Path, run: Run) -> None:
    logs = [write_csv(tmp_path / f"{i}.csv", {"step": STEPS, "loss": LOSSES}) for i in range(4)]
    (tmp_path / "bad.csv").write_text("")
    logs.insert(2, tmp_path / "bad.csv")
    code, out, err = run(*logs, "--json")
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert "bad.csv is empty" in err
    assert [result["log"] for result in results] == [str(log) for log in logs]
    assert ["error" in result for result in results] == [False, False, True, False, False]


def test_a_pool_of_processes_gives_what_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [write_csv(tmp_path / f"{i}.csv", {"loss": raised(descent(90, i), 60, 3.0)}) for i in range(6)]
    alone = [
        found.to_json() for found in replay_all(logs, Overrides(), Settings()) if not isinstance(found, UsageError)
    ]
    monkeypatch.setattr("rollback.backtest.replay._WORTH_A_POOL", 0)
    pooled = [
        found.to_json() for found in replay_all(logs, Overrides(), Settings()) if not isinstance(found, UsageError)
    ]
    assert pooled == alone
    assert len(alone) == 6
    monkeypatch.setattr("rollback.backtest.replay.replay", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RollbackError, match="was killed, most likely for want of memory"):
        list(replay_all(logs, Overrides(), Settings()))


def test_a_picture_is_drawn_or_matplotlib_is_asked_for(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_csv(tmp_path / "log.csv", {"step": STEPS, "loss": LOSSES, "gn": NORMS})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(log, "--plot", tmp_path / "out.png")
    assert code == 2
    assert "pip install 'torch-rollback[plot]'" in err
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "matplotlib.py").write_text("raise AttributeError('_ARRAY_API not found')")  # beside another numpy
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = run(log, "--plot", tmp_path / "out.png")
    assert code == 2
    assert "cannot be imported (_ARRAY_API not found)" in err.replace("\n", " ")


def test_a_picture_of_a_log(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from rollback.backtest.picture import draw

    log = write_csv(tmp_path / "at_$5_of_$\\9.csv", {"step": STEPS, "loss_$x^": LOSSES, "gn": NORMS})  # no formulas
    draw(replay(log, Overrides(), Settings()), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="cannot be drawn"):
        draw(replay(log, Overrides(), Settings()), tmp_path / "out.nonsense")
    wide = write_csv(tmp_path / "wide.csv", {"step": range(4), "loss": [1e308, -1e308, math.nan, 1e308]})
    draw(replay(wide, Overrides(), Settings()), tmp_path / "wide.png")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_picture_that_the_disk_refuses_leaves_what_was_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from rollback.backtest.picture import draw

    log = write_csv(tmp_path / "log.csv", {"step": STEPS, "loss": LOSSES, "gn": NORMS})
    target = tmp_path / "out" / "picture.png"
    target.parent.mkdir()
    target.write_text("an older one")
    (target.parent / f".{target.name}.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OutputNotWritten, match="No space left"):
        draw(replay(log, Overrides(), Settings()), target)
    assert [(path, path.read_text()) for path in target.parent.iterdir()] == [(target, "an older one")]


def test_a_picture_of_several_logs_is_refused(tmp_path: Path, run: Run) -> None:
    code, _, err = run(tmp_path / "a", tmp_path / "b", "--plot", "x.png")
    assert code == 2
    assert "--plot draws one log" in err
    code, out, err = run(tmp_path / "a", "--plot", tmp_path / "none" / "x.png")
    assert (code, out) == (2, "")
    assert "there is no directory" in err


def test_a_binary_file_is_refused_by_its_beginning(run: Run) -> None:
    """A device has no end."""
    code, _, err = run(Path("/dev/zero"))
    assert code == 2
    assert "/dev/zero is a binary file" in err

"""`rollback launch --tensorboard` on a real job: the curve is there when the launch is over."""

from pathlib import Path

from launching import launching
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollback.rundir.metrics.metric_columns import joined, metric_pieces

TINY = Path(__file__).parent / "jobs" / "tiny.py"


def test_a_launch_leaves_the_whole_curve_in_tensorboard(tmp_path: Path) -> None:
    with launching(tmp_path, with_torchrun=False, script=TINY) as launch:
        status, output = launch.finish("", "--tensorboard", str(tmp_path / "tb"))
    assert status == 0, output
    judged = {*joined(metric_pieces(launch.paths.metrics, [])).step.tolist()}
    events = EventAccumulator(str(tmp_path / "tb" / "tiny")).Reload().Scalars("train/loss")
    assert {event.step for event in events} == judged
    assert judged

"""The three presets of the thresholds. The sensitivity is the sentinel's only setting."""

from dataclasses import dataclass

from rollback.config import Sensitivity


@dataclass(frozen=True, slots=True)
class Preset:
    """Thresholds of one sensitivity. Losses are measured in noise units above the level."""

    patience: int
    """Number of steps that an excursion must last before it can be called."""
    alone: float
    """Mean height over the patience at which the loss is called without a second witness. Where little progress is lost
    and the gradient norm is quiet, it must be higher."""
    supported: float
    """Mean height that suffices when the gradient norm or the lost progress supports it."""
    support: float
    """Mean height of the log gradient norm, in its noise units, that counts as support."""
    drift: float
    """Height at which a slow rise is called, in the noise units of the time when the loss was lowest."""
    faded: float
    """Share of the gradient norm of before; where less is left and the loss is up, training is stuck."""


PRESETS: dict[Sensitivity, Preset] = {
    "low": Preset(patience=8, alone=7.0, supported=4.0, support=6.0, drift=4.0, faded=1 / 2),
    "normal": Preset(patience=5, alone=6.0, supported=2.8, support=4.5, drift=2.5, faded=2 / 3),
    "high": Preset(patience=4, alone=4.5, supported=2.5, support=4.0, drift=2.0, faded=3 / 4),
}

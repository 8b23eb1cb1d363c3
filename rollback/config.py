"""Settings of the guard: their meaning, their defaults, and which of them contradict each other.

A setting may come from the script (keyword arguments of `Guard`) or from the command line (`rollback launch`, passed
down in the environment). The command line wins: at three in the morning the operator has no editor open.
"""

import os
from collections.abc import Callable, Container, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from rollback.environment import ENV_SETTINGS, as_variables, text_in
from rollback.errors import WrongSetting
from rollback.facts.fact import SamplesFrom
from rollback.facts.training import Window

Sensitivity = Literal["low", "normal", "high"]
Objective = Literal["auto", "supervised", "adversarial", "rl"]
PresetName = Literal["balanced", "palm", "surgical", "screen"]


class Reach(BaseModel, frozen=True):
    """How far a rollback reaches back and ahead."""

    rewind: int
    """The restored checkpoint is at least this many steps before the onset."""
    skip_from: Literal["checkpoint", "onset"]
    """Where the skip window begins: at the restored checkpoint, or at the onset's first batch."""
    skip_after: int
    """Number of batches to skip after the last batch of the detection step."""
    skip_min: int
    """The window has at least this many batches."""


# palm: Chowdhery et al. 2022, section 5.1: restart about 100 steps before the spike, skip roughly 200-500 batches.
# surgical: only what the sentinel saw; for those who trust its onset and cannot spare data.
# balanced: the first moment of Adam with beta1 = 0.9 forgets in about 10 steps, so 20 steps before the onset the
# optimizer had not yet felt what led to it, and an onset estimate that is a few steps late is covered; bad data comes
# in stretches, so 20 batches beyond the detection are cheaper than a second rollback.
# screen: what balanced would skip is judged, update by update, and only what stands out is skipped.
PRESETS: Mapping[PresetName, Reach] = {
    "balanced": Reach(rewind=20, skip_from="checkpoint", skip_after=20, skip_min=0),
    "palm": Reach(rewind=100, skip_from="checkpoint", skip_after=0, skip_min=200),
    "surgical": Reach(rewind=0, skip_from="onset", skip_after=0, skip_min=0),
    "screen": Reach(rewind=20, skip_from="checkpoint", skip_after=20, skip_min=0),
}


EMPTY = "it is empty: name a file or a folder, or leave it out"
FIRST_PACE = 50
"""Steps between checkpoints where `snapshot_every` is `auto` and no cost has been measured yet."""


def _named(given: str | os.PathLike[str] | None) -> str | None:
    if given == "":  # a shell variable that is not set: training would begin with random weights, without a word
        raise ValueError(EMPTY)
    return None if given is None else str(given)


def window_from(text: str) -> Window:
    """The batches of `A:B`, both included. Raises ValueError."""
    first, _, last = text.partition(":")
    try:
        return Window(first=int(first), last=int(last))
    except ValueError:
        form = "FIRST:LAST, both included and below 2**53, as in 120:139"
        raise ValueError(f"{text!r} is not a range of batches: write {form}") from None


def samples_from(text: str) -> SamplesFrom:
    """The samples of `I,J` or `BATCH:I,J`. Raises ValueError."""
    batch, _, listed = text.rpartition(":")
    try:
        return SamplesFrom(batch=int(batch or 0), samples=tuple(int(sample) for sample in listed.split(",")))
    except ValueError:
        form = "data set indices as in 17,402; or BATCH:17,402 to leave them out from that batch on"
        raise ValueError(f"{text!r} is not a list of samples: write {form}") from None


def _item(read: Callable[[str], Any]) -> BeforeValidator:
    """One of several, as on the command line: what is no such object is read as its text, or refused in our words."""
    return BeforeValidator(lambda given: given if isinstance(given, BaseModel | Mapping) else read(str(given)))


_ONE_OR_SEVERAL = BeforeValidator(lambda given: given if isinstance(given, list | tuple) else (given,))


class Settings(BaseModel, frozen=True, extra="forbid"):
    """All settings of a guard, valid together. Steps are optimizer updates; batches are positions in the data
    stream."""

    policy: PresetName = Field("balanced", description="preset for the four settings below")
    rewind: int | None = Field(None, ge=0, description="restore at least this many steps before the onset")
    skip_from: Literal["checkpoint", "onset"] | None = Field(None, description="where a skip window begins")
    skip_after: int | None = Field(None, ge=0, description="batches skipped beyond the detection step")
    skip_min: int | None = Field(None, ge=0, description="least number of batches in a skip window")
    horizon: int = Field(
        100, ge=1, description="an incident within so many steps after a skip window counts as the same trouble"
    )
    max_undone: int = Field(
        1000, ge=1, description="updates that the answers to one trouble may undo; the run stops before they undo more"
    )
    max_skipped: Annotated[str, BeforeValidator(str)] = Field(
        "5%", pattern=r"^(100|\d{1,2}(\.\d{1,6})?)%$", examples=["5%"],
        json_schema_extra={"metavar": "X%", "bounds": " with X from 0 to 100"},
        description="share of the batches that incidents may cost; where a window would cost more, its updates are "
        "judged one by one, and where that does not help the run stops",
    )  # fmt: skip
    lr_after: Annotated[str | None, BeforeValidator(lambda given: given if given is None else str(given))] = Field(
        None, pattern=r"^0\.(0[1-9]\d{0,4}|[1-9]\d{0,5}):[1-9]\d{0,8}$", examples=["0.5:200"],
        json_schema_extra={"metavar": "FACTOR:STEPS", "bounds": " with a FACTOR of at least 0.01, below 1"},
        description="where skipping does not help: replay with the learning rate times FACTOR for STEPS steps, then "
        "back over as many; lower still if the trouble comes back",
    )  # fmt: skip
    probe: bool = Field(
        True, description="where the loss is up for no clear reason, try the model on a batch that it has learned"
    )
    quarantine: Literal["suspects", "off"] = Field(
        "suspects", description="leave samples that incidents have in common out of later batches; off: leave none out"
    )
    retry_first: bool = Field(False, description="replay once without skipping, to tell data from transient faults")
    observe_only: bool = Field(False, description="journal what would have been done, and do nothing")
    sensitivity: Sensitivity = Field("normal", description="how readily the sentinel calls a spike")
    objective: Objective = Field(
        "auto", description="what the loss is of; with adversarial and rl only what is far beyond all seen is called"
    )
    snapshot_every: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="steps between checkpoints; auto: by what they cost; 0 takes none at all (observe only)",
    )
    overhead: float = Field(0.01, gt=0, le=1, description="share of the time that checkpoints may hold up the loop")
    fast_tier: Annotated[str, BeforeValidator(_named)] = Field(
        "auto", description="checkpoints in memory: auto (in /dev/shm), off, or a directory"
    )
    last_snapshot: Literal["auto", "on", "off"] = Field(
        "auto", description="when a rank dies, keep the state that the others still hold; auto: not on GPUs"
    )
    keep: int = Field(6, ge=3, description="checkpoints that stay: the newest, older ones further and further apart")
    ring: Annotated[str | None, BeforeValidator(lambda url: url or None)] = Field(
        None, description="keep good checkpoints and the record at this URL too, and go on from it elsewhere; "
        "empty: at none, whatever the script says",
        json_schema_extra={"metavar": "URL"},
    )  # fmt: skip
    checkpoint_every: Annotated[str, BeforeValidator(str)] = Field(
        "auto", pattern=r"^(auto|[1-9]\d{0,8}[smh]?)$", examples=["10m"],
        json_schema_extra={"metavar": "N|Nm|Nh|auto"},
        description="steps or time between checkpoints for the ring at the URL; auto: at most 1/20 of the time",
    )  # fmt: skip
    keep_durable: int | None = Field(None, ge=3, description="checkpoints that stay at the URL (default: as --keep)")
    probation: int = Field(25, ge=1, description="healthy steps after which a checkpoint is good")
    evidence_limit: int = Field(64, ge=0, description="MiB of recent batches kept as evidence of an incident; 0: none")
    accept_data_change: bool = Field(
        False, description="go on although the data set has grown or shrunk, or is read with other samples than before"
    )
    accept_structural: bool = Field(
        False, description="go on after a structural stop (exit code 76) although no setting has changed"
    )
    init: Annotated[str | None, BeforeValidator(_named)] = Field(
        None, description="begin a new run with these weights: safetensors (file or folder) or a DCP checkpoint; a run "
        "with checkpoints does not read it",
        json_schema_extra={"metavar": "PATH"},
    )  # fmt: skip
    skip: Annotated[tuple[Annotated[Window, _item(window_from)], ...], _ONE_OR_SEVERAL] = Field(
        (), examples=["120:139"], description="batches to leave out from the start"
    )
    skip_samples: Annotated[tuple[Annotated[SamplesFrom, _item(samples_from)], ...], _ONE_OR_SEVERAL] = Field(
        (), examples=["17,402"],
        description="all data set samples to leave out, from a batch on or (default) from the start",
        json_schema_extra={"metavar": "[BATCH:]I,J"},
    )  # fmt: skip

    @field_validator("snapshot_every")
    @classmethod
    def _leaves_something_to_restore(cls, every: int | str, info: ValidationInfo) -> int | str:
        if every == 0 and not info.data.get("observe_only"):
            raise ValueError("0 leaves nothing to restore: it is for --observe-only (observe_only=True) alone")
        return every

    @property
    def max_skipped_share(self) -> float:
        """Between 0 and 1."""
        return float(self.max_skipped.removesuffix("%")) / 100

    @property
    def lower_rate(self) -> tuple[float, int] | None:
        """Factor and steps of `lr_after`."""
        if self.lr_after is None:
            return None
        factor, _, steps = self.lr_after.partition(":")
        return float(factor), int(steps)

    @property
    def trusts_the_batch_in_hand(self) -> bool:
        """Whether the plan skips a single bad batch alone. `palm`, or a reach set by hand, says no."""
        return self.policy != "palm" and all(getattr(self, name) is None for name in Reach.model_fields)

    def decides_otherwise(self, recorded: Mapping[str, Any]) -> bool:
        """Whether incidents would be called or answered differently under the `recorded` settings.

        recorded: as in a journal, without the settings that had the default value.
        """
        present = self.model_dump(mode="json", exclude_defaults=True)
        return any(present.get(name) != recorded.get(name) for name in DECIDING)

    @property
    def evidence_bytes(self) -> int:
        return self.evidence_limit << 20

    @property
    def reach(self) -> Reach:
        """The preset, with the values set by hand in their places."""
        own = {name: value for name in Reach.model_fields if (value := getattr(self, name)) is not None}
        return PRESETS[self.policy].model_copy(update=own)


DECIDING = (
    *Reach.model_fields, "policy", "horizon", "max_undone", "lr_after", "max_skipped", "quarantine", "retry_first",
    "observe_only", "probe", "sensitivity", "objective", "snapshot_every", "keep", "probation", "accept_data_change",
    "skip", "skip_samples",
)  # fmt: skip
"""Settings that decide what is an incident and what is done about it."""

_LOOSE = TypeAdapter(dict[str, Any])


def settings_as_environment(settings: Settings) -> dict[str, str]:
    """What hands the settings that are set down to the ranks."""
    return as_variables(ENV_SETTINGS, settings.model_dump_json(exclude_unset=True))


def settings_from(script: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings of the script, overridden by those of the command line. Raises WrongSetting with its name."""
    operator: dict[str, Any] = {}
    try:
        operator = _of_command_line(environment)
        return Settings.model_validate({**script, **operator})
    except ValidationError as error:
        raise WrongSetting(
            explain(error, operator), hint="rollback launch --help and help(rollback.Guard) list the settings"
        ) from None  # pydantic's account of it says no more, and in a script its traceback would stand above this one


def _of_command_line(environment: Mapping[str, str]) -> dict[str, Any]:
    given = text_in(environment, ENV_SETTINGS)
    return _LOOSE.validate_json(given) if given else {}


def option(setting: str) -> str:
    """The option of the command line that gives a setting."""
    return f"--{setting.replace('_', '-')}"


def spelt(setting: str, environment: Mapping[str, str] = os.environ) -> str:
    """The name of a setting for whoever gave it: of the option if the command line did, else of the argument."""
    return option(setting) if setting in _of_command_line(environment) else setting


def explain(error: ValidationError, of_command_line: Container[str] = ()) -> str:
    """A validation error of Settings in one line for people. of_command_line: the settings that it gives."""
    first = error.errors()[0]
    if not first["loc"]:
        return f"the settings that were handed down cannot be read: {first['msg']}"
    setting, *places = first["loc"]
    if first["type"] == "extra_forbidden":
        return f"there is no setting {setting!r}"
    if setting in of_command_line:
        return f"{option(str(setting))}: {_fault_of(error)}"
    name = ".".join(str(part) for part in (setting, *places) if part == setting or isinstance(part, int))
    return f"setting {name}: {_fault_of(error)}"


def _fault_of(error: ValidationError) -> str:
    """What is wrong with the value of the first setting at fault, in words."""
    first, *others = error.errors()
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    if first["type"] != "string_pattern_mismatch":  # where one of several kinds would do, each has an error of its own
        same = [item for item in others if item["loc"][:-1] == first["loc"][:-1] != ()]
        kinds = [item["msg"].removeprefix("Input should be ") for item in same]
        return f"{' or '.join([first['msg'], *kinds])} (got {first['input']!r})"
    schema = Settings.model_json_schema()["properties"][first["loc"][0]]
    form = schema["metavar"] + schema.get("bounds", "")
    return f"{first['input']!r} is not of the form {form}, such as {schema['examples'][0]}"

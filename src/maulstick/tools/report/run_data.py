"""What a report knows about a run: plain values, read from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from maulstick.train.events import json_value

LOSS, SMOOTH_LOSS, VALIDATION_LOSS = "loss/current", "loss/average", "loss/validation"
VALIDATION_OF_TRAINED = "loss/validation of trained"
"""Measured as the validation loss is, on images that are trained."""
NORM, THRESHOLD, COSINE, SCALE = "norm/grad", "norm/threshold", "cosine", "train/loss_scale"
SECONDS = "seconds"

Ending = Literal["end", "interrupted", "failed", "open"]
"""How a run ended: finished, stopped (by the user or because it could not go on), by an error; open: it has not."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step.

    Attributes:
        kind: what it is, see ``marks.KINDS``.
        reason: the finer kind, where there is one: why a step was skipped, why a run went back.
        images: files that were trained in the step; at most a few.
    """

    step: int
    kind: str
    text: str
    reason: str = ""
    images: tuple[str, ...] = ()
    norm: float | None = None
    threshold: float | None = None


@dataclass
class Points:
    """Values that are not there for every step."""

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, step: int, value: float | None) -> None:
        self.steps.append(step)
        self.values.append(value)


@dataclass(frozen=True)
class BlockNorms:
    """Norms of each block at one step; ``weight_is``: "change" (what a LoRA adds) or "tensors" (what is trained)."""

    step: int
    gradient: Mapping[str, float]
    weight: Mapping[str, float]
    weight_is: str


@dataclass(frozen=True)
class TimestepLosses:
    """Losses since the event before, by timestep: bins of ``width``, each with a number of images and a mean."""

    step: int
    width: int
    count: Sequence[int]
    loss: Sequence[float | None]


@dataclass(frozen=True)
class SampleSet:
    """Pictures drawn at one step; ``files`` in the order of the prompts, None where one is not there any more."""

    step: int
    label: str
    files: tuple[Path | None, ...]


@dataclass
class SavedFile:
    """A file or folder that the run wrote. ``state``: there, removed (by save_last_n_*), missing."""

    step: int
    name: str
    sha256: str | None
    state: str
    size: int | None = None


@dataclass
class RunData:
    """Everything a report shows of one run.

    Attributes:
        identity: the same for all reports of one run, resumed ones included.
        steps: every logged step, counted from 1.
        series: name -> a value for each of ``steps``; None where there is none.
        points: name -> values at some steps only.
        notes: what the reader of the report should know about how it was read.
        from_gradient_log: only a gradient log was there; what was skipped is then not on record.
    """

    name: str
    source: Path
    identity: str = ""
    ending: Ending = "open"
    reason: str = ""
    summary: str = ""
    final_file: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    total_steps: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    series: dict[str, list[float | None]] = field(default_factory=dict)
    points: dict[str, Points] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    findings: list[Mapping[str, Any]] = field(default_factory=list)
    blocks: list[BlockNorms] = field(default_factory=list)
    timesteps: list[TimestepLosses] = field(default_factory=list)
    samples: list[SampleSet] = field(default_factory=list)
    files: list[SavedFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    from_gradient_log: bool = False

    @property
    def last_step(self) -> int:
        """The last step that was logged, 0 where none was."""
        return self.steps[-1] if self.steps else 0

    def count(self, kind: str, reason: str | None = None) -> int:
        """Return how many marks of a kind there are."""
        return sum(mark.kind == kind and reason in (None, mark.reason) for mark in self.marks)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; NaN and infinity are the strings of the event log."""
        simple = {
            name: value
            for name, value in vars(self).items()
            if name not in ("points", "marks", "blocks", "timesteps", "samples", "files")
        }
        nested = {
            name: [vars(each) for each in getattr(self, name)]
            for name in ("marks", "blocks", "timesteps", "samples", "files")
        }
        points = {name: vars(each) for name, each in self.points.items()}
        made: dict[str, Any] = json_value({**simple, "points": points, **nested})
        return made

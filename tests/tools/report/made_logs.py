"""Event logs as a run writes them, made up: any length, with spikes and pictures where they are wanted."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from maulstick.options.check import DEFAULTS
from maulstick.train.events import json_value

BLOCKS = (*(f"IN{number:02}" for number in range(12)), "MID", *(f"OUT{number:02}" for number in range(12)))
START = 1_700_000_000.0
CLOSING_TAG = "</script><script>alert('x')</script>"


def start_event(total: int, **options: Any) -> dict[str, Any]:
    """Return what a run writes first, as far as a report reads it."""
    return {
        "event": "start",
        "time": START,
        "maulstick": "0.1.0",
        "torch": "2.13.0",
        "environment": {"python": "3.11.7", "device": "cpu"},
        "options": json_value({**DEFAULTS, "output_name": "made", **options}),
        "plan": {
            "model": "/models/small.safetensors",
            "family": "SD 1.x",
            "total_steps": total,
            "images": 12,
            "train_images": 120,
            "images_per_step": 2,
            "lr_scheduler": "cosine",
            "optimizer": "AdamW",
            "block_names": list(BLOCKS),
            "folders": [{"folder": "/data/10_cat", "images": 12, "captions": 11, "repeats": 10}],
            "findings": [
                {"severity": "warning", "code": "x", "paths": [f"/data/{CLOSING_TAG}.png"], "message": "no caption"}
            ],
            "seed": 7,
        },
    }


def step_event(step: int, total: int, draw: random.Random, **values: Any) -> dict[str, Any]:
    """Return one step of an ordinary run: the loss falls from 0.15 to 0.1, the norm lies around 0.2."""
    part = step / total
    return {
        "event": "step",
        "time": START + step,
        "train/steps": step,
        "epoch": step // 60,
        "loss/current": (0.15 - 0.05 * part) * math.exp(draw.gauss(0, 0.4)),
        "loss/average": 0.15 - 0.05 * part,
        "lr/unet": 1e-4 * 0.5 * (1 + math.cos(math.pi * part)),
        "lr/textencoder": 5e-5 * 0.5 * (1 + math.cos(math.pi * part)),
        "norm/grad": 0.2 * math.exp(draw.gauss(0, 0.2)),
        "norm/threshold": 1.2,
        "train/skipped_steps": 0.0,
        "seconds": 0.5 + 0.01 * draw.random(),
        **values,
    }


def skip_event(step: int, reason: str = "spike", text: str = "norm 9 is 45x the recent median 0.2") -> dict[str, Any]:
    return {"event": "skip", "time": START + step, "step": step, "reason": reason, "text": text, "images": ["/d/a.png"]}


def write_log(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as an event log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(json_value(dict(row))) + "\n" for row in rows), encoding="utf-8")
    return path


def long_run(
    folder: Path,
    steps: int,
    *,
    name: str = "made",
    spikes: Mapping[int, float] = {},
    nans: Collection[int] = (),
    marked: bool = True,
    ends: bool = True,
    detail_every: int = 50,
    **options: Any,
) -> Path:
    """Write the log of a run with spikes (step -> norm) and NaN losses; return it. ``marked``: they were skipped."""
    draw = random.Random(name)
    rows: list[dict[str, Any]] = [start_event(steps, **options)]
    for step in range(1, steps + 1):
        values: dict[str, Any] = {}
        if step in spikes:
            values = {"norm/grad": spikes[step], "loss/current": spikes[step]}
        if step in nans:
            values = {"norm/grad": math.nan, "loss/current": math.nan}
        rows.append(step_event(step, steps, draw, **values))
        if marked and step in spikes:
            rows.append(skip_event(step))
        if marked and step in nans:
            rows.append(skip_event(step, "nan", "the gradient is NaN in 3 of 384 tensors"))
        if step % detail_every == 0:
            rows += detail_events(step, draw)
    if ends:
        rows.append(
            {
                "event": "end",
                "time": START + steps + 1,
                "step": steps,
                "summary": "",
                "file": folder / f"{name}.safetensors",
            }
        )
    return write_log(folder / f"{name}.events.jsonl", rows)


def detail_events(step: int, draw: random.Random) -> list[dict[str, Any]]:
    gradient = {block: float(f"{0.01 * math.exp(draw.gauss(0, 1)):.6g}") for block in BLOCKS}
    weight = {block: float(f"{1e-4 * step * math.exp(draw.gauss(0, 0.1)):.6g}") for block in BLOCKS}
    losses = [float(f"{0.05 + 0.01 * place * draw.random():.6g}") for place in range(20)]
    return [
        {"event": "blocks", "time": START, "step": step, "gradient": gradient, "weight": weight, "weight_is": "change"},
        {"event": "timesteps", "time": START, "step": step, "width": 50, "count": [5] * 20, "loss": losses},
    ]


def add_samples(log: Path, at: Sequence[int], prompts: Sequence[str], *, side: int = 64) -> None:
    """Draw pictures of random pixels, the worst there are for a small file, and note them in the log before its end."""
    draw = random.Random(0)
    rows = log.read_text(encoding="utf-8").splitlines()
    (log.parent / "sample").mkdir(exist_ok=True)
    for step in at:
        files = []
        for place, prompt in enumerate(prompts):
            text = PngInfo()
            text.add_text("maulstick", json.dumps({"prompt": prompt}))
            file = log.parent / "sample" / f"made_step{step:08d}_{place:02d}.png"
            Image.frombytes("RGB", (side, side), draw.randbytes(3 * side * side)).save(file, pnginfo=text)
            files.append(str(file))
        rows.insert(-1, json.dumps({"event": "sample", "time": START, "step": step, "label": "x", "files": files}))
    log.write_text("\n".join(rows) + "\n", encoding="utf-8")

"""The situation of a report: an SD3 IP-Adapter that turns NaN by its rate or precision, and the same run kept alive.

The report's model had no norm of query and key, as ``sd3-plain`` here; its remedy was a linear warm-up over the first
tenth of the steps and a linear decay to 0. Here the rate is far too high for fp16 from the start, which fails in the
second step instead of the twenty-thousandth.
"""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import load_file

STEPS = 20
TOO_HIGH = ("--learning_rate", "10", "--mixed_precision", "fp16", "--max_train_steps", str(STEPS))
UNGUARDED = ("--grad_norm_mode", "off", "--no-rescue", "--no-alarms", "--no-autopsy", "--max_skipped_fraction", "1")
SCHEDULE = ("--lr_scheduler", "linear", "--lr_warmup_steps", "10%")
RESCUE = ("--rescue_after", "2", "--rescue_every", "2", "--rescue_lr_factor", "0.01")


def losses_and_events(run) -> tuple[list[float], list[dict], object]:
    """Train, and return the loss of every step, the events, and the result."""
    run.prepare()
    losses: list[float] = []
    step = run.loop._record

    def watched(done, extra, seconds):
        losses.append(done.loss)
        return step(done, extra, seconds)

    run.loop._record = watched
    result = run.train()
    lines = (run.options.run.output_dir / "last.events.jsonl").read_text().splitlines()
    return losses, [json.loads(line) for line in lines], result


def test_unguarded_it_is_nan_to_the_end(make_run) -> None:
    losses, _, _ = losses_and_events(make_run(*TOO_HIGH, *UNGUARDED, model="sd3-plain"))
    assert math.isfinite(losses[0])
    assert len(losses) == STEPS
    assert not any(math.isfinite(loss) for loss in losses[2:])


def test_with_schedule_guard_and_rescue_it_ends_finite_and_the_cause_is_named(make_run) -> None:
    run = make_run(*TOO_HIGH, *SCHEDULE, *RESCUE, "--ema_decay", "0.9", model="sd3-plain")
    losses, events, result = losses_and_events(run)
    assert result.exit_code == 0
    assert any(not math.isfinite(loss) for loss in losses)
    assert all(math.isfinite(loss) for loss in losses[-4:])
    assert losses[-1] < 2 * losses[0]
    assert all(torch.isfinite(tensor).all() for tensor in load_file(result.path).values())
    rescues = [event for event in events if event["event"] == "rescue"]
    assert rescues
    assert rescues[-1]["lr_scale"] <= 0.01
    reports = [event for event in events if event["event"] == "autopsy"]
    assert reports[0]["direction"] == "forward"
    assert {"resampler_overflow", "fp16_overflow"} & set(reports[0]["causes"])
    assert reports[0]["module"].startswith("transformer.image_proj")

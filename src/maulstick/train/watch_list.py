"""Which watchers a run has, in the order in which they see each window."""

from __future__ import annotations

from maulstick.train.alarms import AlarmWatcher
from maulstick.train.autopsy import AutopsyWatcher
from maulstick.train.details import DetailWatcher
from maulstick.train.epoch_loss import EpochLoss
from maulstick.train.loop_parts import LoopParts
from maulstick.train.rescue import RescueWatcher
from maulstick.train.skip_budget import SkipBudget
from maulstick.train.validation import ValidationWatcher
from maulstick.train.watchers import Watcher
from maulstick.train.worse_than_base import WorseThanBase, can_be_left_out


def build_watchers(parts: LoopParts) -> list[Watcher]:
    """Return the watchers that the options ask for.

    The rescue comes after all others: what is to be seen of a lost state must be seen before another one is in its
    place. Only the validation comes later, and measures the state that goes on.
    """
    rescued = parts.options.rescue.rescue
    average = [] if parts.average is None else [parts.average]
    budget = SkipBudget(parts.options.run.max_skipped_fraction, parts.total_steps, beside_rescue=rescued)
    watchers: list[Watcher] = [budget, *average, EpochLoss()]
    if parts.options.log.log_details_every_n_steps:
        watchers.append(DetailWatcher(parts.options.log.log_details_every_n_steps))
    if parts.options.run.alarms:
        watchers.append(AlarmWatcher(parts.total_steps))
    if parts.options.autopsy.autopsy and not parts.options.run.fsdp_base:
        watchers.append(AutopsyWatcher(parts))
    if rescued:
        rescue = RescueWatcher(parts, budget.forget)
        if can_be_left_out(parts.trainee):
            watchers.append(WorseThanBase(parts, rescue.begin_again))
        watchers.append(rescue)
    if parts.batches.index.held_back:
        watchers.append(ValidationWatcher(parts))
    return watchers

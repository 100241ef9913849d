"""One decision per step: a rule, plus what keeps a run from being stuck behind it. Pure Python, no torch."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from .policies import Judgement, Reason, SteadyPolicy, SteadyRule, WindowRule, make_policy
from .presets import GuardConfig

RECENT = 200
# How many ordinary steps in a row the compatible rules may lose only because the loss scale has grown.
MOST_LOST_TO_SCALE = 8


@dataclass(frozen=True)
class Evidence:
    """What was measured in one step, the same on every process.

    ``norm`` is in true units. ``scaled_norm`` is the norm as the backward pass left it (times the loss scale), with
    the overflow of an fp32 sum of squares. ``scale`` is None without a loss scale.
    """

    norm: float
    scaled_norm: float
    scale: float | None = None
    loss_is_finite: bool = True


@dataclass(frozen=True)
class Decision:
    """What to do with one step; see ``Verdict`` for the meaning of the fields."""

    skip: bool
    reason: Reason
    judged_norm: float
    threshold: float
    reference: float | None
    consecutive_skips: int
    escalate: bool
    lower_scale: bool
    alarms: tuple[str, ...]


class Judge:
    """Applies the rule of ``config`` to a stream of evidence and counts."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.policy = make_policy(config.rule)
        self.recent: deque[tuple[float, bool]] = deque(maxlen=RECENT)
        self.observed = 0
        self.skipped: Counter[str] = Counter()
        self.consecutive_skips = 0
        self.longest_streak = 0
        self.refused_in_a_row = 0
        self.non_finite_in_a_row = 0
        self.last_stuck_alarm = -config.most_refusals_in_a_row
        self.scale_watch = _ScaleWatch(config.rule) if isinstance(config.rule, WindowRule) else None

    def decide(self, evidence: Evidence) -> Decision:
        """Judge one step and remember it."""
        judged = evidence.scaled_norm if self.policy.judges_scaled else evidence.norm
        judgement = self.policy.judge(judged, evidence.loss_is_finite)
        alarms: list[str] = []
        escalate = self._note_non_finite(evidence, judgement, alarms)
        if math.isfinite(judged) and judgement.reason is not Reason.LOSS:
            judgement, stuck = self._note_finite(judged, judgement, alarms)
            escalate = escalate or stuck
        lower_scale = self.scale_watch is not None and self.scale_watch.should_lower(evidence, judgement)
        self._count(judgement)
        return Decision(
            skip=judgement.skip,
            reason=judgement.reason,
            judged_norm=judged,
            threshold=judgement.threshold,
            reference=judgement.reference,
            consecutive_skips=self.consecutive_skips,
            escalate=escalate,
            lower_scale=lower_scale,
            alarms=tuple(alarms),
        )

    def _note_non_finite(self, evidence: Evidence, judgement: Judgement, alarms: list[str]) -> bool:
        if math.isfinite(evidence.norm) and judgement.reason is not Reason.LOSS:
            self.non_finite_in_a_row = 0
            return False
        self.non_finite_in_a_row += 1
        limit = self.config.most_non_finite_in_a_row
        if not self.config.skips or self.non_finite_in_a_row < limit:
            return False
        if self.non_finite_in_a_row % limit == 0:
            alarms.append(
                f"{self.non_finite_in_a_row} steps in a row had a NaN or infinite gradient or loss: waiting will not "
                f"cure this; go back to a good checkpoint, or look for the first bad module, weight or image"
            )
        return True

    def _note_finite(self, judged: float, judgement: Judgement, alarms: list[str]) -> tuple[Judgement, bool]:
        self.recent.append((judged, judgement.skip))
        if not judgement.skip:
            self.refused_in_a_row = 0
            return judgement, False
        self.refused_in_a_row += 1
        in_a_row = self.refused_in_a_row > self.config.most_refusals_in_a_row
        refusals = sum(refused for _, refused in self.recent)
        if not in_a_row and refusals <= RECENT // 2:
            return judgement, False
        found = (
            f"{self.refused_in_a_row} norms in a row, {refusals} of the last {len(self.recent)}, were above the "
            f"threshold {judgement.threshold:.3g}"
        )
        if self.config.when_stuck == "hand_over":
            if self.observed - self.last_stuck_alarm >= self.config.most_refusals_in_a_row:
                self.last_stuck_alarm = self.observed
                alarms.append(
                    f"{found}: nothing is learned any more; lower the learning rate, go back to a good checkpoint, or "
                    f"use grad_norm_mode steady, which accepts a lasting new level"
                )
            return judgement, True
        alarms.append(f"{found}; they are taken as the new level from here on")
        norms = [norm for norm, _ in self.recent]
        self.policy.adapt(norms[-self.refused_in_a_row :] if in_a_row else norms)
        self.recent = deque(((norm, False) for norm in norms), maxlen=RECENT)
        self.refused_in_a_row = 0
        return Judgement(False, Reason.LEVEL_SHIFT, judgement.threshold, judgement.reference), False

    def _count(self, judgement: Judgement) -> None:
        self.observed += 1
        if judgement.skip:
            self.skipped[judgement.reason.value] += 1
            self.consecutive_skips += 1
            self.longest_streak = max(self.longest_streak, self.consecutive_skips)
        else:
            self.consecutive_skips = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decisions depend on, and the counters, as plain numbers, lists and dicts."""
        return {
            "policy": self.policy.state_dict(),
            "recent": [list(entry) for entry in self.recent],
            "observed": self.observed,
            "skipped": dict(self.skipped),
            "consecutive_skips": self.consecutive_skips,
            "longest_streak": self.longest_streak,
            "refused_in_a_row": self.refused_in_a_row,
            "non_finite_in_a_row": self.non_finite_in_a_row,
            "last_stuck_alarm": self.last_stuck_alarm,
            "scale_watch": None if self.scale_watch is None else self.scale_watch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where the judge that gave ``state`` stood. It must have had the same kind of rule."""
        self.policy.load_state_dict(state["policy"])
        self.recent = deque(((float(norm), bool(refused)) for norm, refused in state["recent"]), maxlen=RECENT)
        self.observed = state["observed"]
        self.skipped = Counter(state["skipped"])
        self.consecutive_skips = state["consecutive_skips"]
        self.longest_streak = state["longest_streak"]
        self.refused_in_a_row = state["refused_in_a_row"]
        self.non_finite_in_a_row = state["non_finite_in_a_row"]
        self.last_stuck_alarm = state["last_stuck_alarm"]
        if self.scale_watch is not None:
            self.scale_watch.load_state_dict(state["scale_watch"])


class _ScaleWatch:
    """Notices when a fixed limit on scaled norms refuses steps that are ordinary in true units.

    The scale grows while steps look clean, and the cap then refuses every step for ever. Only lowering the scale
    helps; the rule itself must stay as it is. A limit computed from the window is left alone: it follows the scale.
    """

    def __init__(self, rule: WindowRule) -> None:
        self.fixed_limits = (rule.cap, rule.initial_threshold)
        self.recent = SteadyPolicy(SteadyRule())
        self.lost_in_a_row = 0

    def should_lower(self, evidence: Evidence, judgement: Judgement) -> bool:
        if evidence.scale is None or not math.isfinite(evidence.norm) or evidence.norm <= 0:
            return False
        log_norm = math.log(evidence.norm)
        if not judgement.skip:
            self.lost_in_a_row = 0
        elif (
            judgement.threshold in self.fixed_limits
            and evidence.scale > 1
            and log_norm <= self.recent.log_threshold()[0]
        ):
            self.lost_in_a_row += 1
        # Refused norms are remembered too: what lasts is ordinary.
        self.recent.logs.append(log_norm)
        if self.lost_in_a_row < MOST_LOST_TO_SCALE:
            return False
        self.lost_in_a_row = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self.recent.state_dict(), "lost_in_a_row": self.lost_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent.load_state_dict(state["recent"])
        self.lost_in_a_row = state["lost_in_a_row"]

"""Pre-flight: learning rates, alpha and rank that do not fit the optimizer or the length of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maulstick.data.findings import Finding, Severity
from maulstick.errors import OptionError
from maulstick.options.values import parse_arguments
from maulstick.train.optim import resolve_optimizer
from maulstick.train.prepare import Prepared
from maulstick.train.schedule_glance import schedule_glance


@dataclass(frozen=True)
class UsualRates:
    """Learning rates that LoRA is trained with under one kind of optimizer.

    Attributes:
        least, most: outside of these something is surely wrong.
        usual: what people use, in words.
        why_low, why_high: what a rate outside does.
        moves_by_rate: a step moves each weight by about the learning rate, whatever the gradient's size.
    """

    least: float
    most: float
    usual: str
    why_low: str = ""
    why_high: str = "A step moves every weight by about the learning rate, so a few steps ruin the LoRA."
    moves_by_rate: bool = True


_ADAM = UsualRates(0.0, 1e-2, "1e-5 to 5e-3")
_LION = UsualRates(
    0.0,
    2e-3,
    "1e-6 to 5e-4, a third to a tenth of AdamW's",
    why_high="Lion moves every weight by the full learning rate in each step, more than AdamW does.",
)
_ADAFACTOR = UsualRates(
    1e-3,
    1.0,
    "1e-2 to 1e-1",
    # With scale_parameter: step = rate * max(eps[1], RMS of the weight); up factors start at zero, so eps[1] counts.
    why_low="Adafactor multiplies the rate by the weight's own size, which is 0.001 for a LoRA that starts at zero: a "
    "thousandth of the rate is what a step moves. optimizer_args scale_parameter=False takes the rate as it is.",
    moves_by_rate=False,
)
_FINDS_ITS_OWN = UsualRates(
    0.1,
    5.0,
    "1",
    why_low="It finds the step size itself and multiplies it by the learning rate: a rate made for AdamW stops it.",
    why_high="It finds the step size by itself and multiplies it by the learning rate.",
    moves_by_rate=False,
)
_SGD = UsualRates(0.0, 100.0, "0.01 to 10", why_high="Gradients are multiplied by it as they are.", moves_by_rate=False)

USUAL_RATES: Mapping[str, UsualRates] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "AdamW8bit": _ADAM,
    "PagedAdamW8bit": _ADAM,
    "AdamWScheduleFree": _ADAM,
    "CAME": _ADAM,
    "Lion": _LION,
    "Lion8bit": _LION,
    "Adafactor": _ADAFACTOR,
    "Prodigy": _FINDS_ITS_OWN,
    "ProdigyPlusScheduleFree": _FINDS_ITS_OWN,
    "DAdaptAdam": _FINDS_ITS_OWN,
    "SGD": _SGD,
    "SGDNesterov": _SGD,
}
"""By the optimizer's name in the registry; those given by class path are not judged."""

PRODUCTS = ("lora", "dora")
"""Network types whose change is alpha / rank * up @ down; of the others alpha, or the rate, means something else."""
MOST_SCALE = 4.0
"""alpha / rank above this makes a learning rate mean something else than everywhere it is written about."""
LEAST_REACH = 1e-3
"""Largest possible change of a weight over the run, relative to its size, below which nothing will be seen."""


def usual_rates(prepared: Prepared) -> tuple[str, UsualRates | None]:
    """Return the optimizer's name and what is usual with it, None where nothing is known."""
    try:
        name, _ = resolve_optimizer(prepared.options.optimizer.optimizer_type)
    except OptionError:
        return prepared.options.optimizer.optimizer_type, None
    arguments = parse_arguments(prepared.options.optimizer.optimizer_args, "optimizer_args")
    if name == "Adafactor" and arguments.get("scale_parameter") is False:
        return name, _ADAM
    return name, USUAL_RATES.get(name)


def rates_that_do_not_fit(prepared: Prepared) -> list[Finding]:
    """Find groups whose learning rate is far outside of what the optimizer wants."""
    name, usual = usual_rates(prepared)
    if usual is None:
        return []
    groups = {group: rate for component in prepared.plan.components for group, rate in component.groups.items()}
    # A block may be meant to learn next to nothing; a whole network may not.
    low = {part.log_name: part.learning_rate for part in prepared.plan.components if part.learning_rate < usual.least}
    high = {group: rate for group, rate in groups.items() if rate > usual.most}
    findings = []
    for outside, word, why in ((low, "low", usual.why_low), (high, "high", usual.why_high)):
        if outside:
            findings.append(
                _finding(
                    f"learning_rate_too_{word}",
                    f"The learning rate of {_listed(outside)} is far too {word} for {name}.",
                    why,
                    f"Set learning_rate (or unet_lr, text_encoder_lr) to {usual.usual}; or choose the optimizer that "
                    f"the rate was meant for.",
                )
            )
    return findings


def scale_too_large(prepared: Prepared) -> list[Finding]:
    """Find alpha far above the rank, and rates that only alpha / rank makes too high."""
    _, usual = usual_rates(prepared)
    findings: list[Finding] = []
    if prepared.options.network.network_type not in PRODUCTS:
        return findings
    for component, targets in prepared.targets.items():
        largest = max(targets, key=lambda target: target.alpha / target.dim)
        scale = largest.alpha / largest.dim
        if scale <= MOST_SCALE:
            continue
        rate = prepared.rates[component].group_of(largest, "up")[1]
        why = f"What is learned is multiplied by alpha / rank = {scale:g}"
        if usual is not None and usual.moves_by_rate:
            why += f", so the learning rate {rate:g} acts like {rate * scale:g} at the usual scale 1"
        findings.append(
            _finding(
                "scale_too_large",
                f"{component}: alpha {largest.alpha:g} at rank {largest.dim} is unusual.",
                f"{why}.",
                f"Set network_alpha (conv_alpha, block_alphas) to the rank ({largest.dim}) or below.",
            )
        )
    return findings


def learns_nothing(prepared: Prepared) -> list[Finding]:
    """Find networks whose weights cannot change enough in the whole run to be seen.

    An Adam-like optimizer moves a weight by at most about its rate in a step. With ``S`` the sum of the rates, an
    element of the change is at most ``alpha / rank * rank * S * mean |down|``; ``down`` starts uniform in
    ±1/sqrt(fan-in), and a base weight is of the size 1/sqrt(fan-in) too, so ``alpha * S`` bounds the relative change
    to within a factor of about one.
    """
    _, usual = usual_rates(prepared)
    if usual is None or not usual.moves_by_rate or prepared.options.network.network_type not in PRODUCTS:
        return []
    steps = schedule_glance(prepared).factor_sum
    findings = []
    for component, targets in prepared.targets.items():
        rates = prepared.rates[component]
        reach = max(target.alpha * rates.group_of(target, "up")[1] * steps for target in targets)
        if reach < LEAST_REACH:
            findings.append(
                _finding(
                    "learns_nothing",
                    f"{component}: its weights can change by about {reach:.1g} of their size at most in the whole run.",
                    f"That is alpha times the sum of the learning rates of all {prepared.plan.total_steps} steps; "
                    f"below {LEAST_REACH:g} no picture changes visibly.",
                    "Raise the learning rate or network_alpha (network_alpha = network_dim is a good start), or train "
                    "for more steps.",
                )
            )
    return findings


def _listed(rates: Mapping[str, float]) -> str:
    if len(rates) > 4:
        worst = max(rates, key=lambda group: rates[group])
        return f"{len(rates)} groups (such as {worst}: {rates[worst]:g})"
    return ", ".join(f"{group} ({rate:g})" for group, rate in rates.items())


def _finding(code: str, what: str, why: str, advice: str) -> Finding:
    return Finding(Severity.WARNING, code, (), what, why, advice)

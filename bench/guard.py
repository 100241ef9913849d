"""What the guard costs and what its rule is worth: ``python -m bench.guard [cost] [rules]`` prints Markdown.

Costs are ratios within one run, so that a busy machine moves all of them. Rules are compared on seeded synthetic
streams of gradient norms; the other rules are re-expressed from their published formulas.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from maulstick.guard.judge import Evidence, Judge
from maulstick.guard.policies import MAD_TO_DEVIATION, median
from maulstick.guard.presets import preset

Rule = Callable[[float], bool]

TENSORS, ELEMENTS, THREADS = 1134, 9_074_688, 2
SPIKE_PLACES = range(505, 700, 13)
BURST = range(500, 540)
SHIFT_AT = 600


# --- the rules: each takes a norm in true units and says whether the step is skipped (or, for ZClip, clipped) ---


def guard_rule(name: str, scale: float | None = None) -> Rule:
    """One of our presets; the compatible ones see the norm multiplied by ``scale``."""
    judge = Judge(preset(name))
    return lambda norm: judge.decide(Evidence(norm, norm * (scale or 1.0), scale)).skip


def issue_rule() -> Rule:
    """Median and MAD of log norms, k = 6, floor 0.05 on the deviation, refused norms entered at the threshold."""
    logs: deque[float] = deque(maxlen=200)

    def judge(norm: float) -> bool:
        if not math.isfinite(norm):
            return True
        threshold = math.inf
        if len(logs) >= 20:
            middle = median(logs)
            deviation = MAD_TO_DEVIATION * median([abs(value - middle) for value in logs])
            threshold = middle + 6 * max(deviation, 0.05)
        logs.append(min(math.log(norm), threshold))
        return math.log(norm) > threshold

    return judge


def olmo_rule() -> Rule:
    """Skip above mean + 6 standard deviations of the last 128 norms (the judged one excluded), from 64 norms on."""
    norms: deque[float] = deque(maxlen=128)

    def judge(norm: float) -> bool:
        skip = False
        if len(norms) >= 64:
            mean = sum(norms) / len(norms)
            variance = sum((each - mean) ** 2 for each in norms) / (len(norms) - 1)
            skip = not norm <= mean + 6 * math.sqrt(variance)
        norms.append(norm)
        return skip

    return judge


@dataclass
class ZClip:
    """z = (norm - m) / s with m, s² moving averages (0.97); above 2.5 the norm is clipped to m + 2.5 s / (z / 2.5)."""

    warm_up: list[float] = field(default_factory=list)
    mean: float = math.nan
    variance: float = math.nan

    def __call__(self, norm: float) -> bool:
        if len(self.warm_up) < 25:
            self.warm_up.append(norm)
            self.mean = sum(self.warm_up) / len(self.warm_up)
            self.variance = sum((each - self.mean) ** 2 for each in self.warm_up) / len(self.warm_up)
            return False
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + 1e-6)
        clipped = self.mean + 2.5 * deviation / (z / 2.5) if z > 2.5 else norm
        self.mean = 0.97 * self.mean + 0.03 * clipped
        self.variance = 0.97 * self.variance + 0.03 * (clipped - self.mean) ** 2
        return z > 2.5


RULES: dict[str, Callable[[], Rule]] = {
    "steady (ours)": lambda: guard_rule("steady"),
    "log median + 6 MAD, winsorised": issue_rule,
    "stable, scale 2^16": lambda: guard_rule("stable", 65536.0),
    "gamble, scale 2^16": lambda: guard_rule("gamble", 65536.0),
    "stable, bf16": lambda: guard_rule("stable"),
    "OLMo mean + 6 sd": olmo_rule,
    "ZClip z > 2.5": ZClip,
}


# --- the streams: log-normal norms around 0.05 ---


def stream(seed: int, sigma: float, length: int) -> list[float]:
    """Norms of a healthy run."""
    source = random.Random(seed)
    return [0.05 * math.exp(sigma * source.gauss(0, 1)) for _ in range(length)]


def skipped(make: Callable[[], Rule], norms: Sequence[float]) -> list[int]:
    """The places that a fresh rule skips."""
    rule = make()
    return [place for place, norm in enumerate(norms) if rule(norm)]


def healthy_share(make: Callable[[], Rule], sigma: float, seeds: int = 10, length: int = 2400) -> float:
    """Share of the steps of healthy runs that are skipped."""
    return sum(len(skipped(make, stream(seed, sigma, length))) for seed in range(seeds)) / (seeds * length)


def spikes_after_spike(make: Callable[[], Rule], sigma: float, seeds: int = 10) -> float:
    """Share of 30x spikes caught in the 200 steps after a spike of 10,000x."""
    caught = 0
    for seed in range(100, 100 + seeds):
        norms = stream(seed, sigma, 720)
        norms[500] *= 1e4
        for place in SPIKE_PLACES:
            norms[place] *= 30
        caught += len(set(skipped(make, norms)) & set(SPIKE_PLACES))
    return caught / (seeds * len(SPIKE_PLACES))


def burst(make: Callable[[], Rule], sigma: float, seeds: int = 10) -> float:
    """How many steps of a burst of 40 at 50x are caught, on average."""
    caught = 0
    for seed in range(200, 200 + seeds):
        norms = [norm * 50 if place in BURST else norm for place, norm in enumerate(stream(seed, sigma, 600))]
        caught += len(set(skipped(make, norms)) & set(BURST))
    return caught / seeds


def level_shift(make: Callable[[], Rule], factor: float, sigma: float, seeds: int = 10) -> tuple[float, int]:
    """Steps lost after a lasting change by ``factor`` (mean), and how long until the last of them (worst)."""
    lost, last = 0, 0
    for seed in range(300, 300 + seeds):
        norms = [norm * factor if i >= SHIFT_AT else norm for i, norm in enumerate(stream(seed, sigma, 2400))]
        late = [place for place in skipped(make, norms) if place >= SHIFT_AT]
        lost += len(late)
        last = max([last, *[place - SHIFT_AT + 1 for place in late]])
    return lost / seeds, last


def early_spikes(make: Callable[[], Rule], sigma: float, seeds: int = 10) -> float:
    """Share of 30x spikes caught at steps 20, 24, 30, 40 and 60 of a run."""
    places = (20, 24, 30, 40, 60)
    caught = 0
    for seed in range(400, 400 + seeds):
        norms = [norm * 30 if place in places else norm for place, norm in enumerate(stream(seed, sigma, 100))]
        caught += len(set(skipped(make, norms)) & set(places))
    return caught / (seeds * len(places))


def after_nan(make: Callable[[], Rule], sigma: float, seeds: int = 10) -> float:
    """Healthy steps of the 300 after a single NaN that are skipped, plus 30x spikes among them let through (mean)."""
    wrong = 0
    for seed in range(500, 500 + seeds):
        norms = stream(seed, sigma, 800)
        norms[500] = math.nan
        spikes = set(range(510, 800, 29))
        norms = [norm * 30 if place in spikes else norm for place, norm in enumerate(norms)]
        wrong += len(spikes ^ {place for place in skipped(make, norms) if place > 500})
    return wrong / seeds


def rule_table() -> str:
    """The comparison as a Markdown table."""
    titles = ["rule", "healthy skipped, σ .3 / .5 / .8", "30x after 10,000x, σ .3 / .5", "40-step burst, σ .3 / .5"]
    titles += ["x5 shift: lost", "x100 shift: lost (last)", "30x at steps 20-60", "wrong after a NaN"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for name, make in RULES.items():
        lost5, _ = level_shift(make, 5, 0.3)
        lost100, last100 = level_shift(make, 100, 0.3)
        cells = [
            name,
            " / ".join(f"{healthy_share(make, sigma):.2%}" for sigma in (0.3, 0.5, 0.8)),
            " / ".join(f"{spikes_after_spike(make, sigma):.0%}" for sigma in (0.3, 0.5)),
            " / ".join(f"{burst(make, sigma):.1f}" for sigma in (0.3, 0.5)),
            f"{lost5:.1f}",
            f"{lost100:.1f} ({last100})",
            f"{early_spikes(make, 0.3):.0%}",
            f"{after_nan(make, 0.3):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- the cost ---


def tensor_sizes() -> list[int]:
    """1,134 sizes as LoRA factors have them, 9,074,688 elements in all."""
    cycle = (2560, 5120, 5120, 8192, 10240, 16384)
    sizes = [cycle[i % len(cycle)] for i in range(TENSORS - 1)]
    return [*sizes, ELEMENTS - sum(sizes)]


def timed(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each case; the cases take turns, in another order every round."""
    order, source = list(cases), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        source.shuffle(order)
        for name in order:
            start = time.perf_counter()
            cases[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def cost_table(rounds: int = 41) -> str:
    """What one observation costs, as ratios to ``clip_grad_norm_``."""
    import torch

    from maulstick.guard import GradientGuard, unscaled_from

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in tensor_sizes()]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    half = TENSORS // 2
    optimizer = torch.optim.AdamW(
        [{"params": parameters[:half], "name": "early"}, {"params": parameters[half:], "name": "late"}], lr=0.0
    )
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat(gradients)
    loss = torch.tensor(0.1)
    guards = {
        "steady": GradientGuard.from_preset("steady"),
        "stable": GradientGuard.from_preset("stable", cosine="off"),
        "exact": GradientGuard.from_preset("steady", cosine="exact"),
        "sampled": GradientGuard.from_preset("steady", cosine="sampled"),
    }

    def observe(mode: str) -> float:
        verdict = guards[mode].observe(optimizer, loss=loss, scale=unscaled_from(65536.0))
        return verdict.clip_coefficient(1.0)

    def observe_and_clip() -> None:
        torch._foreach_mul_(gradients, max(observe("steady"), 1.0))

    def original_loop() -> float:
        total = torch.zeros(())
        for gradient in gradients:
            total = total + (gradient * gradient).sum()
        return total.sqrt().item()

    names = {
        "ours: observe (norm, 2 groups, non-finite check, verdict, clip coefficient)": lambda: observe("steady"),
        "ours: the same in mode stable, without cosine": lambda: observe("stable"),
        "ours: observe, then multiply every gradient (only needed when clipping)": observe_and_clip,
        "ours: observe with sampled cosine": lambda: observe("sampled"),
        "ours: observe with exact cosine": lambda: observe("exact"),
        "the original's loop, norm only": original_loop,
        "torch.nn.utils.clip_grad_norm_ (norm, always multiplies; no groups, no check)": lambda: (
            torch.nn.utils.clip_grad_norm_(parameters, 1e9)
        ),
        "floor: read every gradient once (flat sum)": lambda: flat.sum().item(),
        "for scale: AdamW step": optimizer.step,
    }
    for _ in range(25):
        observe("steady")
    timed(names, 3)
    seconds = timed(names, rounds)
    reference = next(value for name, value in seconds.items() if "clip_grad_norm_" in name)
    lines = ["| what | ms | ratio to clip_grad_norm_ |", "|---|---|---|"]
    lines += [f"| {name} | {value * 1e3:.2f} | {value / reference:.2f} |" for name, value in seconds.items()]
    return "\n".join(lines)


def step_share(steps: int = 7) -> str:
    """Share of one observation in a training step of a LoRA on a UNet of the quickstart model's sizes."""
    import torch
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig

    from maulstick.guard import GradientGuard

    torch.set_num_threads(THREADS)
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(48, 64, 96, 96),
        cross_attention_dim=128,
        norm_num_groups=8,
        attention_head_dim=4,
    )
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    guard = GradientGuard.from_preset("steady")
    latents, text = torch.randn(8, 4, 16, 16), torch.randn(8, 77, 128)

    def backward() -> None:
        optimizer.zero_grad()
        unet(latents, torch.full((8,), 500), text).sample.square().mean().backward()

    backward()
    cases = {
        "step": lambda: (backward(), optimizer.step()),
        "observe": lambda: guard.observe(optimizer, loss=0.1).clip_coefficient(1.0),
    }
    timed(cases, 2)
    seconds = timed(cases, steps)
    return (
        f"Training step of the quickstart model (batch 8, rank 8, {len(trained)} tensors, "
        f"{sum(each.numel() for each in trained):,} elements): {seconds['step'] * 1e3:.0f} ms; one observation "
        f"{seconds['observe'] * 1e3:.2f} ms, {seconds['observe'] / seconds['step']:.2%} of it."
    )


def main(wanted: Sequence[str]) -> None:
    """Print the tables asked for, all of them by default."""
    if not wanted or "cost" in wanted:
        print(f"One observation of {TENSORS:,} tensors with {ELEMENTS:,} fp32 elements, {THREADS} threads\n")
        print(cost_table() + "\n\n" + step_share() + "\n")
    if not wanted or "rules" in wanted:
        print("Rules on synthetic log-normal streams (10 seeds each)\n")
        print(rule_table())


if __name__ == "__main__":
    main(sys.argv[1:])

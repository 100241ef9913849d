"""What training some blocks only costs, in counted operations of a whole step: nothing is computed without need."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bench.block_rates import CONFIGURATIONS, SHARES, Configuration, PeakBytes, attention_operations
from tests.models import small_model

PARTS = ("down_blocks.0", "down_blocks.1", "down_blocks.2", "down_blocks.3", "mid_block")
PARTS += ("up_blocks.0", "up_blocks.1", "up_blocks.2", "up_blocks.3")
PATH_OF = dict(zip(SHARES, PARTS, strict=True))
EVERY, *SOME = CONFIGURATIONS


def counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=attention_operations())


@pytest.fixture(scope="module")
def shares() -> dict[str, float]:
    """Share of each block in the forward pass of the small UNet without LoRA, at the latents of the runs below."""
    unet = small_model().unet
    with torch.no_grad(), counter() as counted:
        unet(torch.zeros(2, 4, 8, 8), torch.tensor([1, 2]), torch.zeros(2, 77, unet.config.cross_attention_dim))
    operations = {path: sum(found.values()) for path, found in counted.get_flop_counts().items()}
    whole = counted.get_total_flops()
    return {name: operations.get(f"UNet2DConditionModel.{path}", 0) / whole for name, path in PATH_OF.items()}


@pytest.fixture
def operations(make_run):
    """Return a function that counts the operations of one step of a run."""

    def count(configuration: Configuration, *, checkpointing: bool) -> int:
        switches = ["--network_train_unet_only", "--cache_latents", "--cache_text_encoder_outputs"]
        switches += ["--gradient_checkpointing"] if checkpointing else []
        run = make_run(*switches, *configuration.arguments, "--max_train_steps", "1", version="sd1")
        run.prepare()
        with counter() as counted:
            run.train()
        return counted.get_total_flops()

    return count


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_costs_no_more_than_the_shares_of_the_blocks_allow(operations, shares, checkpointing):
    """One forward pass, and one (checkpointed: two) more of what lies behind the first trained block."""
    assert sum(shares.values()) == pytest.approx(1, abs=0.02)
    passes = 2 if checkpointing else 1
    every = operations(EVERY, checkpointing=checkpointing)
    for configuration in SOME:
        behind = sum(list(shares.values())[list(shares).index(configuration.first) :])
        limit = (1 + passes) / (1 + passes * behind)
        assert every / operations(configuration, checkpointing=checkpointing) >= 0.95 * limit, configuration.name


def test_the_limits_are_those_of_the_shares():
    limits = {c.name: (c.limit(checkpointing=False), c.limit(checkpointing=True)) for c in CONFIGURATIONS}
    assert limits["all blocks"] == limits["cosine / 0 / sine"] == (1, 1)
    assert limits["up only"] == pytest.approx((1.19, 1.28), abs=0.005)
    assert limits["up.6-11 only"] == pytest.approx((1.38, 1.57), abs=0.005)
    assert limits["up.9-11 only"] == pytest.approx((1.605, 2.01), abs=0.005)


def test_attention_is_counted_on_a_cpu():
    """Two matrix products forward, five backward (the scores are computed again)."""
    states = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]
    product = 2 * 2 * 16 * 16 * 8
    with counter() as forward:
        result = F.scaled_dot_product_attention(*states)
    with counter() as backward:
        result.sum().backward()
    assert forward.get_total_flops() == 2 * product
    assert backward.get_total_flops() == 5 * product


def test_the_peak_is_the_most_that_is_alive_at_once():
    with PeakBytes() as memory:
        first = torch.zeros(1000)
        first.view(10, 100).add_(1)
        assert memory.now == 4000
        second = first + 1
        del first
        third = torch.cat([second, second, second])
        assert (memory.now, memory.most) == (16000, 16000)
        del second, third
        torch.zeros(10)
    assert (memory.now, memory.most) == (0, 16000)

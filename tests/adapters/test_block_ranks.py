"""Ranks and alphas by block."""

from __future__ import annotations

import pytest

from maulstick.adapters.block_ranks import BlockRank, parse_block_ranks
from maulstick.adapters.blocks import SD_BLOCKS, SDXL_BLOCKS
from maulstick.errors import OptionError

COUNTING = ",".join(map(str, range(25)))


def test_without_anything_by_block_there_is_nothing():
    assert parse_block_ranks(SD_BLOCKS, network_dim=8, conv_dim=4) is None


def test_what_is_not_given_by_block_comes_from_the_whole():
    ranks = parse_block_ranks(SD_BLOCKS, block_dims=COUNTING, network_alpha=3.0, conv_dim=2, conv_alpha=0.5)
    assert ranks == {index: BlockRank(index, 3.0, 2, 0.5) for index in range(25)}
    ranks = parse_block_ranks(SD_BLOCKS, block_alphas=COUNTING, network_dim=8)
    assert ranks == {index: BlockRank(8, float(index), 0, 1.0) for index in range(25)}


def test_convolutions_have_lists_of_their_own():
    ranks = parse_block_ranks(
        SDXL_BLOCKS, conv_block_dims=[*range(23)], conv_block_alphas="0.5", network_dim=8, network_alpha=4.0, conv_dim=9
    )
    assert ranks == {index: BlockRank(8, 4.0, index, 0.5) for index in range(23)}
    assert parse_block_ranks(SDXL_BLOCKS, conv_block_dims=2)[3] == BlockRank(4, 1.0, 2, 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"block_dims": "1,2,3"},
            r"block_dims has 3 values, but there are 25 blocks \(IN00 to OUT11\). Expected 25 num",
        ),
        ({"block_dims": [1] * 26}, "block_dims has 26 values"),
        ({"block_dims": COUNTING.replace("7", "7.5", 1)}, r"block_dims: 7\.5 is no rank; expected whole numbers"),
        ({"block_dims": COUNTING.replace("7", "-7", 1)}, "block_dims: '-7' is not a number of 0 or more"),
        ({"block_dims": "sine"}, "block_dims: 'sine' is not a number of 0 or more"),
        ({"block_dims": "4", "block_alphas": "1,1"}, "block_alphas has 2 values"),
        ({"conv_block_dims": "1e999"}, "conv_block_dims: '1e999' is not a number"),
        ({"conv_block_alphas": "1"}, "conv_block_alphas is given without conv_block_dims"),
    ],
)
def test_what_cannot_be_meant_is_named(given, message):
    with pytest.raises(OptionError, match=message):
        parse_block_ranks(SD_BLOCKS, **given)

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maulstick.data.batches import BatchSchedule
from maulstick.data.buckets import centre_placement
from maulstick.data.index import build_index
from maulstick.data.records import DatasetIndex, ImageRecord, IndexedDataset, balance_regularisation
from maulstick.data.summary import (
    bucket_counts,
    bucket_info,
    dataset_dirs,
    datasets_metadata,
    summarize,
    tag_frequency,
)
from maulstick.options.dataset_config import DatasetSpec, SubsetSpec, dataset_specs
from maulstick.options.schema import DatasetOptions

BUCKETS = [(64, 64), (48, 80), (80, 48)]


def made_index(*datasets: tuple[int, list[tuple[int, int, bool]]], **subset_options) -> DatasetIndex:
    """Make an index of datasets, each a batch size and images as (repeats, bucket number, is_reg)."""
    indexed, record_id = [], 0
    for number, (batch_size, images) in enumerate(datasets):
        records = []
        for repeats, bucket, is_reg in images:
            subset = SubsetSpec(image_dir=Path("cat"), num_repeats=repeats, is_reg=is_reg, **subset_options)
            records.append(
                ImageRecord(
                    record_id=record_id,
                    path=Path(f"cat/{record_id}.png"),
                    captions=("a, b, c, d, e",),
                    caption_file=None,
                    size=BUCKETS[bucket],
                    repeats=repeats,
                    subset=subset,
                    dataset=number,
                    content_hash=f"{record_id:064x}",
                    placement=centre_placement(BUCKETS[bucket], BUCKETS[bucket]),
                )
            )
            record_id += 1
        spec = DatasetSpec(subsets=(), resolution=(64, 64), batch_size=batch_size, prior_loss_weight=0.5)
        indexed.append(IndexedDataset(spec, balance_regularisation(records)))
    return DatasetIndex(tuple(indexed), ())


images = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 2), st.booleans()), min_size=1, max_size=8)
datasets = st.lists(st.tuples(st.integers(1, 5), images), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(datasets, st.integers(0, 2**32), st.integers(0, 5), st.integers(1, 4))
def test_an_epoch_has_every_image_as_often_as_it_is_repeated(described, seed, epoch, world):
    index = made_index(*described)
    if not index.records:
        return
    schedules = [BatchSchedule(index, seed, rank=rank, world=world) for rank in range(world)]
    batches = [list(schedule.epoch(epoch)) for schedule in schedules]
    # All processes have the same number of batches.
    assert {len(own) for own in batches} == {schedules[0].batches_per_epoch}
    in_turn = [own[number] for number in range(len(batches[0])) for own in batches]
    total = schedules[0].batches_in_all
    assert len(in_turn) == math.ceil(total / world) * world
    # What fills the last round up is the beginning of the epoch again, item for item.
    for place, batch in enumerate(in_turn):
        assert batch.items == in_turn[place % total].items
    whole = in_turn[:total]
    counts = Counter(item.record.record_id for batch in whole for item in batch.items)
    assert counts == {record.record_id: record.repeats for record in index.records}
    assert [item.position for batch in whole for item in batch.items] == list(range(schedules[0].images_per_epoch))
    expected_batches = 0
    for number, dataset in enumerate(index.datasets):
        for count in bucket_counts(dataset).values():
            expected_batches += math.ceil(count / dataset.spec.batch_size)
        sizes = [len(batch.items) for batch in whole if batch.items[0].record.dataset == number]
        assert max(sizes, default=0) <= dataset.spec.batch_size
    assert total == expected_batches
    for batch in whole:
        assert {item.bucket for item in batch.items} == {batch.bucket}
        assert len({item.record.dataset for item in batch.items}) == 1


def test_counts_by_hand():
    # Bucket 0: 10 + 3 = 13 images in batches of 4 -> 4; bucket 1: 5 -> 2; the other dataset: 3 in batches of 2 -> 2.
    index = made_index((4, [(10, 0, False), (3, 0, False), (5, 1, False)]), (2, [(3, 0, False)]))
    schedule = BatchSchedule(index, 0)
    assert (schedule.batches_in_all, schedule.batches_per_epoch, schedule.images_per_epoch) == (8, 8, 21)
    assert BatchSchedule(index, 0, world=3).batches_per_epoch == 3
    sizes = sorted(len(batch.items) for batch in schedule.epoch(0))
    assert sizes == [1, 1, 1, 2, 4, 4, 4, 4]


def test_order_is_a_function_of_seed_and_epoch_and_nothing_else():
    index = made_index((2, [(3, 0, False)] * 6), flip_aug=True, shuffle_caption=True, caption_dropout_rate=0.2)
    schedule = BatchSchedule(index, 7)
    first = list(schedule.epoch(0))
    second = list(schedule.epoch(1))
    assert first != second
    assert [item.record for batch in first for item in batch.items] != [
        item.record for batch in second for item in batch.items
    ]
    assert list(schedule.epoch(0)) == first
    assert list(BatchSchedule(index, 7).epoch(1)) == second
    assert list(BatchSchedule(index, 8).epoch(0)) != first
    # Resuming in the middle needs the position only.
    assert list(BatchSchedule(index, 7).epoch(1, start=4)) == second[4:]
    assert BatchSchedule(index, 7).batch(1, 5) == second[5]
    with pytest.raises(IndexError, match="an epoch has 9 micro-batches; there is no number 9"):
        schedule.batch(0, 9)


def test_buckets_and_datasets_are_mixed():
    index = made_index((1, [(10, 0, False), (10, 1, False)]), (1, [(10, 0, False)]))
    orders = set()
    for epoch in range(3):
        order = tuple(batch.items[0].record.record_id for batch in BatchSchedule(index, 0).epoch(epoch))
        assert sorted(order) == [0] * 10 + [1] * 10 + [2] * 10
        # Sorted by bucket there would be 2 changes; of 29 neighbours in random order, 20 differ on average.
        assert sum(one != other for one, other in pairwise(order)) > 10
        orders.add(order)
    assert len(orders) == 3


def test_draws_are_even_and_unrelated():
    index = made_index((4, [(200, 0, False)]), flip_aug=True, shuffle_caption=True, caption_dropout_rate=0.25)
    items = [item for epoch in range(5) for batch in BatchSchedule(index, 3).epoch(epoch) for item in batch.items]
    assert len(items) == 1000
    assert 430 < sum(item.flipped for item in items) < 570
    assert 200 < sum(item.caption == "" for item in items) < 300
    first_tags = Counter(item.caption[0] for item in items if item.caption)
    assert set(first_tags) == set("abcde")
    assert min(first_tags.values()) > 110
    neighbours = sum(one.flipped == other.flipped for one, other in pairwise(items))
    assert 430 < neighbours < 570


def test_regularisation_images_weigh_less():
    index = made_index((2, [(4, 0, False), (1, 0, True)]))
    items = [item for batch in BatchSchedule(index, 0).epoch(0) for item in batch.items]
    weights = Counter((item.record.is_reg, item.loss_weight) for item in items)
    assert weights == {(False, 1.0): 4, (True, 0.5): 4}
    assert not any(item.flipped for item in items)
    assert {item.crop for item in items} == {(0, 0, 64, 64)}


# ------------------------------------------------------------------------------- the data in numbers


@pytest.fixture
def summed(tmp_path, image):
    """A folder run: three cats in two buckets, one dog without caption, one regularisation image."""
    image(tmp_path / "train/3_cat/a.png", (64, 64), caption="cat, Red")
    image(tmp_path / "train/3_cat/b.png", (64, 64), caption="cat, blue")
    image(tmp_path / "train/3_cat/c.png", (60, 90), caption="cat")
    image(tmp_path / "train/1_big dog/d.png", (64, 64))
    image(tmp_path / "reg/1_animal/r.png", (64, 64), caption="animal")
    options = DatasetOptions(
        train_data_dir=tmp_path / "train",
        reg_data_dir=tmp_path / "reg",
        resolution="64",
        train_batch_size=4,
        enable_bucket=True,
        min_bucket_reso=32,
        max_bucket_reso=128,
        bucket_reso_steps=16,
    )
    return build_index(dataset_specs(options))


def test_metadata_has_sd_scripts_shapes(summed):
    assert dataset_dirs(summed) == {
        "1_big dog": {"n_repeats": 1, "img_count": 1},
        "3_cat": {"n_repeats": 3, "img_count": 3},
    }
    assert dataset_dirs(summed, reg=True) == {"1_animal": {"n_repeats": 1, "img_count": 1}}
    assert tag_frequency(summed) == {
        "1_big dog": {"big dog": 1},
        "3_cat": {"cat": 3, "red": 1, "blue": 1},
        "1_animal": {"animal": 1},
    }
    # 60/90 is nearest to 48/80 = 0.6 (64² area, steps of 16); ten training images bring ten regularisation images.
    (dataset,) = summed.datasets
    info = bucket_info(dataset)
    assert info["buckets"] == {
        "0": {"resolution": [48, 80], "count": 3},
        "1": {"resolution": [64, 64], "count": 3 + 3 + 1 + 10},
    }
    assert info["mean_img_ar_error"] == pytest.approx((60 / 90 - 48 / 80) / 5)
    (described,) = datasets_metadata(summed)
    assert (described["num_train_images"], described["num_reg_images"]) == (10, 1)
    assert described["bucket_info"] == info
    assert described["resolution"] == [64, 64]
    assert [subset["image_dir"] for subset in described["subsets"]] == ["1_big dog", "3_cat", "1_animal"]
    without_buckets = replace(dataset, spec=replace(dataset.spec, enable_bucket=False))
    assert bucket_info(without_buckets) is None


def test_summary(summed):
    (summary,) = summarize(summed)
    assert (summary.train_images, summary.reg_images, summary.images_per_epoch) == (4, 1, 20)
    assert summary.buckets == {(48, 80): 3, (64, 64): 17}
    assert summary.batches_per_epoch == 1 + 5 == BatchSchedule(summed, 0).batches_per_epoch
    assert [(folder.images, folder.with_caption, folder.repeats) for folder in summary.folders] == [
        (1, 0, 1),
        (3, 3, 3),
        (1, 1, 1),
    ]
    as_json = summary.as_json()
    assert as_json["buckets"][0] == {"resolution": [48, 80], "count": 3}
    assert as_json["folders"][0]["class_tokens"] == "big dog"


def test_folders_of_the_same_name_are_numbered(tmp_path, image, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image(tmp_path / "one/cat/a.png", caption="x")
    image(tmp_path / "two/cat/a.png", caption="y")
    file = tmp_path / "data.toml"
    file.write_text(
        "[[datasets]]\nresolution = 64\n"
        "[[datasets.subsets]]\nimage_dir = 'one/cat'\n[[datasets.subsets]]\nimage_dir = 'two/cat'\nnum_repeats = 2\n"
        "[[datasets]]\nresolution = 32\n[[datasets.subsets]]\nimage_dir = 'one/cat'\n"
    )
    index = build_index(dataset_specs(DatasetOptions(dataset_config=file)))
    assert dataset_dirs(index) == {
        "cat": {"n_repeats": 1, "img_count": 1},
        "cat (2)": {"n_repeats": 2, "img_count": 1},
        "cat (3)": {"n_repeats": 1, "img_count": 1},
    }
    assert tag_frequency(index) == {"cat": {"x": 1, "y": 1}}
    assert len(datasets_metadata(index)) == 2

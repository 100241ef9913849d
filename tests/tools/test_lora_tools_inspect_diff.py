"""What inspect and diff tell: numbers against the full matrices, findings, JSON, charts, readable metadata."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.files import data_hash
from maulstick.adapters.lora_family import FAMILIES
from maulstick.adapters.write_formats import layout_tensors, save_layout
from maulstick.cli import main
from maulstick.tools.diff_lora import diff_files
from maulstick.tools.inspect_lora import inspect_file
from maulstick.tools.lora_metadata import readable_facts
from maulstick.tools.low_rank import effective_rank
from tests.tools.lora_files import changes, random_lora, save_lora, sdxl_lora

GOLDEN = Path(__file__).parents[1] / "data" / "blocks" / "sdxl.json"
Q = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"


def root_sum(norms) -> float:
    return math.sqrt(sum(float(norm) ** 2 for norm in norms))


def as_json(capsys, *arguments: str):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------------------------------------------------------------
# Inspect


def test_the_numbers_are_those_of_the_matrices(tmp_path, capsys):
    modules = random_lora()
    path = save_lora(tmp_path / "a.safetensors", modules, dtype=torch.bfloat16, metadata={"ss_datasets": "[1, 2]"})
    facts = as_json(capsys, "inspect", str(path))
    stored = {name: delta_weight(weights) for name, weights in modules.items()}
    assert facts["kinds"] == {"LoRA": 350}
    assert facts["dtypes"] == ["bf16"]
    assert facts["parameters"] == sum(w.down.numel() + w.up.numel() for w in modules.values())
    assert facts["norm"] == pytest.approx(root_sum(delta.norm() for delta in stored.values()), rel=1e-2)
    by_name = {module["name"]: module for module in facts["modules"]}
    assert by_name.keys() == modules.keys()
    for name, module in list(by_name.items())[::11]:
        values = torch.linalg.svdvals(stored[name].flatten(1))
        assert module["norm"] == pytest.approx(float(values.norm()), rel=2e-2)
        assert module["effective_rank"] == pytest.approx(effective_rank(values), rel=2e-2)
        assert module["shape"] == list(stored[name].shape)
    blocks = {block["block"]: block for block in facts["blocks"]}
    assert list(blocks)[:3] == ["TE", "IN00", "IN01"]
    assert len(blocks) == 26
    assert blocks["IN04"]["modules"] == 16
    assert blocks["IN04"]["ranks"] == [2, 3]
    assert blocks["IN04"]["norm"] == pytest.approx(
        root_sum(m["norm"] for m in facts["modules"] if m["block"] == "IN04")
    )
    assert blocks["IN00"] | {"alphas": 0} == {
        "block": "IN00", "modules": 0, "ranks": [], "alphas": 0, "parameters": 0, "norm": None,
        "effective_rank": None, "zero_modules": 0,
    }  # fmt: skip
    assert facts["metadata"]["ss_datasets"] == [1, 2]
    whole = hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts["hashes"] == {
        "file_sha256": whole,
        "data_sha256": data_hash(path),
        "AutoV2": whole[:10],
        "AutoV3": data_hash(path)[:12],
    }
    assert facts["learned"] is True
    assert facts["findings"] == []


def test_a_lora_that_did_not_learn_says_so(tmp_path, capsys):
    modules = {name: w._replace(up=torch.zeros_like(w.up)) for name, w in random_lora().items()}
    path = save_lora(tmp_path / "untrained.safetensors", modules)
    facts = as_json(capsys, "inspect", str(path))
    assert facts["learned"] is False
    assert facts["findings"] == ["This LoRA did not learn: all 350 modules change nothing, their up weights are zero."]
    assert facts["norm"] == 0
    modules[Q] = random_lora()[Q]
    facts = inspect_file(save_lora(tmp_path / "hardly.safetensors", modules))
    assert facts.learned
    assert "349 of 350 modules change nothing" in facts.findings[0]
    assert "and 346 more" in facts.findings[0]


def test_broken_and_odd_files_are_described(tmp_path, capsys):
    tensors = {key: tensor.clone() for key, tensor in layout_tensors(random_lora(), FAMILIES["sd1"]).items()}
    tensors[f"{Q}.lora_up.weight"][1, 1] = float("nan")
    tensors["lora_unet_mid_block_attentions_0_proj_in.alpha"] = torch.tensor(0.0)
    path = tmp_path / "broken.safetensors"
    save_file(tensors, path, {"sshs_model_hash": "0" * 64})
    facts = as_json(capsys, "inspect", str(path))
    assert facts["not_finite"] == {f"{Q}.lora_up.weight": 1}
    assert facts["norm"] is None
    text = "\n".join(facts["findings"])
    assert f"Broken: tensor '{Q}.lora_up.weight' holds 1 values that are not finite" in text
    assert "hash in the metadata (000000000000) is not that of the tensors" in text
    assert "lora_unet has 2 different alphas; diffusers would apply one" in text
    assert "'lora_unet_mid_block_attentions_0_proj_in' has alpha 0" in text
    (module,) = [module for module in facts["modules"] if module["name"] == Q]
    assert (module["norm"], module["effective_rank"]) == (None, None)
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "! Broken: tensor" in shown


def test_relatives_and_sdxl(tmp_path):
    golden = json.loads(GOLDEN.read_text())
    path = tmp_path / "xl.safetensors"
    save_layout(path, layout_tensors(sdxl_lora(golden), FAMILIES["sdxl"]), {})
    facts = inspect_file(path)
    assert (facts.family, facts.layout) == ("SDXL", "kohya, UNet in SAI names")
    counts = {block.block: block.modules for block in facts.blocks}
    assert (counts["TE1"], counts["TE2"], counts["IN04"], counts["MID1"], counts["OUT00"]) == (2, 4, 26, 102, 106)
    dora = {"lora_down.weight": torch.ones(1, 4), "lora_up.weight": torch.ones(4, 1), "dora_scale": torch.ones(4, 1)}
    save_file({f"{Q}.{part}": tensor for part, tensor in dora.items()}, tmp_path / "dora.safetensors")
    facts = inspect_file(tmp_path / "dora.safetensors")
    assert facts.kinds == {"DoRA": 1}
    assert facts.norm is None


def test_tables_fit_and_show_all_that_matters(tmp_path, capsys):
    metadata = {
        "ss_tag_frequency": json.dumps({"10_cat": {"cat": 3, "a [red] hat": 5}}),
        "ss_network_args": json.dumps({"conv_dim": "2"}),
        "ss_learning_rate": "0.0001",
        "ss_clip_skip": "None",
        "modelspec.title": "style",
    }
    path = save_lora(tmp_path / "a.safetensors", random_lora(conv=False), metadata=metadata)
    assert main(["inspect", str(path), "--modules"]) == 0
    text = capsys.readouterr().out
    assert "264 LoRA modules for Stable Diffusion 1.x or 2.x" in text
    assert "no module in IN00, IN03, IN06, IN09, IN10, IN11, OUT00, OUT01, OUT02" in text
    assert "a [red] hat (5), cat (3)" in text
    assert "clip skip" not in text
    assert Q in text
    assert main(["inspect", str(path), "--metadata"]) == 0
    assert "ss_clip_skip" in capsys.readouterr().out


def test_history_is_readable(tmp_path, capsys):
    path = save_lora(tmp_path / "a.safetensors", random_lora(rank=4))
    assert main(["resize", str(path), "--rank", "2", "--output", str(tmp_path / "b.safetensors")]) == 0
    capsys.readouterr()
    facts = dict(readable_facts(as_json(capsys, "inspect", str(tmp_path / "b.safetensors"))["metadata"]))
    assert "maulstick resize from a.safetensors (rank 2, error 0." in facts["history"]
    assert readable_facts({"ss_tag_frequency": {"a": {"x": 1}}, "maulstick.history": ["odd"]}) == [
        ("most frequent tags", "x (1)"),
        ("history", "odd"),
    ]


def test_the_chart_shows_a_bar_for_every_block_in_proportion(tmp_path):
    modules = {
        f"lora_unet_down_blocks_{level}_attentions_0_proj_in": LoraWeights(
            torch.ones(1, 4, 1, 1), torch.ones(4, 1, 1, 1) * (level + 1), 1.0
        )
        for level in range(3)
    }
    path = save_lora(tmp_path / "a.safetensors", modules)
    chart = tmp_path / "chart.png"
    assert main(["inspect", str(path), "--chart", str(chart)]) == 0
    image = Image.open(chart).convert("RGB")
    assert image.width > 1500
    colour = (0x3B, 0x6F, 0xB6)
    columns: dict[int, int] = {}
    pixels = image.load()
    for x in range(image.width):
        height = sum(pixels[x, y] == colour for y in range(image.height))
        if height:
            columns[x] = height
    bars = [x for x in columns if x - 1 not in columns]
    heights = [columns[x + 3] for x in bars]
    assert len(bars) == 3
    # IN01, IN04 and IN07: as far apart as the blocks are, and as high as the norms are.
    assert bars[1] - bars[0] == bars[2] - bars[1] == 3 * 38 * 2
    assert [height / heights[0] for height in heights] == pytest.approx([1, 2, 3], rel=0.02)


def test_a_chart_must_be_a_png(tmp_path, capsys):
    path = save_lora(tmp_path / "a.safetensors", {Q: random_lora()[Q]})
    assert main(["inspect", str(path), "--chart", str(tmp_path / "chart.svg")]) == 2
    assert "should end in .png" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Diff


def test_distance_and_direction_are_those_of_the_matrices(tmp_path, capsys):
    first, second = random_lora(), random_lora(seed=3, rank=5, conv=False, text=False)
    second[Q] = first[Q]._replace(up=-first[Q].up)
    a = save_lora(tmp_path / "a.safetensors", first, metadata={"ss_epoch": "1", "same": "x"})
    b = save_lora(tmp_path / "b.safetensors", second, layout="diffusers", metadata={"ss_epoch": "2", "same": "x"})
    difference = as_json(capsys, "diff", str(a), str(b))
    x, y = changes(first), changes(second)
    zero = {name: torch.zeros_like(delta) for name, delta in x.items()} | {}
    y = {name: y.get(name, zero[name]) for name in x}
    whole = difference["whole"]
    assert whole["distance"] == pytest.approx(root_sum((x[name] - y[name]).norm() for name in x), rel=1e-4)
    assert whole["first_norm"] == pytest.approx(root_sum(delta.norm() for delta in x.values()), rel=1e-5)
    product = sum(float((x[name] * y[name]).sum()) for name in x)
    assert whole["cosine"] == pytest.approx(product / (whole["first_norm"] * whole["second_norm"]), abs=1e-5)
    assert (whole["modules"], whole["only_first"], whole["only_second"]) == (350, 350 - 192, 0)
    blocks = {block["block"]: block for block in difference["blocks"]}
    assert blocks["TE"]["cosine"] is None
    assert blocks["TE"]["relative_distance"] == pytest.approx(1.0)
    assert set(difference["metadata"]) == {"ss_epoch", "format", "sshs_model_hash", "sshs_legacy_hash"}
    assert difference["metadata"]["ss_epoch"] == ["1", "2"]
    only_q = diff_files(
        save_lora(tmp_path / "c.safetensors", {Q: first[Q]}), save_lora(tmp_path / "d.safetensors", {Q: second[Q]})
    )
    assert only_q.whole.cosine == pytest.approx(-1)
    assert only_q.whole.relative_distance == pytest.approx(2)


def test_the_same_lora_in_two_namings_does_not_differ(tmp_path, capsys):
    modules = sdxl_lora(json.loads(GOLDEN.read_text()))
    for names in ("sai", "diffusers"):
        save_layout(tmp_path / f"{names}.safetensors", layout_tensors(modules, FAMILIES["sdxl"], unet_names=names), {})
    difference = diff_files(tmp_path / "sai.safetensors", tmp_path / "diffusers.safetensors")
    assert difference.whole.distance == 0
    assert difference.whole.only_first == difference.whole.only_second == 0
    assert main(["diff", str(tmp_path / "sai.safetensors"), str(tmp_path / "diffusers.safetensors")]) == 0
    assert "+1.000" in capsys.readouterr().out


def test_small_differences_are_not_lost_beside_large_norms(tmp_path):
    """|A|^2 + |B|^2 - 2 A.B would leave nothing of a difference of one in ten million."""
    base = random_lora()[Q]
    nudged = base._replace(up=base.up.double().mul(1 + 1e-7).float())
    assert not torch.equal(nudged.up, base.up)
    a, b = save_lora(tmp_path / "a.safetensors", {Q: base}), save_lora(tmp_path / "b.safetensors", {Q: nudged})
    exact = float((delta_weight(base._replace(up=(base.up - nudged.up)))).norm())
    assert diff_files(a, b).whole.distance == pytest.approx(exact, rel=1e-3)


def test_files_that_cannot_be_compared(tmp_path, capsys):
    xl = save_lora(tmp_path / "xl.safetensors", sdxl_lora(json.loads(GOLDEN.read_text())), "sdxl")
    a = save_lora(tmp_path / "a.safetensors", random_lora(conv=False))
    assert main(["diff", str(a), str(xl)]) == 2
    assert "is a LoRA for Stable Diffusion 1.x or 2.x" in capsys.readouterr().err
    b = save_lora(tmp_path / "b.safetensors", {Q: LoraWeights(torch.ones(1, 3), torch.ones(7, 1), 1.0)})
    assert main(["diff", str(a), str(b)]) == 2
    assert "changes a weight of 64x64 in" in capsys.readouterr().err
    name = "lora_unet_up_blocks_3_attentions_0_proj_in"
    c = save_lora(tmp_path / "c.safetensors", {name: LoraWeights(torch.ones(1, 3, 1, 1), torch.ones(7, 1, 1, 1), 1.0)})
    assert diff_files(b, c).findings == ("The files have no module in common.",)

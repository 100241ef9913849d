"""The shapes of the quickstart's base model, and a text encoder that trains only the words that occur."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

VOCABULARY = 49408
BOS, EOS = 49406, 49407
TEXT_WIDTH = 128
NOISE_SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}


def build_text_encoder() -> CLIPTextModel:
    """A CLIP text encoder of 4 layers with random weights and the real vocabulary."""
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=77,
            hidden_act="quick_gelu",
            projection_dim=TEXT_WIDTH,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
    )
    torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=0.08)
    return encoder


def build_unet() -> UNet2DConditionModel:
    """The four levels and 12 + 1 + 12 blocks of SD 1.x, with narrow channels and random weights."""
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=2,
        block_out_channels=(48, 64, 96, 96),
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )


def build_noise_scheduler() -> DDPMScheduler:
    return DDPMScheduler(num_train_timesteps=1000, **NOISE_SCHEDULE)


class CompactTextEncoder:
    """Trains only the embedding rows of tokens that occur in `captions`; the other rows of the full encoder are zero."""

    def __init__(self, encoder: CLIPTextModel, tokenizer: CLIPTokenizer, captions: Iterable[str]):
        self.encoder, self.tokenizer = encoder, tokenizer
        occurring = {BOS, EOS}
        for caption in set(captions):
            occurring.update(tokenizer(caption).input_ids)
        self.rows = sorted(occurring)
        self.row_of = torch.zeros(VOCABULARY, dtype=torch.long)
        self.row_of[self.rows] = torch.arange(len(self.rows))
        full = encoder.get_input_embeddings().weight.data
        self.embedding = torch.nn.Embedding(len(self.rows), full.shape[1])
        self.embedding.weight.data.copy_(full[self.rows])
        # a zero row would start a new word at a saddle point
        silent = self.embedding.weight.data.abs().sum(1) == 0
        self.embedding.weight.data[silent] = 0.08 * torch.randn(int(silent.sum()), full.shape[1])
        encoder.set_input_embeddings(self.embedding)
        self.known: dict[str, Tensor] = {}

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.encoder.parameters())

    def encode(self, captions: list[str], length: int) -> Tensor:
        """Hidden states [n, length, 128]; padded and cut with the end token as CLIP pads."""
        ids = torch.full((len(captions), length), int(self.row_of[EOS]))
        for row, caption in enumerate(captions):
            if caption not in self.known:
                self.known[caption] = self.row_of[torch.tensor(self.tokenizer(caption).input_ids)]
            tokens = self.known[caption][:length]
            ids[row, : len(tokens)] = tokens
        ids[:, length - 1] = int(self.row_of[EOS])
        return self.encoder(ids).last_hidden_state

    def full_encoder(self) -> CLIPTextModel:
        """A copy with the whole vocabulary."""
        copy = build_text_encoder()
        weights = {name: value.clone() for name, value in self.encoder.state_dict().items()}
        name = next(name for name in weights if name.endswith("token_embedding.weight"))
        table = torch.zeros(VOCABULARY, TEXT_WIDTH)
        table[self.rows] = weights[name]
        copy.load_state_dict({**weights, name: table})
        return copy.eval()


def save_pipeline(
    output: Path, vae: AutoencoderKL, encoder: CLIPTextModel, tokenizer: CLIPTokenizer, unet: UNet2DConditionModel
) -> None:
    """Writes a diffusers folder, complete or not at all."""
    scheduler = DDIMScheduler(set_alpha_to_one=False, steps_offset=1, **NOISE_SCHEDULE)
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        pipeline.save_pretrained(folder)
        for old in sorted(output.rglob("*"), reverse=True):
            old.rmdir() if old.is_dir() else old.unlink()
        for path in Path(folder).rglob("*"):
            target = output / path.relative_to(folder)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)

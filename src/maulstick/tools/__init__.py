"""Programs around a LoRA: generate, and later merge, extract, resize, inspect."""

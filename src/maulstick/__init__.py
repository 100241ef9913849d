"""Maulstick: a LoRA and IP-Adapter trainer for Stable Diffusion whose runs finish, and finish well."""

__version__ = "0.1.0"

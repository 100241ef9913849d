"""Model families: thin adapters over diffusers."""

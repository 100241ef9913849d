"""From folders of captioned images to batches of latents and captions."""

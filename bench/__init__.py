"""Ratios against peers and limits, one command each, results as Markdown."""

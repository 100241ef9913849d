"""What is trained beside the frozen model: which modules, how they compute, and how they are written to files."""

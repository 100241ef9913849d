"""Pictures: prompts, drawing them, files with what they were drawn from, and sheets of several."""

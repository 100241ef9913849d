"""The training run: plan, loop, objective, optimizer, schedule, events."""

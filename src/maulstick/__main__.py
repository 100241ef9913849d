"""``python -m maulstick``, and what ``accelerate launch -m maulstick`` runs in every process."""

from maulstick.cli import run

if __name__ == "__main__":
    run()

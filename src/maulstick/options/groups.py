"""The groups of a run's options, in the order in which ``--help`` shows them, which is that of their making."""

from __future__ import annotations

from cyclopts import Group

MODEL = Group.create_ordered("Model")
NETWORK = Group.create_ordered("Network (what is trained)")
IP_ADAPTER = Group.create_ordered("IP-Adapter (network_type = ip_adapter)")
DATA = Group.create_ordered("Data")
RUN = Group.create_ordered("Run")
OPTIMIZER = Group.create_ordered("Optimizer")
SCHEDULE = Group.create_ordered("Learning-rate schedule")
OBJECTIVE = Group.create_ordered("Objective")
GUARDIAN = Group.create_ordered("Gradient guardian")
RESCUE = Group.create_ordered("Rescue")
AUTOPSY = Group.create_ordered("Autopsy")
VALIDATION = Group.create_ordered("Validation")
SAMPLES = Group.create_ordered("Samples while training")
METADATA = Group.create_ordered("Metadata of the file")
UPLOAD = Group.create_ordered("Upload (only with huggingface_repo_id)")
LOG = Group.create_ordered("Log")

"""What budgets are made of, for nodes and for the dry run alike."""

from __future__ import annotations

CARD_HEADROOM_GIB = 0.75
"""What a card's name promises and ComfyUI cannot have: the driver's context and the desktop."""
AUTOMATIC_HOST_SHARE = 0.6
"""Of what the machine or its container has free. The rest is for text encoders, the page cache of
the files themselves, and everybody else."""

"""What begins with a prompt: the watches, and the word to a page whose prompt is refused."""

from __future__ import annotations

from typing import Any

from .events import start_feed, tell_of_refusal
from .idle import start_watch
from .orders import note_prompt, refusal_of_prompt


def on_prompt(json_data: Any) -> Any:
    """ComfyUI's call for each prompt that arrives, before it is checked."""
    start_watch()
    start_feed()
    noted = note_prompt(json_data)
    refusal = refusal_of_prompt()
    if refusal is not None and isinstance(json_data, dict):
        tell_of_refusal(json_data.get("client_id"), refusal)
    return noted

"""ComfyUI-Courier core."""

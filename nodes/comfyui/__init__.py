"""The one place that names ComfyUI's internals. Importing it imports ComfyUI and does nothing."""

"""Speaking to a server: the two clients, their calls and records, and starting a ComfyUI."""

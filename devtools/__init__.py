"""What ``dev.py`` runs: set-up, a real ComfyUI as host, small models, demo and tests."""

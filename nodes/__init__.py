"""Adapts the core to ComfyUI: nodes, status, routes."""

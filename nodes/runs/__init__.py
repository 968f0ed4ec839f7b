"""Workflows that run by request: queued, followed, cancelled, reported."""

"""The models of this process: registry, status, events, and what hangs on one model."""

"""Requests to sleep, wake and change a budget: their records, and the services that answer."""

"""A workflow on this side: read, changed, checked against what a server has."""

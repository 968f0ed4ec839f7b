"""What stands in a graph: the nodes."""

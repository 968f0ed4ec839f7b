"""A plan without a server: what a file would take under two budgets."""

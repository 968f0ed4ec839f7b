"""Building a model of each kind on mapped weights."""

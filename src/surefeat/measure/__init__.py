"""Benchmarks: what is compared, by which rule, and the tables of it."""

"""Benchmarks: metrics with their conventions, ground-truth regions, rankings and controls."""

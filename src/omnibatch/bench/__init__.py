"""Workloads, measuring and tables."""

"""Benchmarks, and the models with which results are compared.

Seconds depend on the machine, so a benchmark reports ratios that were measured within one run.
"""

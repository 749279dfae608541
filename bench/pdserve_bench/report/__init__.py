"""Figures made of rows: percentiles, goodput, intervals, comparisons, and the files that keep them."""

"""The verdict of a benchmark: should this workload be disaggregated, how, and how sure is it."""

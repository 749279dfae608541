"""The health of workers by their results: accounts, ejection of outliers, and handicaps."""

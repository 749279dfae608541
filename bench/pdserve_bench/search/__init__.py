"""The search for the layout of the workers, and the rate, with the highest goodput."""

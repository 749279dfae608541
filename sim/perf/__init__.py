"""A cluster of any size on a clock of its own: production core and schedulers, cost models for the rest."""

"""The process that speaks with Ray for `pdserve up`, and may die."""

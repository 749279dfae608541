"""The types of settings, and labels of nodes. Pure."""

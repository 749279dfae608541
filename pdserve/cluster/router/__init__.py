"""One router kept up: adopted or started, watched, and its ports held."""

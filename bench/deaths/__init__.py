"""`make bench-deaths`: what clients notice when a part of a cluster dies, measured on a cluster with the default settings."""

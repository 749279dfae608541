"""OpenEngine on a port of a worker: control planes other than our router drive the worker by it (docs/openengine.md)."""

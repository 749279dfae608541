"""Tooling of the repository that turns one configuration into Kubernetes manifests; not part of the distribution."""

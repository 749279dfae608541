"""The commands of `pdserve`, one module each. A module imports Ray, gRPC and rich only when its command runs."""

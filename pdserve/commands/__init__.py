"""One module per command of `pdserve`. Modules import Ray, gRPC and rich only when their command runs."""

"""The router. This file turns off what gRPC does at a fork, before anything imports gRPC."""

import os

# The router forks, on uvloop, to start the process that checks grammars. gRPC would start its threads again in the child,
# between the fork and the exec, and they crashed there (SIGSEGV, grpcio 1.85). gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

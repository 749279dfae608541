"""The load generator: it sends the requests of a workload to a server and keeps a row of each."""

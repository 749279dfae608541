"""Programs that run in the environments of clients, with the packages of these alone."""

"""Help for tests that is shipped: a cluster of real processes without Ray, scripted peers, checks that nothing is left."""

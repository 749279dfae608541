"""`pdserve capacity`: the command, and its answer as tables."""

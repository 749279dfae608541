"""Pure: the scheduler, which decides the sequences and tokens of each step, and which blocks they share."""

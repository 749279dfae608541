"""The reading of weights: the files of a checkpoint, or no file at all, become what a model lays out."""

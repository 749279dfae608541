"""Whole models: the decoder in torch with its recorded steps, and the one in compiled code."""

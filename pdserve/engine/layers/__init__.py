"""The parts of a decoder layer, in torch."""

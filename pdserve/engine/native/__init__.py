"""Bindings of the compiled code for CPUs; its C++ is in src/."""

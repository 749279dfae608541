"""The commands of `pdserve bench`."""

"""The operations and the bytes that a model's steps need, for utilisation and capacity planning. Pure."""

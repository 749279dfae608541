"""The OpenAPI document of the HTTP front end. It is made of the structs that parse bodies and of the limits that check them."""

__all__ = ["answers", "descriptions", "document", "schemas"]

"""The charts of a verdict, drawn by matplotlib. Nothing here is imported before a page is made."""

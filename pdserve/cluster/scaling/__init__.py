"""The actuator: it starts, drains and moves workers so that both pools have their wanted sizes."""

__all__ = ["actuator", "limits", "report"]

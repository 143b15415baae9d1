"""Models are served when a test says so, and left as they were after it."""

from support.state import served_on_request

__all__ = ["served_on_request"]  # applies by being here

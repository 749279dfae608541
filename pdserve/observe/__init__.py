"""All that pdserve tells about itself: logs, metrics, stories of requests, and titles of processes."""

__all__ = ["log_files", "logs", "metrics", "metrics_pages", "snapshot", "story", "title"]

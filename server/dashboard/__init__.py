"""What people look at: the page at `/`, the last quarter of an hour that it and `draftd top` draw, and a list of events."""

"""Complete engines to copy from."""

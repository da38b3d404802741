"""Matching a request against its own tokens."""

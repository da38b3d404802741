"""Sorting suffixes to a bounded depth."""

"""Merging sorted suffixes into a suffix array while dropping evicted ones."""

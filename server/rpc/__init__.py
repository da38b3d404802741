"""The gRPC services of draftd.v1: thin servicers that convert, validate, call the core and convert back."""

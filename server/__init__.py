"""The draftd process: gRPC and HTTP endpoints, attachments, metrics and the command line over the drafting core."""

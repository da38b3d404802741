"""Committed documents between services over NATS JetStream. Only `replicator` and what it imports need nats-py."""

"""Replaying recorded sessions: engines that verify drafts greedily against the recorded outputs, over a real service.

`trace` reads sessions, `engine` is one engine, `processes` runs several, `service` a private service, `report` says what came of it.
"""

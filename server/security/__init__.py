"""Who may do what: tokens and their scopes, rights of each call, rate limits, certificates and the audit log.

The drafting core knows nothing of it. docs/security.md says what it defends against and what it does not.
"""

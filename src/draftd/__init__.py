"""draftd: a drafter as a service for LLM speculative decoding.

The packages below it live in top-level folders of the repository: `proto` (the API), `drafter` (corpus, index, matching, drafting),
`server` (the process) and `client` (what an engine installs).
"""

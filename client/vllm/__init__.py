"""vLLM drafts from a service: a plugin for Model Runner V2 (`plugin`, `speculator`), and a class for the V1 runner (`proposer`).

vLLM itself is imported nowhere in this package: what it needs of vLLM it is handed by vLLM. See docs/engines.md.
"""

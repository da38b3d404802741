"""The drafting core: corpus, suffix-array index, matching and drafting.

No network and no server imports: the service writes the index with it, engines that map the index draft with it.
"""

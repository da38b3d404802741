"""The draft rule `tree`: the suffix tree's rule with exact counts (arXiv 2411.04975)."""

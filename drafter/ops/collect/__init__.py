"""What an engine's rows and drafts became, carried to the host in the order of the stream."""

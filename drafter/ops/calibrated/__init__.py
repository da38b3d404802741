"""The draft rule `calibrated`: followers are counted anew at every draft position, and what their counts are worth is learned."""

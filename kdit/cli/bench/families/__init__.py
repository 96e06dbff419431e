"""Per family: what a request of kdit is called in the reference library."""

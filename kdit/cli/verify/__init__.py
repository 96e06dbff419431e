"""`kdit verify`: runs recorded reference cases and compares every stage."""

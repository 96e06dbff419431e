"""`kdit bench`: measures kdit side by side with diffusers on the same weights."""
